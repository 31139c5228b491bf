"""The first screen of a plan: whether it fits, how fast it is, what it costs, and other ways to train the model."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from shlex import quote, split

from fitune.errors import FituneError, NothingFits, RecipeError
from fitune.planner.candidates import Request
from fitune.planner.explain import describe_how, moment, unit_for, verdict_of
from fitune.planner.nothing_fits import fits_on_devices, machine_settings, on_large_cards, setting_words
from fitune.planner.search import first_choice
from fitune.planner.state_decisions import HOST_ASSUMED, NO_GPU
from fitune.recipe.contradictions import require_consistent
from fitune.recipe.recipe import Recipe, canonical_keys, given_keys, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.units import (
    NO_BREAK,
    counted,
    format_bytes,
    format_count,
    format_dollars,
    format_rate,
    format_seconds,
    wrapped,
)
from fitune.values.machines.gpus import most_gpus
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Lomo
from fitune.values.predictions import PlanReport, Priced
from fitune.values.rules import broken_rules
from fitune.values.words import describe_rates, method_name

LINES, COLUMNS = 20, 80
BAR = 18
TIGHT = 0.001
"""Share of the usable memory below which what is spare is called tight; what is kept free comes on top."""
_lines = partial(wrapped, columns=COLUMNS)
_GROUPS = {
    "weights": ("weights",),
    "gathered": ("gathered weights",),
    "trained, optimizer": ("adapters", "masters", "optimizer", "gradients"),
    "activations": ("activations", "recompute inputs", "hidden states", "temporaries"),
    "loss": ("loss",),
}
"""Terms of the memory table that a person weighs together; what is trained is named by ``grouped_terms``."""


Ways = Mapping[str, Priced]
"""Other ways to train the same model: what to type for one -> its plan, which may not fit."""
Settings = dict[str, object]
Machine = Callable[[Recipe], Hardware]
"""The hardware that a recipe names."""
Asked = Callable[[Settings], Request]
"""The request with settings on top."""


def other_ways(recipe: Recipe, taken: Priced, *, model: ModelSpec, machine: Machine) -> Ways:
    """Other methods, and fewer or more cards where that is cheaper or much faster: each is what typing it would give.

    A method that does not fit stands with the first larger machine that holds it, where there is one.
    """

    def asked(settings: Settings) -> Request:
        """The recipe with the settings, on the hardware that it names then."""
        changed = changed_recipe(recipe, ", ".join(f"{key}: {value}" for key, value in settings.items()))
        return Request.of(changed, model, machine(changed))

    ways = (*_other_methods(recipe, taken, asked), *_other_counts(recipe, taken, asked))
    return {setting_words(one, as_options=True): plan for one, plan in ways if plan}


def _planned(asked: Asked, settings: Settings) -> Priced | None:
    """The plan with the settings, which may not fit; None where they contradict others."""
    with suppress(FituneError):
        request = asked(settings)
        require_consistent(request.recipe, devices=request.hardware.num_gpus)
        return first_choice(request)
    return None


def _other_methods(recipe: Recipe, taken: Priced, asked: Asked) -> Iterator[tuple[Settings, Priced | None]]:
    own = method_name(taken.plan.tuning)
    for tuning in ("full", "lora", "qlora"):
        if tuning == own or (tuning == "full" and isinstance(taken.plan.tuning, Lomo)):
            continue
        settings: Settings = {"tuning": tuning}
        if recipe.quantization_is_asked_for:  # beside it tuning: lora is QLoRA, and tuning: full is refused
            settings["quantization"] = "none"
        found = _planned(asked, settings)
        if found is not None and not found.estimate.fits:
            yield _where_it_fits(recipe, settings, asked)
        else:
            yield settings, found


def _where_it_fits(recipe: Recipe, settings: Settings, asked: Asked) -> tuple[Settings, Priced | None]:
    """The first larger machine that holds the method on its devices: more of the same card, then 80 GB cards."""
    request = asked(settings)
    here = request.hardware
    if here.gpu.is_cpu or here.nodes > 1:
        return settings, None
    for gpus in (2, 4, 8):
        larger = settings | {"gpus": gpus}
        is_there = recipe.gpu and here.gpus_per_node < gpus <= most_gpus(recipe.gpu)
        if is_there and fits_on_devices(more := asked(larger)):
            return larger, first_choice(more)
    found = (
        None if "quantization" in settings else on_large_cards(request)
    )  # 80 columns have no room for both
    return (settings, None) if found is None else (settings | machine_settings(found), first_choice(found))


FEWER, MORE = 0.5, 1.5
"""Fewer cards are named where they keep this share of the speed, twice as many where they give so much more."""


def _other_counts(recipe: Recipe, taken: Priced, asked: Asked) -> Iterator[tuple[Settings, Priced | None]]:
    """Half and twice the cards of one node; more only of a card that was named, not of those that are here."""
    hardware, speed = taken.plan.hardware, taken.estimate.tokens_per_second
    if hardware.gpu.is_cpu or hardware.nodes > 1 or recipe.global_batch_size is not None:
        return
    here, own = hardware.gpus_per_node, method_name(taken.plan.tuning)
    counts = [(here // 2, FEWER)] if here > 1 else []
    counts += [(2 * here, MORE)] if recipe.gpu is not None and 2 * here <= most_gpus(recipe.gpu) else []
    for gpus, share in counts:
        settings: Settings = {"gpus": gpus}
        found = _planned(asked, settings)
        if found is not None and method_name(found.plan.tuning) != own:
            settings = {"tuning": own, "gpus": gpus}
            found = _planned(asked, settings)
        if found is not None and found.estimate.fits and found.estimate.tokens_per_second > share * speed:
            yield settings, found


_KEY_EQUALS = re.compile(r"((?:^|,)\s*[\w.-]+)\s*=")


def changed_recipe(recipe: Recipe, change: str) -> Recipe:
    """The recipe with the settings of ``zero: 3, backend: fsdp`` on top. Raises RecipeError as a recipe would."""
    text = change if change.lstrip().startswith("{") else "{" + _KEY_EQUALS.sub(r"\1: ", change) + "}"
    wanted = parse_value(text, where="--why")
    if not isinstance(wanted, dict) or not wanted or None in wanted.values():
        raise RecipeError(
            f"--why {change!r} sets nothing", hint='settings as in a recipe: "zero: 3, backend: fsdp"'
        )
    return parse_recipe({**given_keys(recipe), **canonical_keys(wanted, where="--why")}, where="--why")


def first_screen(report: PlanReport, ways: Ways, *, train: str) -> str:
    """At most 20 lines of 80 columns: the verdict, memory, speed, the job, other ways, what to type next.

    ``train``: the command that trains it.
    """
    change = "zero: 3" if report.chosen.plan.hardware.num_gpus > 1 else "gradient_checkpointing: false"
    head, command, notes = [*_verdict(report), *_ways(report.taken, ways)], [*_command(train)], _notes(report)
    shown = len(notes)
    while shown and "\n".join([*head, *notes[:shown], *command]).count("\n") + 2 > LINES:
        shown -= 1
    more = f"{counted(len(notes) - shown, 'note')} in" if shown < len(notes) else "More"
    last = f'  {more:<10} --details  --why "{change}"  --largest seq_len'
    return "\n".join([*head, *notes[:shown], *command, last])


def short_plan(report: PlanReport) -> str:
    """The verdict, memory, speed, the job, where it is written, and notes, of a plan that begins to run."""
    run = report.chosen.plan.run
    store = f", and from there {run.upload_to}" if run.upload_to else ""
    output = _lines(f"output   {run.output_dir}{store}", hanging=9)
    return "\n".join([*_verdict(report), output, *_notes(report)])


def _command(command: str) -> Iterator[str]:
    """The command to type; a line that goes on in the next one ends with a backslash, as shells read it."""
    line, parts = "  Train it  ", [""]
    for word in map(quote, split(command)):  # an option stays with its value
        if word.startswith("--"):
            parts.append(f" {word}")
        else:
            parts[-1] += f" {word}"
    for part in parts:
        if len(f"{line}{part} \\") > COLUMNS:
            yield f"{line} \\"
            line = " " * 12
        line += part
    yield line


def _verdict(report: PlanReport) -> Iterator[str]:
    yield _lines(f"✔ FITS   {verdict_of(report.taken.plan)}", indent=0, hanging=9)
    estimate = report.taken.estimate
    eighths = round(min(1.0, estimate.peak_bytes / estimate.usable_bytes) * BAR * 8)
    bar = ("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()).ljust(BAR, "·")
    for name, words in facts_of(report):
        if name != "memory":
            yield _lines(f"{name:<8} {words[0]}", hanging=9)
            continue
        used, left, terms = words
        yield f"  memory   {bar}   {used}, {left}"
        yield _lines(terms, indent=11)


Fact = tuple[str, tuple[str, ...]]
"""A name, and what is said of it: of memory what is used, what is left and the terms; of all else one text."""


def facts_of(report: PlanReport) -> Iterator[Fact]:
    """Yields the facts behind the verdict: how it trains, memory, host memory, speed, the job."""
    taken = report.taken
    yield from (
        ("but", (line.removeprefix("note on gpu: "),)) for line in report.decisions if line.startswith(NO_GPU)
    )
    plan, estimate = taken.plan, taken.estimate
    if broken := broken_rules(plan, "train"):
        yield "but", (f"this version only plans it: {broken[0].why(plan)}",)
    yield "how", (describe_how(plan),)
    yield "memory", _memory(taken)
    if set(estimate.host) - {"processes", "checkpoint copy"}:  # something of the training waits there
        usable = estimate.usable_host_bytes
        of = f" of {format_bytes(usable)}" if usable else ""
        assumed = any(line.startswith(HOST_ASSUMED) for line in report.decisions)
        said = " (assumed; --host-memory)" if assumed else ""
        yield "RAM", (f"{format_bytes(estimate.host_bytes)}{of} a node{said}",)
    yield "speed", (f"{format_rate(estimate.tokens_per_second)} · {describe_rates(plan)}",)
    yield _job(report)


def _memory(taken: Priced) -> tuple[str, str, str]:
    """Used and spare bytes, and the peak's terms, those that belong together as one."""
    estimate = taken.estimate
    used, usable = estimate.peak_bytes, estimate.usable_bytes
    spare = usable - used
    left = f"{format_bytes(abs(spare))} {'to spare' if spare >= 0 else 'short'}"
    if 0 <= spare < TIGHT * usable:
        left = f"tight: {format_bytes(spare)} spare"
    hardware = taken.plan.hardware
    kept = hardware.gpu.memory_bytes - hardware.taken_bytes - estimate.usable_bytes
    unit, name = unit_for(used)
    sizes = grouped_terms({**estimate.memory.phases[estimate.memory.peak_phase], **estimate.memory.outside})
    terms = " · ".join(
        f"{term}{NO_BREAK}{size / unit:.1f}" for term, size in sizes.items() if size >= unit / 20
    )
    when = moment(estimate.memory.peak_phase)
    kept_free = f"{format_bytes(kept)} kept{NO_BREAK}free"
    return (
        f"{format_bytes(used)} of {format_bytes(usable)}",
        left,
        f"peak {when}: {terms} {name}; {kept_free}",
    )


