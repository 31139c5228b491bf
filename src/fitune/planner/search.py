"""Keep every choice of the user, decide the rest: the best family that fits, and in it the fastest plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.predict import predict
from fitune.estimate.shape import largest_batch
from fitune.estimate.step import StepStages, describe_step
from fitune.estimate.time import step_time_of
from fitune.planner.candidates import Family, batches, block_counts, draft, families, losses
from fitune.planner.decisions import decisions_of
from fitune.planner.describe import describe_family, memory_sum
from fitune.planner.fit import BytesOf, cheapest_blocks, fewest_blocks, peak_of
from fitune.planner.nothing_fits import nothing_fits
from fitune.planner.refusals import refuse_contradictions
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Loss, Plan, Recompute
from fitune.spec.recipe import Recipe
from fitune.spec.reports import PlanReport, Priced, Rejection

RUNNERS_UP = 3
INDISTINGUISHABLE = 0.99


def find_plan(recipe: Recipe, *, model: ModelSpec, hardware: Hardware) -> PlanReport:
    """The plan to run, three others, and why every other family was not taken.

    Raises RecipeError or HardwareError for pins that cannot be honoured, NothingFits when no plan that keeps
    them fits.
    """
    refuse_contradictions(recipe, model=model, hardware=hardware)
    searched = [
        search_family(recipe, family, model=model, hardware=hardware)
        for family in families(recipe, model=model, gpu=hardware.gpu)
    ]
    fitting = [result for result in searched if result.plans]
    rejected = tuple(result.rejection for result in searched if result.rejection is not None)
    if not fitting:
        raise nothing_fits(
            recipe, [result.smallest for result in searched], rejected, model=model, hardware=hardware
        )
    chosen = fitting[0].plans[0]
    return PlanReport(
        chosen=_priced(chosen),
        runners_up=tuple(_priced(plan) for plan in _runners_up(fitting)),
        rejected=rejected,
        decisions=decisions_of(recipe, chosen, model=model, hardware=hardware),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedFamily:
    """The plans of a family that fit, one per micro-batch, the preferred first; and its smallest plan."""

    family: Family
    plans: tuple[Plan, ...]
    smallest: Plan
    rejection: Rejection | None


def search_family(recipe: Recipe, family: Family, *, model: ModelSpec, hardware: Hardware) -> SearchedFamily:
    """Every split of the batch with every loss, each with the fewest recomputed blocks that fit."""
    first = draft(recipe, family, model=model, hardware=hardware)
    usable = usable_bytes(hardware)
    smallest = smallest_plan(recipe, first)
    estimate = predict(smallest)
    if not estimate.fits:
        why = memory_sum(estimate)
        rejection = Rejection(what=describe_family(smallest), why=why)
        return SearchedFamily(family=family, plans=(), smallest=smallest, rejection=rejection)
    found = [step for batch in _steps(recipe, first) if (step := _fastest(recipe, batch, usable)) is not None]
    best = _preferred(found, by=_least_memory if recipe.packing else _most_rows)
    others = sorted((step for step in found if step is not best), key=_tokens_per_second, reverse=True)
    plans = tuple(step.plan for step in (best, *others))
    return SearchedFamily(family=family, plans=plans, smallest=smallest, rejection=None)


def smallest_plan(recipe: Recipe, first: Plan) -> Plan:
    """The plan of the family that needs the least memory: smallest micro-batch and logits, best recompute."""
    step = describe_step(first, largest_batch(first))
    counts = block_counts(recipe, layers=first.model.num_layers)
    blocks = cheapest_blocks(lambda count: peak_of(step, blocks=count, loss=first.loss), counts)
    return replace(first, recompute=Recompute(blocks=blocks))


def _steps(recipe: Recipe, first: Plan) -> Iterator[StepStages]:
    for batch in batches(recipe):
        plan = replace(first, batch=batch)
        yield describe_step(plan, largest_batch(plan))


def _fastest(recipe: Recipe, step: StepStages, usable: int) -> StepStages | None:
    """The fastest way with this micro-batch that fits."""
    counts = block_counts(recipe, layers=step.num_layers)
    fitting = []
    for loss in losses(recipe):
        blocks = fewest_blocks(_bytes_with(step, loss), counts, usable=usable)
        if blocks is not None:
            fitting.append(step.varied(recompute=Recompute(blocks=blocks), loss=loss))
    return _preferred(fitting, by=_least_memory) if fitting else None


def _preferred(fitting: Sequence[StepStages], *, by: Callable[[StepStages], int]) -> StepStages:
    """The fastest; among those within 1 % of it, which no estimate tells apart, the one with the least ``by``."""
    speeds = [_tokens_per_second(step) for step in fitting]
    fast_enough = INDISTINGUISHABLE * max(speeds)
    return min((step for step, speed in zip(fitting, speeds, strict=True) if speed >= fast_enough), key=by)


def _least_memory(step: StepStages) -> int:
    return memory_of(step).peak_bytes


def _most_rows(step: StepStages) -> int:
    """Rows that are not packed are mostly shorter than seq_len: more of them at once keep the device busy."""
    return -step.plan.batch.micro_batch_size


def _bytes_with(step: StepStages, loss: Loss) -> BytesOf:
    return cache(lambda blocks: peak_of(step, blocks=blocks, loss=loss))


def _tokens_per_second(step: StepStages) -> float:
    return step.shape.tokens * step.plan.batch.accumulation / step_time_of(step).step_seconds


def _runners_up(fitting: list[SearchedFamily]) -> list[Plan]:
    """The best of every other family, then the chosen family with other micro-batches."""
    others = [result.plans[0] for result in fitting[1:]]
    return [*others, *fitting[0].plans[1:]][:RUNNERS_UP]


def _priced(plan: Plan) -> Priced:
    return Priced(plan=plan, estimate=predict(plan))
