"""A ScoreRecipe becomes a ScorePlan: the weights and the adapter that its names stand for. No torch here."""

from pathlib import Path

from fitune.errors import RecipeError
from fitune.score.plan import ScorePlan, plan_from
from fitune.spec.recipe.score_recipe import ScoreRecipe

_ADAPTER = "adapter_config.json"


def plan_of(recipe: ScoreRecipe) -> ScorePlan:
    """The plan of a scoring, whose model and adapter are folders or Hub ids. Raises RecipeError for two adapters, a run
    that trained none, and an engine that is unknown."""
    model, adapter = weights_and_adapter(recipe.model, recipe.adapter)
    return plan_from(recipe, model=model, adapter=adapter)


def weights_and_adapter(model: str, adapter: str) -> tuple[str, str]:
    """Weights and the adapter on them, where ``model`` names a run or an adapter, or ``adapter`` names a run; else both
    as they are. Raises RecipeError for two adapters, and for a run that trained none."""
    folder = Path(model)
    is_base = not _is_run(folder) and (
        (folder / "config.json").is_file() or not (folder / _ADAPTER).is_file()
    )
    if is_base and not _is_run(Path(adapter)):
        return model, adapter
    from fitune.session.named_models import find_model  # imports torch

    if is_base:
        found = find_model(adapter)
        if not found.adapter:
            raise RecipeError(f"--adapter {adapter}: the run has no adapter", hint=f"--model {found.model}")
        return model, found.adapter
    found = find_model(model)
    if adapter and found.adapter:
        raise RecipeError(
            f"--model {model} has the adapter {found.adapter}, and --adapter names {adapter}",
            hint=f"keep one of them; its base is {found.model}",
        )
    return found.model, found.adapter or adapter


def _is_run(folder: Path) -> bool:
    return folder != Path() and (folder / "plan.json").is_file()
