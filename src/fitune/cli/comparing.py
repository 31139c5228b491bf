"""``fitune compare``: the same recipe by several methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.cli.training import train_recipe
from fitune.errors import FituneError, RecipeError, did_you_mean
from fitune.planner.defaults import default_learning_rate, optimizer_of
from fitune.planner.families import lomo_of, lora_of, nf4_of
from fitune.report.methods_page import HEAD, MethodRun, comparison_rows, write_comparison
from fitune.report.run_files import read_run
from fitune.report.text_table import text_table
from fitune.spec.model_config import load_model_spec
from fitune.spec.plan import DataSource, Full, Sgd, Tuning
from fitune.spec.recipe import Recipe, parse_recipe

METHODS: dict[str, dict[str, Any]] = {
    "full": {"tuning": "full"},
    "lora": {"tuning": "lora"},
    "qlora": {"tuning": "qlora"},
    "hqq": {"tuning": "qlora", "quantization": "hqq"},
    "dora": {"tuning": "lora", "dora": True},
    "lomo": {"tuning": "lomo", "gradient_accumulation_steps": 1},
    "adalomo": {"tuning": "adalomo", "gradient_accumulation_steps": 1},
}
"""What each name sets in the recipe."""


def compare_methods(recipe: Recipe, names: Sequence[str], *, score_data: str, overwrite: bool) -> int:
    """Train the recipe by every method, score each, write compare.html; returns the exit code.

    One folder for each method inside the recipe's output_dir. A method that cannot run is told and left out.
    """
    _refuse_unknown(names)
    directory = Path(recipe.output_dir or "runs/compare")
    methods = [_train(recipe, name, directory, overwrite=overwrite) for name in names]
    if not any(method.run for method in methods):
        raise RecipeError("no method could be trained", hint="the reasons are above")
    base = _score(recipe.model, "", score_data, directory / "base", overwrite=overwrite) if score_data else {}
    methods = [_scored(recipe, method, score_data, directory, overwrite=overwrite) for method in methods]
    print("\n" + text_table([HEAD, *comparison_rows(methods)]))
    print(f"comparison: {write_comparison(directory, methods, base_grades=base)}")
    return 0


def _refuse_unknown(names: Sequence[str]) -> None:
    for name in names:
        if name not in METHODS:
            hint = did_you_mean(name, list(METHODS)) or f"known are {', '.join(METHODS)}"
            raise RecipeError(f"--tunings names {name!r}, which is no method", hint=hint)
    if not names or len(set(names)) < len(names):
        raise RecipeError("--tunings names no method, or one of them twice", hint="--tunings full,lora,qlora")


def method_recipe(recipe: Recipe, name: str, directory: Path) -> Recipe:
    """The recipe by another method, with the same global batch.

    A learning rate that was given is scaled as fitune's defaults for the two methods differ: what suits adapters
    is far too much for all weights.
    """
    settings: dict[str, Any] = {**METHODS[name], "output_dir": str(directory / name), "export": None}
    if METHODS[name].get("gradient_accumulation_steps") == 1 and recipe.micro_batch_size is not None:
        settings["micro_batch_size"] = recipe.micro_batch_size * (recipe.gradient_accumulation_steps or 1)
    if name in ("lomo", "adalomo"):
        settings["optimizer"] = None
    if recipe.learning_rate is not None:
        settings["learning_rate"] = (
            recipe.learning_rate * _usual_rate(recipe, name) / _usual_rate(recipe, _own(recipe))
        )
    given = recipe.model_dump(include=recipe.model_fields_set)
    return parse_recipe({**given, "quantization": None, "dora": None, **settings}, where=f"compare {name}")


def _own(recipe: Recipe) -> str:
    return recipe.tuning or "lora"


def _usual_rate(recipe: Recipe, name: str) -> float:
    optimizer = Sgd() if name in ("lomo", "adalomo") else optimizer_of(recipe)
    return default_learning_rate(_tuning(recipe, name), optimizer)


def _tuning(recipe: Recipe, name: str) -> Tuning:
    if name == "full":
        return Full()
    if name in ("lomo", "adalomo"):
        return lomo_of(recipe, adaptive=name == "adalomo")
    return lora_of(recipe, load_model_spec(recipe.model), nf4_of(recipe))


def _train(recipe: Recipe, name: str, directory: Path, *, overwrite: bool) -> MethodRun:
    print(f"\n{name}")
    try:
        own = method_recipe(recipe, name, directory)
        status = train_recipe(own, overwrite=overwrite, quiet_plan=True)
    except FituneError as error:
        if error.exit_code == 1:  # it began and failed: the others would be held against half a run
            raise
        print(f"{name} is left out: {error}")
        return MethodRun(name=name, run=None, why_not=str(error))
    if status:
        raise SystemExit(status)
    return MethodRun(name=name, run=read_run(directory / name))


def _scored(recipe: Recipe, method: MethodRun, data: str, directory: Path, *, overwrite: bool) -> MethodRun:
    if not data or method.run is None or method.run.run is None or not method.run.run.exported:
        return method
    exported = Path(method.run.run.exported)
    is_adapter = (exported / "adapter_config.json").is_file()
    model, adapter = (recipe.model, str(exported)) if is_adapter else (str(exported), "")
    grades = _score(model, adapter, data, directory / method.name, overwrite=overwrite)
    return MethodRun(name=method.name, run=method.run, grades=grades)


def _score(model: str, adapter: str, data: str, directory: Path, *, overwrite: bool) -> Mapping[str, float]:
    from fitune.score.manifest import remove_scores
    from fitune.score.run import ScorePlan, score

    if overwrite:
        remove_scores(directory / "scores")  # answers of the model that was there before
    plan = ScorePlan(
        model=model, adapter=adapter, data=DataSource(path=data), output_dir=str(directory / "scores")
    )
    return score(plan, say=print).grades