def grouped_terms(terms: Mapping[str, int]) -> dict[str, int]:
    """Bytes by the groups that a person weighs together, and the rest."""
    left = dict(terms)
    sizes = {name: sum(left.pop(term, 0) for term in group) for name, group in _GROUPS.items()}
    trained = "adapters" if terms.get("adapters") else "gradients"
    return {name.replace("trained", trained): size for name, size in sizes.items()} | {
        "rest": sum(left.values())
    }


def _job(report: PlanReport) -> Fact:
    """The whole run on the data; without data, what a million tokens take and cost."""
    taken, run = report.taken, report.run
    if run is not None:
        cost = f", {format_dollars(run.cost)}" if run.cost else ""
        about = "about " if run.epoch.guess else ""
        epochs = "" if run.steps == run.steps_per_epoch else f" × {float(f'{run.epochs:.2g}'):g} epochs"
        rows = f"{about}{counted(run.epoch.rows, 'row')}{epochs}, {format_count(run.epoch.tokens * run.epochs)} tokens"
        return "your job", (f"{rows}: {format_seconds(run.seconds)}{cost}",)
    seconds = 1e6 / taken.estimate.tokens_per_second
    price = report.price_per_gpu_hour
    cost = f", {format_dollars(seconds / 3600 * price * taken.plan.hardware.num_gpus)}" if price else ""
    return "a job", (f"a million tokens take {format_seconds(seconds)}{cost}",)


