"""A recipe becomes a plan on the hardware it names.

Beside it: what a change would cost, the largest that fits, the plans of many models and lengths, and a rehearsal.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fitune.errors import DataError, RecipeError
from fitune.launch.command import MachineCommand, machine_commands
from fitune.measure.hardware import resolve_hardware
from fitune.planner.alternatives import Alternative, Largest, changed_recipe, compare, largest
from fitune.planner.defaults import with_host_memory
from fitune.planner.matrix import LEGEND, Matrix, card, matrix, short_name
from fitune.planner.search import find_plan
from fitune.planner.whole_run import whole_run, with_timely_saves
from fitune.spec.deepspeed import deepspeed_config
from fitune.spec.gpus import GpuFigures
from fitune.spec.hardware import Hardware
from fitune.spec.model_config import load_model_spec
from fitune.spec.plan import Zero
from fitune.spec.predictions import PlanReport, Rehearsal
from fitune.spec.recipe import Recipe
from fitune.spec.rules import Purpose
from fitune.spec.words import describe_sharding, devices_with_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WithChange:
    """The plan of a recipe, and beside it the best plan with a change."""

    report: PlanReport
    alternative: Alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestThatFit:
    """The largest row, micro-batch or model of each method that the recipe leaves open."""

    recipe: Recipe
    quantity: str
    found: tuple[Largest, ...]


def plan_for(
    recipe: Recipe, *, purposes: tuple[Purpose, ...] = ("plan",), hardware: Hardware | None = None
) -> PlanReport:
    """The fastest plan that fits on ``hardware``: by default that of the recipe, or of this machine when it names
    none."""
    model = load_model_spec(recipe.model)
    return find_plan(recipe, model=model, hardware=hardware or wanted_hardware(recipe), purposes=purposes)


def plan_on_data(recipe: Recipe) -> PlanReport:
    """The plan, and the whole run on the data that the recipe names. Raises DataError for a file that is missing."""
    return _on_data(recipe, plan_for(recipe))


def saving_in_time(recipe: Recipe, report: PlanReport) -> PlanReport:
    """The plan with checkpoints as often as its run on the data asks for; what is wrong in the data, training says."""
    with suppress(DataError):
        return replace(_on_data(recipe, report), run=None)
    return report


def _on_data(recipe: Recipe, report: PlanReport) -> PlanReport:
    plan = report.chosen.plan
    if not plan.data.sources:
        return report
    from fitune.data.sampling import guess_epoch  # not for those who name no data

    epoch = guess_epoch(plan.data, plan.batch, tokenizer_folder=Path(plan.model_path))
    run = None if epoch is None else whole_run(plan, epoch, price_per_gpu_hour=report.price_per_gpu_hour)
    plan = with_timely_saves(recipe, plan, run, step_seconds=report.chosen.estimate.step_seconds)
    return replace(report, chosen=replace(report.chosen, plan=plan), run=run)


def wanted_hardware(recipe: Recipe) -> Hardware:
    """The hardware that the recipe names, or else this machine's."""
    found = resolve_hardware(
        gpu=recipe.gpu, gpus=recipe.gpus, nodes=recipe.nodes, host_memory_bytes=recipe.host_memory,
        figures=GpuFigures(
            memory_bytes=recipe.gpu_memory, flops=recipe.gpu_flops, bandwidth=recipe.gpu_bandwidth,
            link_bandwidth=recipe.interconnect,
        ),
        internode_bandwidth=recipe.node_network,
    )  # fmt: skip
    found = with_host_memory(found)
    return found if recipe.nvme_size is None else replace(found, nvme_bytes=recipe.nvme_size)


def plan_with(recipe: Recipe, change: str) -> WithChange:
    """The plan, and the best plan with the settings of ``zero: 3, backend: fsdp`` on top."""
    changed = changed_recipe(recipe, change)
    report = plan_for(recipe)
    alternative = compare(
        changed, change, taken=report.chosen,
        model=load_model_spec(changed.model), hardware=wanted_hardware(changed),
    )  # fmt: skip
    return WithChange(report=report, alternative=alternative)


def largest_for(recipe: Recipe, quantity: str) -> LargestThatFit:
    """The largest ``seq_len``, ``micro_batch`` or ``model`` that fits. Raises RecipeError for another quantity."""
    quantity = quantity.replace("-", "_").removesuffix("_size")
    found = largest(recipe, quantity, model=load_model_spec(recipe.model), hardware=wanted_hardware(recipe))
    return LargestThatFit(recipe=recipe, quantity=quantity, found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A plan, and what its own step took on fake tensors."""

    report: PlanReport
    rehearsal: Rehearsal


def rehearse_recipe(recipe: Recipe, *, exact: bool = False) -> Rehearsed:
    """Plan among what can be rehearsed, then rehearse what was chosen. ``exact`` traces every block."""
    report = plan_for(recipe, purposes=("plan", "rehearse"))
    from fitune.rehearse.step import rehearse

    chosen = report.chosen
    rehearsal = rehearse(chosen.plan, exact=exact, outside=chosen.estimate.memory.outside)
    return Rehearsed(report=report, rehearsal=rehearsal)


def plan_matrix(recipe: Recipe, *, models: Sequence[str], seq_lens: Sequence[int]) -> Matrix:
    """Plan every model with every length of rows. Raises RecipeError for pins that contradict each other."""
    specs = [load_model_spec(name) for name in models]
    return matrix(recipe, models=specs, seq_lens=tuple(seq_lens), hardware=wanted_hardware(recipe))


def draw_picture(found: Matrix, path: Path) -> None:
    """Write the matrix as SVG. Raises RecipeError for another ending, MissingExtra without matplotlib."""
    if path.suffix.lower() != ".svg":
        raise RecipeError(f"--picture {path} must end in .svg", hint="--picture matrix.svg")
    from fitune.report.comparison_plots import Card, draw_matrix  # not for those who only plan

    draw_matrix(
        path,
        [[Card(*card(cell, found)) for cell in found.row(model)] for model in found.models],
        title=f"What fits on {devices_with_memory(found.hardware)}",
        rows=[short_name(model) for model in found.models],
        columns=[f"{length:,} tokens" for length in found.seq_lens],
        legend=f"{', '.join(found.shardings)}: {LEGEND}",
    )


def launch_commands(recipe: Recipe, words: Sequence[str], *, rendezvous: str) -> list[MachineCommand]:
    """The command for each machine of the recipe's plan; ``words`` are those that name the recipe."""
    report = plan_for(recipe, purposes=("plan", "train"))
    return machine_commands(report.chosen.plan, words, rendezvous=rendezvous)


def launch_lines(recipe: Recipe, words: Sequence[str], settings: Sequence[str], *, rendezvous: str) -> str:
    """The commands as text, each below the number of its machine; the recipe is named as it was typed."""
    typed = [*words, *(part for setting in settings for part in ("--set", setting))]
    commands = launch_commands(recipe, typed, rendezvous=rendezvous)
    return "\n".join(f"# machine {command.machine}\n{command}" for command in commands)


def deepspeed_configuration(recipe: Recipe) -> str:
    """The ds_config.json, as text, of the recipe's plan. Raises RecipeError when it is another's."""
    plan = plan_for(recipe).chosen.plan
    if not isinstance(plan.sharding, Zero) or plan.sharding.backend != "deepspeed":
        by = describe_sharding(plan.sharding) or "one process"
        raise RecipeError(f"the plan is {by}, not DeepSpeed", hint="backend: deepspeed, gpus: 2 or more")
    return json.dumps(deepspeed_config(plan), indent=2)
