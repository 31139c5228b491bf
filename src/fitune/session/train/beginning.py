"""A recipe is planned, and checked before data is read.

The process that only starts ranks comes no further, so this file imports neither transformers nor PEFT, which were two
thirds of its start.
"""

from dataclasses import replace
from pathlib import Path

from fitune.checkpoint.commit import FOLDER as CHECKPOINTS
from fitune.checkpoint.commit import require_space, step_folders
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import RecipeError, RunDirectoryError
from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.parameters import embedding_parameters, trained_parameters
from fitune.estimate.predict import predict
from fitune.files import read_text
from fitune.measure.cuda_cards import other_card
from fitune.measure.hardware import require_free
from fitune.models.weight_files import stored_dtype
from fitune.planner.retry import describe_size
from fitune.recipe.recipe import Recipe, dump_recipe
from fitune.session.doctor import measure_on_first_use
from fitune.session.events import Emit, Note, Planned
from fitune.session.planning import pinned, plan_to_train, wanted_hardware
from fitune.session.train.attempts import Attempt
from fitune.session.train.pushing import ready_repository
from fitune.track.metrics import read_metrics
from fitune.track.trackers import wanted_trackers
from fitune.train.directory import require_own_directory
from fitune.train.start import complete_run
from fitune.units import MIB
from fitune.values.counts import count_parameters
from fitune.values.machines.hardware import Hardware
from fitune.values.plan import Plan, trains_embeddings
from fitune.values.predictions import PlanReport, Priced
from fitune.values.reports import RunReport
from fitune.values.run_directory import FOLDERS
from fitune.values.serial import from_data, parse_json

_SMALL_FILES_BYTES = 48 * MIB
"""Logs, report, tokenizer; the exporter alone keeps 32 MiB for its texts."""


def first_attempt(
    recipe: Recipe, *, overwrite: bool, emit: Emit, ranks: Ranks = ALONE, hardware: Hardware | None = None
) -> Attempt | RunReport:
    """Plan and check everything that can be checked before data is read; the report of a run that is complete already.

    ``hardware``: where it is another than the recipe's or this machine's.
    Raises FituneError for what cannot be planned, trained here, or written into output_dir.
    """
    if not recipe.data:
        raise RecipeError("no data is named", hint="data: train.jsonl, or --data on the command line")
    wanted_trackers(recipe.report_to)  # refuses those that are unknown or not installed
    if recipe.resume and not overwrite:
        recipe = as_begun(recipe)
    here = hardware
    if hardware is None:
        hardware = wanted_hardware(recipe)
        if not ranks.is_alone:  # all have to make the same plan, and the ranks hold memory already
            hardware = replace(hardware, taken_bytes=0)
    # before the processor is measured: what is wrong is refused here
    report = plan_to_train(recipe, hardware=hardware)
    if here is None and ranks.is_alone and measure_on_first_use(hardware, emit=emit):
        report = plan_to_train(recipe, hardware=wanted_hardware(recipe))
    if recipe.resume and not overwrite:
        report = without_what_ran_out(report)
    plan = report.chosen.plan
    emit(Planned(report=report))
    if here is None:  # else the ranks are started where the devices are
        if not plan.hardware.gpu.is_cpu:
            from fitune.train.prepare import require_planned_cards

            require_planned_cards(plan, ranks)
            if note := other_card(plan.hardware.gpu, ranks.local):
                emit(Note(note))
        if ranks.is_alone:
            require_free(plan.hardware, report.chosen.estimate.peak_bytes)
    require_own_directory(plan)
    complete, is_fetched = complete_run(plan, resume=recipe.resume, overwrite=overwrite, ranks=ranks)
    if complete is not None:
        from fitune.session.train.training import end_complete

        return end_complete(plan, complete, is_fetched=is_fetched, emit=emit, ranks=ranks)
    require_room_on_disk(plan)
    if here is None:
        ready_to_push(plan, ranks)
    return Attempt(recipe=dump_recipe(recipe), report=report, resume=recipe.resume, overwrite=overwrite)


