"""The planner's page: a question becomes the plan and the words of the first screen, and the page shows them; and
beside it the page of a folder's runs.

A model is a name of the built-in table or a config.json that was pasted: no path of a question is ever read.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import yaml

from fitune.credentials import without_credentials
from fitune.errors import FituneError, ModelError, NothingFits, RecipeError, joined_hints
from fitune.estimate.predict import predict
from fitune.measure.hardware import calibrated
from fitune.planner.defaults import PRICES, price_of
from fitune.planner.explain import verdict_of
from fitune.planner.first_screen import (
    facts_of,
    first_screen,
    grouped_terms,
    other_ways,
)
from fitune.planner.search import taken_on
from fitune.planner.whole_run import whole_run
from fitune.recipe.fleet import parse_fleet
from fitune.recipe.keys import option_of, values_of
from fitune.recipe.recipe import Recipe, canonical_keys, given_keys, parse_recipe
from fitune.report.local_pages import (
    LONGEST_QUERY,
    answer_html,
    bars_of,
    clusters_html,
    planner_html,
    rent_html,
    serve,
    ways_html,
)
from fitune.report.page import write_page
from fitune.session.planning import plan_for, wanted_hardware, with_average_row
from fitune.session.recipes.reading import split_words
from fitune.units import (
    MOST_EPOCH_ROWS,
    format_bytes,
    format_dollars,
    format_rate,
    format_seconds,
    whole_number,
)
from fitune.values.model.model_config import (
    known_model_spec,
    load_model_spec,
    spec_from_config,
    unknown_model,
)
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Plan
from fitune.values.predictions import Estimate, PlanReport, Priced
from fitune.values.words import describe_devices, describe_placement, method_name

KEYS = ("model", "gpu", "gpus", "nodes", "tuning", "seq_len", "mean_row_tokens")
"""Keys of a recipe that a question may have; beside them it has ``config``, ``rows`` and ``fleet``."""
PASTED = "YOUR_MODEL_FOLDER"
"""Name of a model whose config.json was pasted."""

MILLION = 1_000_000
"""Tokens that time and cost are of, where no number of rows is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question that was read."""

    recipe: Recipe
    model: ModelSpec
    rows: int | None = None


def read_question(question: Mapping[str, str]) -> Asked:
    """Raises RecipeError or ModelError, as the command line does for the same words."""
    given = {key: value.strip() for key, value in question.items() if value.strip()}
    config = given.pop("config", "")
    rows = given.pop("rows", None)
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise RecipeError(f"the page knows no {unknown[0]!r}", hint=", ".join((*KEYS, "config", "rows")))
    if rows is not None and not whole_number(rows, most=MOST_EPOCH_ROWS):
        raise RecipeError(
            f"rows = {rows[:40]!r} is not a whole number from 1 to {MOST_EPOCH_ROWS:,}", hint="rows=50000"
        )
    given = {**given, "model": PASTED} if config else given
    _, options = split_words([f"--{key}={value}" for key, value in given.items()])
    recipe = parse_recipe(canonical_keys(options, where="the page"), where="the page")
    if config:
        try:
            values = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"the pasted config.json is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ModelError("the pasted config.json is no JSON object", hint="paste the whole file")
        model = spec_from_config(values, name=PASTED, where="the pasted config.json")
    elif (known := known_model_spec(recipe.model)) is None:
        no = unknown_model(recipe.model, why="the page takes the names it lists")
        raise ModelError(no.message, hint=joined_hints(no.hint, "another model: paste its config.json"))
    else:
        model = known
    return Asked(recipe=recipe, model=model, rows=int(rows) if rows else None)


def _run(asked: Asked, plan: Plan, price: float) -> Any:
    from fitune.session.clusters.fleet import full_rows  # for those who say how many rows

    return whole_run(plan, full_rows(plan, asked.rows), price_per_gpu_hour=price)


def _without(question: Mapping[str, str], *keys: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, value) for key, value in question.items() if key not in keys))


@lru_cache(maxsize=64)  # the verdict and the ways ask for the same
def _planned(question: tuple[tuple[str, str], ...]) -> tuple[Asked, PlanReport] | FituneError:
    """The plan as the command line makes it, with its run on so many full rows; or the error that it ends with."""
    try:
        asked = read_question(dict(question))
        report = plan_for(asked.recipe, model=asked.model)
        run = _run(asked, report.taken.plan, report.price_per_gpu_hour) if asked.rows else None
    except FituneError as error:
        return error.with_traceback(None)  # it is kept, and would keep all that the search held
    return asked, replace(report, run=run)


def answer(question: Mapping[str, str]) -> str:
    """HTML of the verdict, or of the error that the command line prints. Raises nothing."""
    found = _planned(_without(question, "fleet"))
    if isinstance(found, FituneError):
        return _refused(found)
    asked, report = found
    return _shown(asked, report, _command(asked.recipe))


def _refused(error: FituneError) -> str:
    """HTML of an error; where nothing fits and its numbers are known, of the memory needed and the changes that fit."""
    if not isinstance(error, NothingFits) or not error.facts:
        return answer_html(error=error)
    facts = error.facts
    changes = [
        (one["change"], format_bytes(one["peak_bytes"]), format_rate(one["tokens_per_second"]))
        for one in facts["changes"]
    ]
    bars = bars_of({"needed": {"at the peak": facts["needed_bytes"]}}, limit=facts["usable_bytes"])
    nothing = {"what": facts["what"], "changes": changes, "memory": bars}
    return answer_html(error=error, nothing=nothing)


def _shown(asked: Asked, report: PlanReport, train: str) -> str:
    taken = report.taken
    memory = taken.estimate.memory
    phases = {
        phase.value: grouped_terms({**terms, **memory.outside}) for phase, terms in memory.phases.items()
    }
    usable = taken.estimate.usable_bytes
    keys = given_keys(asked.recipe)
    keys.setdefault("data", "YOUR.jsonl")
    return answer_html(
        verdict=verdict_of(taken.plan),
        facts=[(name, ", ".join(words)) for name, words in facts_of(report)],
        memory=bars_of(phases, limit=usable),
        lengths=bars_of(_by_length(taken.plan), limit=usable),
        report=report,
        recipe=without_credentials(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)),
        command=train,
    )


def _by_length(plan: Plan) -> dict[str, dict[str, int]]:
    """The plan's own peak with other lengths of rows, one row in a micro-batch, until the first that does not fit."""
    lengths = {2**power for power in range(9, 18)} | {plan.batch.seq_len}
    found = {}
    for length in sorted(one for one in lengths if one <= plan.model.max_seq_len):
        of_length = replace(plan, batch=replace(plan.batch, seq_len=length, micro_batch_size=1))
        estimate = predict(of_length)
        found[f"{length:,} tokens"] = {"peak": estimate.peak_bytes}
        if estimate.peak_bytes > estimate.usable_bytes:
            break
    return found


