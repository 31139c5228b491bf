"""A recipe becomes a plan on the hardware and the data that it names, and a recipe that pins the plan's choices: what
was planned here is what is planned where it runs."""

from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import DataError, HardwareError, NothingFits
from fitune.measure.hardware import resolve_hardware, see_one_kind
from fitune.planner.defaults import data_of, with_host_memory
from fitune.planner.search import find_plan
from fitune.planner.whole_run import whole_run, with_timely_saves
from fitune.recipe.recipe import Recipe
from fitune.units import counted
from fitune.values.choices import Ddp
from fitune.values.machines.environment import launched_as
from fitune.values.machines.gpus import GpuFigures, most_gpus
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.model_spec import ModelSpec
from fitune.values.model.tracer import by_installed_libraries
from fitune.values.plan import Plan, Zero, base_of
from fitune.values.predictions import PlanReport
from fitune.values.quantisers import settings_of
from fitune.values.rules import Purpose
from fitune.values.words import method_name

if TYPE_CHECKING:  # not for those who name no data
    from fitune.data.sampling import RowSample

FEW_ROWS = 50


def see_planned_gpus() -> None:
    """Hide the GPUs of this machine that no plan takes. For commands that compute, before they import torch."""
    see_one_kind()


def speaks_to_people() -> bool:
    """True unless a launcher started this process as one of several and it is not the first."""
    rank, _, _ = launched_as()
    return rank == 0


def plan_for(
    recipe: Recipe,
    *,
    purposes: tuple[Purpose, ...] = ("plan",),
    hardware: Hardware | None = None,
    model: ModelSpec | None = None,
) -> PlanReport:
    """The fastest plan that fits on ``hardware``: by default that of the recipe, or of this machine when it names
    none. ``model``: by default the one that the recipe names.

    A plan to be trained or rehearsed is estimated by what the installed libraries do.
    """
    with nullcontext() if purposes == ("plan",) else by_installed_libraries():
        model = model or load_model_spec(recipe.model)
        return find_plan(recipe, model=model, hardware=hardware or wanted_hardware(recipe), purposes=purposes)


def sampled(recipe: Recipe) -> tuple[Recipe, "RowSample | None"]:
    """Returns the recipe with the average row of its data, and the rows that tell it; as it is where they are not on
    this machine. Raises DataError for a file that is missing, or has no row to train on."""
    if not recipe.data:
        return recipe, None
    from fitune.data.sampling import sample_rows  # not for those who name no data

    sample = sample_rows(data_of(recipe), tokenizer_folder=Path(recipe.model))
    if sample is None or recipe.mean_row_tokens is not None:
        return recipe, sample
    return recipe.model_copy(update={"mean_row_tokens": sample.mean_row_tokens(recipe.seq_len)}), sample


def for_its_rows(recipe: Recipe) -> Recipe:
    """Returns the recipe with the average row of its data; as it is where they cannot be read here."""
    with suppress(DataError):
        return sampled(recipe)[0]
    return recipe


def plan_on_data(recipe: Recipe) -> PlanReport:
    """The plan, and the whole run on the data that the recipe names. Raises DataError for a file that is missing."""
    model = load_model_spec(recipe.model)
    recipe, sample = sampled(recipe)
    report = _on_data(recipe, plan_for(recipe, model=model), sample)
    sources = report.chosen.plan.data.sources
    if report.run is not None and report.run.epoch.rows < FEW_ROWS:
        rows = counted(report.run.epoch.rows, "row")
        note = f"note on data: {rows} are few: expect the model to repeat them by heart"
        return replace(report, decisions=(*report.decisions, note))
    if report.run is not None or not sources:
        return report
    note = (
        f"note on data: {', '.join(source.path for source in sources)}: not all of it is on this machine, and nothing "
        "is fetched for a plan; fitune train prints steps, time and cost before its first step"
    )
    return replace(report, decisions=(*report.decisions, note))


def plan_or_nothing(recipe: Recipe) -> PlanReport | NothingFits:
    """Returns the plan on the recipe's data, or the error where nothing fits. Raises such an error without numbers."""
    try:
        return plan_on_data(recipe)
    except NothingFits as error:
        if not error.facts:
            raise
        return error


def first_screen_of(
    recipe: Recipe, found: PlanReport | NothingFits, *, train: str, as_options: bool = True
) -> str:
    """Returns the first screen of what was ``found`` for ``recipe``; ``train`` is the command that it names next.

    ``as_options``: changes are named as options of a command, not as keys of a recipe.
    """
    from fitune.planner.first_screen import first_screen, other_ways, screen_of_nothing

    if isinstance(found, NothingFits):
        return screen_of_nothing(found, as_options=as_options)
    model = load_model_spec(recipe.model)
    ways = other_ways(
        with_average_row(recipe, found.taken.plan), found.taken, model=model, machine=wanted_hardware
    )
    return first_screen(found, ways, train=train)


