"""The optimisation matrix: for each model and length of rows the plan that is taken, and which settings fit.

The form is that of "A Study of Optimizations for Fine-tuning Large Language Models" (arXiv 2406.02290); the cells
are this planner's own search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.errors import RecipeError
from fitune.planner.added_tokens import with_added_rows
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import Method
from fitune.planner.placements import Placement
from fitune.planner.precision import methods_for
from fitune.planner.refusals import refuse_contradictions
from fitune.planner.search import first_choice
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Ddp, Sharding, Zero
from fitune.spec.recipe import Recipe
from fitune.spec.reports import Priced
from fitune.spec.words import method_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One combination of switches, with the smallest batch that the recipe allows."""

    method: str
    sharding: str
    """``one device``, ``DDP``, ``ZeRO-1`` …, by whichever backend."""
    recompute: bool
    """Off: no block is recomputed. On: as many as it takes."""
    offload: bool
    """True if weights or optimizer states wait on the host, as far as the stage allows."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    model: ModelSpec
    seq_len: int
    taken: Priced | None
    """The plan of ``fitune plan``, or the smallest when none fits; None for rows the model was not made for."""
    settings: tuple[Setting, ...] = ()

    @property
    def fits(self) -> bool:
        return self.taken is not None and self.taken.estimate.fits

    def some_fits(self, **wanted: str | bool) -> bool:
        """True if a setting with these values fits: ``some_fits(method="lora", sharding="DDP", offload=False)``."""
        return any(
            setting.fits and all(getattr(setting, name) == value for name, value in wanted.items())
            for setting in self.settings
        )

    def needs(self, method: str, sharding: str) -> tuple[str, ...] | None:
        """The fewest of ``recompute`` and ``offload`` with which it fits, recompute first; None when it does not."""
        for switches in ((False, False), (True, False), (False, True), (True, True)):
            recompute, offload = switches
            if self.some_fits(method=method, sharding=sharding, recompute=recompute, offload=offload):
                return tuple(name for name, on in zip(("recompute", "offload"), switches, strict=True) if on)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Cells by model, then by rising length of rows."""

    hardware: Hardware
    models: tuple[ModelSpec, ...]
    seq_lens: tuple[int, ...]
    cells: tuple[Cell, ...]

    def row(self, model: ModelSpec) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.model == model)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.method for cell in self.cells for setting in cell.settings))

    @property
    def shardings(self) -> tuple[str, ...]:
        return tuple(sorted({setting.sharding for cell in self.cells for setting in cell.settings}))


def matrix(
    recipe: Recipe, *, models: Sequence[ModelSpec], seq_lens: Sequence[int], hardware: Hardware
) -> Matrix:
    """Every pin of the recipe holds in every cell. Raises RecipeError or HardwareError for contradictions."""
    if not models or not seq_lens:
        raise RecipeError(
            "a matrix needs models and lengths", hint="--models llama-2-7b,13b --context 512,1024"
        )
    lengths = tuple(sorted(set(seq_lens)))
    models = tuple(with_added_rows(recipe, model) for model in models)
    return Matrix(
        hardware=hardware,
        models=models,
        seq_lens=lengths,
        cells=tuple(_cell(recipe, model, length, hardware) for model in models for length in lengths),
    )


def _cell(recipe: Recipe, model: ModelSpec, seq_len: int, hardware: Hardware) -> Cell:
    if seq_len > model.max_seq_len:
        return Cell(model=model, seq_len=seq_len, taken=None)
    recipe = of_cell(recipe, model, seq_len)
    refuse_contradictions(recipe, model=model, hardware=hardware)
    return Cell(
        model=model,
        seq_len=seq_len,
        taken=first_choice(recipe, model=model, hardware=hardware),
        settings=tuple(_settings(recipe, model, hardware)),
    )


def of_cell(recipe: Recipe, model: ModelSpec, seq_len: int) -> Recipe:
    return recipe.model_copy(update={"model": model.name, "seq_len": seq_len})


def _settings(recipe: Recipe, model: ModelSpec, hardware: Hardware) -> Iterator[Setting]:
    """Activations stay on the device here: what recomputing and offloaded states do is to be seen by itself."""
    asked = recipe.gradient_checkpointing
    for method in compared(recipe, model, hardware):
        for recompute in (False, True) if asked is None else (bool(asked),):
            pins = {
                "offload_activations": recipe.offload_activations or "device",
                "gradient_checkpointing": asked if recompute else False,
            }
            one = MethodSearch(recipe.model_copy(update=pins), method, model, hardware)
            for (sharding, offload), placements in _grouped(one.placements).items():
                yield Setting(
                    method=method_name(method.tuning),
                    sharding=sharding,
                    recompute=recompute,
                    offload=offload,
                    fits=any(one.has_room(placement) for placement in placements),
                )


def compared(recipe: Recipe, model: ModelSpec, hardware: Hardware) -> tuple[Method, ...]:
    """Of every method that is no last resort the best: full, LoRA and QLoRA, or what the recipe pins."""
    found: dict[str, Method] = {}
    for method in methods_for(recipe, model=model, hardware=hardware):
        if not method.last_resort:
            found.setdefault(method_name(method.tuning), replace(method, tier="any"))
    return tuple(found.values())


def _grouped(placements: Sequence[Placement]) -> dict[tuple[str, bool], list[Placement]]:
    groups: dict[tuple[str, bool], list[Placement]] = {}
    for placement in placements:
        states = (placement.offload.parameters, placement.offload.optimizer)
        groups.setdefault((stage_name(placement.sharding), states != ("device", "device")), []).append(
            placement
        )
    return groups


def stage_name(sharding: Sharding) -> str:
    """``one device``, ``DDP``, ``ZeRO-2``."""
    match sharding:
        case Ddp():
            return "DDP"
        case Zero(stage=stage):
            return f"ZeRO-{stage}"
        case _:
            return "one device"