def _command(recipe: Recipe) -> str:
    words = [word for key, value in given_keys(recipe).items() for word in (option_of(key), str(value))]
    return without_credentials(shlex.join(["fitune", "train", *words, "--data", "YOUR.jsonl"]))


def ways(question: Mapping[str, str]) -> str:
    """HTML of the ways that fit, and of the first screen; empty where the answer is an error. Raises nothing."""
    found = _planned(_without(question, "fleet"))
    if not isinstance(found, FituneError):
        asked, report = found
        with suppress(FituneError):
            return _table(asked, report, _command(asked.recipe))
    return ""


def _table(asked: Asked, report: PlanReport, train: str) -> str:
    others = other_ways(asked.recipe, report.taken, model=asked.model, machine=wanted_hardware)
    own = method_name(report.taken.plan.tuning)
    rows = [_way(asked, "this plan", report.taken)]
    rows += [
        _way(asked, "other placement", one)
        for one in report.runners_up
        if method_name(one.plan.tuning) == own
    ]
    rows += [_way(asked, change, one) for change, one in others.items() if one.estimate.fits]
    of = f"{asked.rows:,} rows" if asked.rows else "a million tokens"
    screen = first_screen(report, others, train=train)
    return ways_html(rows=rows, of=of, screen=screen)


def _way(asked: Asked, change: str, priced: Priced) -> dict[str, Any]:
    """A row of the table: words, and the numbers to sort by."""
    plan, estimate = priced.plan, priced.estimate
    price = asked.recipe.price_per_gpu_hour or price_of(plan.hardware.gpu)
    seconds = MILLION / estimate.tokens_per_second
    if asked.rows:
        seconds = _run(asked, plan, price).seconds
    cost = seconds / 3600 * price * plan.hardware.num_gpus
    return {
        "change": change, "method": method_name(plan.tuning), "devices": describe_devices(plan.hardware),
        "placement": describe_placement(plan), **_figures(estimate, seconds, cost if price else None),
    }  # fmt: skip


def _figures(estimate: Estimate, seconds: float, cost: float | None) -> dict[str, Any]:
    """Memory, speed, time and cost of a row: words, and the numbers to sort by."""
    return {
        "peak": estimate.peak_bytes, "memory": format_bytes(estimate.peak_bytes),
        "tokens_per_second": estimate.tokens_per_second, "speed": format_rate(estimate.tokens_per_second),
        "seconds": seconds, "time": format_seconds(seconds), "dollars": cost or 0.0,
        "cost": "–" if cost is None else format_dollars(cost),
    }  # fmt: skip