def _ways(taken: Priced, ways: Ways) -> Iterator[str]:
    rows = []
    for change, priced in ways.items():
        estimate = priced.estimate
        ratio = estimate.tokens_per_second / taken.estimate.tokens_per_second
        speed = "as fast" if abs(ratio - 1) < 0.005 else f"{ratio:.{1 if ratio >= 2 else 2}f} × as fast"
        rows.append((change, estimate.peak_bytes, speed))
    if rows:
        yield from change_table("Other ways", rows)


def change_table(title: str, rows: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    """Changes with the bytes of a device and the speed in words, in columns."""
    width = max(len(change) for change, _, _ in rows) + 2
    yield f"  {title:<{width}}{'memory':>12}  speed"
    for change, peak, speed in rows:
        yield f"    {change:<{width - 2}}{format_bytes(peak):>12}  {speed}"


def screen_of_nothing(error: NothingFits, *, as_options: bool) -> str:
    """Returns the first screen for an error: what is needed, what is there, and a table of changes that fit, as
    options of the command line or as keys of a recipe."""
    facts = error.facts
    lines = [_lines(f"✘ DOES NOT FIT   {facts['what']}", indent=0, hanging=9)]
    for short in facts["short"]:
        needed, usable, of = short["needed_bytes"], short["usable_bytes"], short["of"]
        lines.append(_lines(f"needed   {format_bytes(needed)} {of}, at the least: {facts['how']}", hanging=9))
        lines.append(f"  usable   {format_bytes(usable)} {of}: {format_bytes(needed - usable)} short")
    rows = [
        (
            setting_words(one["settings"], as_options=as_options),
            one["peak_bytes"],
            format_rate(one["tokens_per_second"]),
        )
        for one in facts["changes"]
    ]
    if rows:
        lines += change_table("Changes that work", rows)
    else:
        lines.append(_lines(f"try      {error.hint}", hanging=9))
    return "\n".join([*lines, "  More     --details   --json"])


def _notes(report: PlanReport) -> list[str]:
    """Notes of the decisions, the one on speed first, without those that have a line of their own."""
    notes = [
        line
        for line in report.decisions
        if line.startswith("note on ") and not line.startswith((HOST_ASSUMED, "note on times", NO_GPU))
    ]
    notes.sort(key=lambda line: not line.startswith("note on speed"))
    return [_lines(line, hanging=2) for line in notes]
