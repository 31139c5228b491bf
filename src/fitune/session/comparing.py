"""Trains one recipe by several methods, on the same data and seed, and sets the results side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitune.errors import FituneError, RecipeError, did_you_mean
from fitune.launch.signals import EXIT_CODES
from fitune.planner.defaults import default_learning_rate, optimizer_of, staging_of
from fitune.planner.methods import lomo_of
from fitune.recipe.contradictions import ADAPTERS_ONLY
from fitune.recipe.recipe import Recipe, given_keys, parse_recipe
from fitune.recipe.score_recipe import score_recipe
from fitune.report.methods_page import MethodRun, best_of, comparison_rows, write_methods_page
from fitune.report.run_files import read_run
from fitune.score.shards import remove_scores
from fitune.session.events import Emit, Event, Note, Planned, Result
from fitune.session.program import train_program
from fitune.session.reported import outcome_data, rows_data
from fitune.session.score.scoring import score_dataset
from fitune.stores.opening import is_url
from fitune.stores.writing import opened_store
from fitune.units import text_table
from fitune.values.plan import Full, Lora, Sgd, Tuning
from fitune.values.rules import adds_gradients_up
from fitune.values.words import describe_plan

METHODS: dict[str, dict[str, Any]] = {
    "full": {"tuning": "full"},
    "lora": {"tuning": "lora"},
    "qlora": {"tuning": "qlora"},
    "hqq": {"tuning": "qlora", "quantization": "hqq"},
    "dora": {"tuning": "lora", "dora": True},
    "lomo": {"tuning": "lomo"},
    "adalomo": {"tuning": "adalomo"},
}
"""Name of a method -> settings of the recipe."""


def compare_methods(
    recipe: Recipe, names: Sequence[str], *, score_data: str, overwrite: bool, emit: Emit
) -> int:
    """Train the recipe by every method, score each, write compare.html; returns the exit code.

    One folder for each method inside the recipe's output_dir. A method that cannot run, or fails, is told and left
    out: the page, written anew after every method, has the others. The code is 1 when one failed on its way.
    With ``upload_to``, or an output_dir behind a URL, every run and the page are sent there; grades stay here.
    """
    for name in names:
        if name not in METHODS:
            hint = did_you_mean(name, list(METHODS)) or f"known are {', '.join(METHODS)}"
            raise RecipeError(f"--tunings names {name!r}, which is not a method", hint=hint)
    if not names or len(set(names)) < len(names):
        raise RecipeError("--tunings names no method, or one of them twice", hint="--tunings full,lora,qlora")
    out = recipe.output_dir or "runs/compare"
    directory = Path(staging_of(out) if is_url(out) else out)
    recipe = recipe.model_copy(
        update={"output_dir": str(directory), "upload_to": out if is_url(out) else recipe.upload_to}
    )
    base = (
        _score(recipe.model, score_data, directory / "base", overwrite=overwrite, emit=emit)
        if score_data
        else {}
    )
    methods: list[MethodRun] = []
    failed = False
    for name in names:
        method, code = _train(recipe, name, directory, overwrite=overwrite, emit=emit)
        failed = failed or code == 1
        if score_data and method.run is not None and method.run.run is not None and method.run.run.exported:
            run = directory / name
            try:
                grades = _score(str(run), score_data, run, overwrite=overwrite, emit=emit)
                method = replace(method, grades=grades)
            except FituneError as error:  # the run is worth showing without
                emit(Note(f"{name} is not scored: {error}"))
                method, failed = replace(method, why_not=f"not scored: {error}"), True
        methods.append(method)
        if any(one.run for one in methods):
            page = write_methods_page(directory, methods, base_grades=base)
        if code not in (0, 1):
            return code
    if not any(method.run for method in methods):
        raise RecipeError("no method could be trained", hint="the reasons are above")
    text = f"\n{text_table(comparison_rows(methods, base))}\ncomparison: {page}"
    emit(Note(text, {"page": page, "sent": None, "base": base, "methods": [*_rows(methods, directory)]}))
    if recipe.upload_to:
        with opened_store(recipe.upload_to) as store:
            store.put_folder(page.parent, "", [page.name], keeps_others=True)
            url = store.below(page.name)
            emit(Note(f"sent: {url}", {"sent": url}))
    return int(failed)


def _rows(methods: Sequence[MethodRun], directory: Path) -> Iterator[dict[str, Any]]:
    """Yields the figures of each method for programs, and what it is best at; without a run, why there is none."""
    best = best_of({method.name: method.run for method in methods if method.run is not None})
    for method in methods:
        row: dict[str, Any] = {"name": method.name, "grades": method.grades, "why_not": method.why_not}
        if (files := method.run) is not None and files.run is not None:
            row |= outcome_data(files.run, directory / method.name)
            row["learning_rate"] = files.plan.schedule.learning_rate
            row["comparison"] = rows_data(files.comparison)
        yield row | {"best": best.get(method.name, [])}


def method_recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
    """The recipe by another method, with the same global batch.

    A learning rate that was given is scaled as fitune's defaults for the two methods differ: what suits adapters
    is far too much for all weights.
    """
    settings: dict[str, Any] = {**METHODS[name], "output_dir": str(directory / name), "export": None}
    if recipe.upload_to:
        settings["upload_to"] = f"{recipe.upload_to.rstrip('/')}/{name}"
    if recipe.push_to_hub:
        settings["push_to_hub"] = f"{recipe.push_to_hub}-{name}"
    if not adds_gradients_up(_tuning(recipe, name)):
        settings["gradient_accumulation_steps"] = 1
        if recipe.micro_batch_size is not None:
            settings["micro_batch_size"] = recipe.micro_batch_size * (recipe.gradient_accumulation_steps or 1)
    if name in ("full", "lomo", "adalomo"):
        settings |= dict.fromkeys(ADAPTERS_ONLY)
    if METHODS[name]["tuning"] != "qlora":
        settings["quantization_bits"] = None
    if name in ("lomo", "adalomo"):
        settings["optimizer"] = None
    if name != "full":
        settings["optimizer_in_backward"] = None
    if recipe.learning_rate is not None:
        usual, other = (
            default_learning_rate(
                _tuning(recipe, each), Sgd() if each in ("lomo", "adalomo") else optimizer_of(recipe)
            )
            for each in (name, recipe.tuning or "lora")
        )
        settings["learning_rate"] = recipe.learning_rate * usual / other
    return parse_recipe(
        {**given_keys(recipe), "quantization": None, "dora": None, **settings}, where=f"compare {name}"
    )


def _tuning(recipe: Recipe, name: str) -> Tuning:
    """A tuning of the kind that ``name`` trains, for its usual learning rate. What the recipe says of adapters is not
    read: what is wrong there keeps no other method out."""
    if name == "full":
        return Full()
    if name in ("lomo", "adalomo"):
        return lomo_of(recipe, adaptive=name == "adalomo")
    return Lora(rank=1, alpha=1, dropout=0.0, targets=())


def _train(
    recipe: Recipe, name: str, directory: Path, *, overwrite: bool, emit: Emit
) -> tuple[MethodRun, int]:
    """The method's run and 0; without a run when it was refused (0), failed (1) or was interrupted (as train says)."""
    emit(Note(f"\n{name}"))

    def emit_briefly(event: Event) -> None:
        """Passes the event on; a plan becomes one line, a result its words alone."""
        if isinstance(event, Planned):
            event = Note(describe_plan(event.report.chosen.plan))
        emit(Note(str(event)) if isinstance(event, Result) else event)  # the words alone

    try:
        own = method_recipe(recipe, name, directory)
        status = train_program(own, overwrite=overwrite, emit=emit_briefly, in_child=True)
    except FituneError as error:
        failed = error.exit_code != FituneError.exit_code
        emit(Note(f"{name} {'failed' if failed else 'is left out'}: {error}"))
        return MethodRun(name=name, run=None, why_not=str(error)), int(failed)
    if status in EXIT_CODES.values():
        return MethodRun(name=name, run=None, why_not="interrupted"), status
    if status:  # of an attempt in a process of its own, which said why
        emit(Note(f"{name} failed: its last attempt ended with exit code {status}"))
        return MethodRun(name=name, run=None, why_not="failed, as its last attempt says above"), 1
    return MethodRun(name=name, run=read_run(directory / name)), 0


def _score(model: str, data: str, directory: Path, *, overwrite: bool, emit: Emit) -> Mapping[str, float]:
    if overwrite:
        remove_scores(directory / "scores")  # answers of the model that was there before
    recipe = score_recipe(model=model, data=data, out=directory / "scores")
    return score_dataset(recipe, emit=emit).grades