def rent(question: Mapping[str, str]) -> str:
    """HTML of rows for 1, 2, 4 and 8 of the ``card`` that is named, on one machine: of each the plan that is taken
    there, as if the question had named it. Empty where nothing fits or the question is an error. Raises nothing."""
    rest = dict(_without(question, "card", *_PLACE))
    rows = []
    for count in ("1", "2", "4", "8"):
        try:
            asked = read_question({**rest, "gpu": question.get("card", ""), "gpus": count})
            if asked.recipe.gpu not in PRICES:
                return ""
            hardware = wanted_hardware(asked.recipe)
            taken = taken_on(asked.recipe, model=asked.model, hardware=hardware)
        except FituneError:
            continue
        if taken is not None:
            rows.append(_way(asked, "", taken))
    return rent_html(rows=rows)


_PLACE = ("gpu", "gpus", "nodes", "fleet")
"""Keys of a question that name the hardware."""


def clusters(question: Mapping[str, str]) -> str:
    """HTML of the clusters of the pasted fleet file, ranked as by ``plan --fleet``, or of its error; empty without one
    or where the rest of the question is an error. Nobody is asked what is free, no model's file is read.
    Raises nothing."""
    from fitune.planner.clusters.fleet import rank_fleet  # for those who paste one
    from fitune.planner.clusters.ranking import Wanted
    from fitune.session.clusters.fleet import full_rows

    if not question.get("fleet", "").strip():
        return ""
    try:
        asked = read_question(dict(_without(question, *_PLACE)))
    except FituneError:
        return ""
    try:
        ranking = rank_fleet(
            asked.recipe, parse_fleet(question["fleet"], source="the pasted fleet file"), Wanted(), model=asked.model,
            epoch_of=lambda plan: full_rows(
                plan, asked.rows or -(-MILLION // plan.batch.usual_row_tokens)
            ),
            fetches_model=asked.recipe.model != PASTED, known=calibrated,
        )  # fmt: skip
    except FituneError as error:
        return clusters_html(error=error)
    rows = [
        {"offer": offer, "free": offer.row()[2], **_figures(offer.priced.estimate, offer.seconds, offer.cost)}
        for offer in ranking.offers
    ]
    return clusters_html(ranking=ranking, rows=rows)


def page(question: Mapping[str, str], *, runs: bool = False) -> str:
    """The whole page, whose script asks for the answer to the address's query."""
    choices = {key: values_of(f"--{key}") for key in ("model", "gpu", "tuning")}
    return planner_html(
        question=question, choices=choices, answer="", ways="", live=True, cards=tuple(PRICES), runs=runs
    )


def write_plan_page(recipe: Recipe, found: PlanReport | NothingFits, path: Path, *, train: str) -> Path:
    """Write what was ``found`` for a recipe as one file, with no form and no server; ``train`` is the command that it
    names. Raises RunDirectoryError for a file that cannot be written."""
    if isinstance(found, NothingFits):
        shown, table = _refused(found), ""
    else:
        asked = Asked(recipe=recipe, model=load_model_spec(recipe.model))
        on_data = replace(asked, recipe=with_average_row(recipe, found.taken.plan))  # as the terminal's ways
        train = without_credentials(train)  # the file may be sent to others
        shown, table = _shown(asked, found, train), _table(on_data, found, train)
    return write_page(path, planner_html(question={}, choices={}, answer=shown, ways=table, live=False))


def query_of_link(link: str) -> str:
    """The query, with its ``?``, of an earlier page's address, or of the part of one that is a question.

    An address lives as long as its process: nothing of its host, port and token is taken. Raises RecipeError.
    """
    try:
        parts = urlsplit(link.strip())
        question = dict(parse_qsl(parts.query or parts.path, strict_parsing=True, errors="strict"))
        query = urlencode(question)
    except ValueError:  # no address, no pairs of key=value, no UTF-8
        question, query = {}, ""
    if not question or not question.keys() <= _ASKED or len(query) > LONGEST_QUERY:
        raise RecipeError(
            f"{link[:80]!r} is no link of a planner's page with a question of at most {LONGEST_QUERY:,} characters",
            hint="'http://127.0.0.1:PORT/TOKEN/?model=Qwen/Qwen2.5-14B&gpu=rtx-4090', the part behind its ? alone, "
            "or fitune ui without a link",
        )
    return f"?{query}"


_ASKED = {*KEYS, "config", "rows", "fleet"}
"""Keys of a question in an address."""


def serve_planner(
    port: int, *, runs: Path | None, log: Callable[[str], object], link: str | None = None
) -> None:
    """Answer on 127.0.0.1 until Ctrl-C; ``log`` gets the address. ``runs``: a folder whose runs have a page, too;
    ``link``: an earlier page's, whose question the address gets. Raises RecipeError for another."""
    query = "" if link is None else query_of_link(link)
    answers: dict[str, Callable[[Mapping[str, str]], str]] = {
        "": partial(page, runs=runs is not None),
        "answer": answer,
        "ways": ways,
        "rent": rent,
        "clusters": clusters,
    }
    if runs is not None:
        from fitune.session.watching import RunsFolder  # reads reports: only for those who ask

        folder = RunsFolder(runs)
        answers |= {"runs": folder.page, "runs-table": folder.table, "run": folder.run}
    serve(answers, port=port, tell=lambda address: log(address + query))