def plan_to_train(recipe: Recipe, *, hardware: Hardware) -> PlanReport:
    """The plan that trains on the recipe's data, with checkpoints as often as the run on it asks for; what is wrong in
    the rows, training says.

    Raises DataError for a file that is missing. A run that is there already may be complete, and then needs no data.
    """
    from fitune.data.sampling import require_files

    sample = None
    with suppress(DataError):
        recipe, sample = sampled(recipe)
    report = plan_for(recipe, purposes=("plan", "train"), hardware=hardware)
    if not Path(report.chosen.plan.run.output_dir).exists():
        require_files(report.chosen.plan.data)
    with suppress(DataError):
        return _on_data(recipe, report, sample)
    return report


def _on_data(recipe: Recipe, report: PlanReport, sample: "RowSample | None") -> PlanReport:
    taken = report.taken
    plan = taken.plan
    if not plan.data.sources:
        return report
    epoch = None if sample is None else sample.epoch(plan.batch)
    run = None if epoch is None else whole_run(plan, epoch, price_per_gpu_hour=report.price_per_gpu_hour)
    plan = with_timely_saves(recipe, plan, run, step_seconds=taken.estimate.step_seconds)
    saving = replace(taken, plan=plan)
    if report.trained is None:
        return replace(report, chosen=saving, run=run)
    return replace(report, trained=saving, run=run)


def wanted_hardware(recipe: Recipe) -> Hardware:
    """The hardware that the recipe names, or else this machine's. Raises HardwareError for more GPUs in one node than
    machines of that card have, where the number of nodes was left open."""
    gpus, is_named = recipe.gpus or 1, recipe.gpu is not None and recipe.gpu.lower() != "cpu"
    if is_named and "nodes" not in recipe.model_fields_set and gpus > (most := most_gpus(str(recipe.gpu))):
        nodes = -(-gpus // most)
        raise HardwareError(
            f"gpus = {gpus} is the number in one node, and machines with {recipe.gpu} have {most} at most",
            hint=f"--gpus {most} --nodes {nodes}"
            + (f"; --nodes 1 beside it if one machine really has {gpus}" if most > 1 else ""),
        )
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


def pinned(recipe: Recipe, plan: Plan) -> Recipe:
    """``recipe`` with the method, the precision, the placement and the batch of ``plan``: it plans the same again.

    Recomputed blocks and the chunks of the loss follow from these and stay open: where memory runs out in a step, the
    next attempt may take less of them, and of the micro-batch in any case.
    """
    batch, hardware = plan.batch, plan.hardware
    pins: dict[str, Any] = {
        "tuning": method_name(plan.tuning), "precision": plan.precision.value, "gpus": hardware.gpus_per_node,
        "nodes": hardware.nodes, "seq_len": batch.seq_len, "attn_implementation": plan.attention,
        "global_batch_size": batch.global_batch_size * hardware.num_gpus,
        "micro_batch_size": batch.micro_batch_size,
        "learning_rate": plan.schedule.learning_rate, "output_dir": plan.run.output_dir, "export": plan.run.export,
        "async_save": plan.run.async_save, "offload_parameters": plan.offload.parameters,
        "offload_optimizer": plan.offload.optimizer, "offload_activations": plan.offload.activations,
        **settings_of(base_of(plan)), **_sharding(plan),
    }  # fmt: skip
    if plan.run.upload_to:
        pins["upload_to"] = plan.run.upload_to
    if recipe.objective == "cheapest":  # it chose how many devices; now they are said
        pins["objective"] = "fastest"
    return with_average_row(recipe.model_copy(update=pins), plan)


def with_average_row(recipe: Recipe, plan: Plan) -> Recipe:
    """Returns ``recipe`` with the average row that ``plan`` was chosen for; as it is where that is not known."""
    mean = plan.batch.mean_row_tokens
    return recipe.model_copy(update={"mean_row_tokens": mean}) if mean else recipe


def _sharding(plan: Plan) -> dict[str, Any]:
    match plan.sharding:
        case Zero(stage=stage, backend=backend, hybrid=hybrid):
            return {"zero": stage, "backend": backend, "hybrid_sharding": hybrid}
        case Ddp():
            return {"zero": 0}
    return {}