def as_begun(recipe: Recipe) -> Recipe:
    """``recipe`` with the method, quantisation, precision, global batch and average row of the run in its output_dir,
    where it leaves them open: of other devices or rows fitune might choose others. As it is where no plan of a run can
    be read there.
    """
    saved = _plan_of_run(recipe.output_dir or "")
    if saved is None:
        return recipe
    begun = pinned(recipe, saved)
    asks_for_another = recipe.tuning not in (None, begun.tuning)
    method = () if asks_for_another else ("tuning", "quantization", "quantization_bits")
    says_batch = recipe.micro_batch_size is not None and recipe.gradient_accumulation_steps is not None
    keys = ("precision", "mean_row_tokens", *method, *(() if says_batch else ("global_batch_size",)))
    return recipe.model_copy(
        update={key: getattr(begun, key) for key in keys if getattr(recipe, key) is None}
    )


def without_what_ran_out(report: PlanReport) -> PlanReport:
    """``report`` with the smaller micro-batch, recomputed blocks and loss that the run in its output_dir came to, where
    it ran out of memory on the same devices with those of its plan."""
    plan = report.chosen.plan
    saved, directory = _plan_of_run(plan.run.output_dir), Path(plan.run.output_dir)
    try:
        retries = [retry for step in read_metrics(directory / "metrics.jsonl") for retry in step.retries]
    except RunDirectoryError:  # said where the log is needed
        return report
    ran_out = describe_size(plan) in {retry.before for retry in retries}
    if saved is None or not ran_out or _devices(saved) != _devices(plan):
        return report
    rows, times = saved.batch.micro_batch_size, saved.batch.accumulation
    batch = replace(plan.batch, micro_batch_size=rows, accumulation=times)
    smaller = replace(plan, batch=batch, recompute=saved.recompute, loss=saved.loss)
    words = (
        f"{describe_size(smaller)} instead of {describe_size(plan)}, with which this run ran out of memory"
    )
    return replace(
        report,
        chosen=Priced(plan=smaller, estimate=predict(smaller)),
        decisions=(*report.decisions, words),
    )


def _devices(plan: Plan) -> tuple[int, int]:
    return plan.hardware.num_gpus, plan.hardware.gpu.memory_bytes


def _plan_of_run(directory: str) -> Plan | None:
    """plan.json of the run there; None where no directory is named or it cannot be read."""
    if not directory:
        return None
    try:
        return from_data(Plan, parse_json(read_text(Path(directory) / "plan.json", follow_links=False)))
    except (OSError, ValueError):
        return None


def ready_to_push(plan: Plan, ranks: Ranks) -> None:
    """Ask the Hub, where the export goes there, before anything is trained. Raises RecipeError, StoreError."""
    if name := plan.run.push_to_hub:
        ranks.from_first(lambda: ready_repository(name, public=plan.run.hub_public))


def require_room_on_disk(plan: Plan) -> None:
    """Raises CheckpointError with the arithmetic when the disk of output_dir cannot hold checkpoints and export."""
    directory = Path(plan.run.output_dir).expanduser().absolute()
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    kept = 1  # written when the run is interrupted
    if plan.run.saves:  # the newest, the best one, the one being sent and the one being written
        has_evaluation = bool(plan.data.eval_sources or plan.data.val_fraction)
        kept = plan.run.keep_checkpoints + has_evaluation + 1 + bool(plan.run.upload_to)
    needed = kept * checkpoint_bytes(plan) + export_bytes(plan) + _SMALL_FILES_BYTES
    # An earlier attempt's files are replaced, not added to. What was moved aside stays.
    folders = [directory / name for name in FOLDERS if name != CHECKPOINTS]
    folders += step_folders(directory / CHECKPOINTS)
    files = (file for folder in folders for file in folder.rglob("*"))
    written = sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
    require_space(
        existing,
        max(_SMALL_FILES_BYTES, needed - written),
        what=f"this run, with {kept} checkpoints at once and its {plan.run.export} model,",
    )


def export_bytes(plan: Plan) -> int:
    """P · e: all weights in the base's type, or an adapter's in the compute type; both where it is merged.

    In an adapter a table that is embedding and head is written under both names.
    """
    # as in the base, where the base is here to be read
    base = Path(plan.model_path)
    dtype = stored_dtype(base) if base.is_dir() else None
    weight_bytes = plan.precision.compute_bytes if dtype is None else dtype.itemsize
    all_weights = count_parameters(plan.model).total * weight_bytes
    if plan.run.export == "full":
        return all_weights
    merged = all_weights if plan.run.export == "merged" else 0
    twice = plan.model.tied_embeddings and trains_embeddings(plan.tuning)
    count = trained_parameters(plan) + (embedding_parameters(plan.model) if twice else 0)
    return merged + count * plan.precision.compute_bytes
