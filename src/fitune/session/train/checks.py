"""Before a run: is it in output_dir already, and is there room for what it will write?

A full disk at the end loses the training, so the room is asked for before it begins.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fitune.checkpoint.commit import FOLDER as CHECKPOINTS
from fitune.checkpoint.commit import last_saved, require_space, step_folders
from fitune.checkpoint.differences import compare_plans, difference_table, with_unsaid_fields
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.parameters import embedding_parameters, trained_parameters
from fitune.files import read_text
from fitune.models.weight_files import stored_dtype
from fitune.spec.counts import count_parameters
from fitune.spec.plan import Plan, trains_embeddings
from fitune.spec.recipe.pins import pinned
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.reports import RunReport
from fitune.spec.run_directory import FOLDERS
from fitune.spec.serial import from_data, parse_json
from fitune.track.metrics import readable_steps
from fitune.units import MIB

T = TypeVar("T")

_SMALL_FILES_BYTES = 48 * MIB
"""Logs, report, tokenizer; the exporter alone keeps 32 MiB for its texts."""


def as_begun(recipe: Recipe) -> Recipe:
    """``recipe`` with the method, quantisation, precision and average row of the run in its output_dir, where it leaves
    them open: of other devices or rows fitune might choose others. As it is where no plan of a run can be read there.
    """
    if not recipe.output_dir:
        return recipe
    try:
        saved = from_data(
            Plan, parse_json(read_text(Path(recipe.output_dir) / "plan.json", follow_links=False))
        )
    except (OSError, ValueError):
        return recipe
    begun = pinned(recipe, saved)
    asks_for_another = recipe.tuning not in (None, begun.tuning)
    method = () if asks_for_another else ("tuning", "quantization", "quantization_bits")
    keys = ("precision", "mean_row_tokens", *method)
    return recipe.model_copy(
        update={key: getattr(begun, key) for key in keys if getattr(recipe, key) is None}
    )


def complete_run(
    directory: Path, plan: Plan, *, resume: bool | str, saved_elsewhere: bool
) -> RunReport | None:
    """The report of this very run if ``directory`` holds it complete, else None. A longer one is left to ``resume``.

    ``saved_elsewhere``: its checkpoints are in a store.

    Raises RunDirectoryError when it holds a complete run of other settings that nobody asked to continue, or one
    that is trained and lacks its export only.
    """
    file = directory / "report.json"
    ended = _read_or_refuse(RunReport, file) if file.is_file() else None
    if ended is None and resume is True:
        _refuse_trained(directory, plan)
    if isinstance(resume, str) or ended is None or not (ended.status == "complete" or ended.lacks_export):
        return None
    saved = _read_or_refuse(Plan, directory / "plan.json", lambda data: with_unsaid_fields(data, plan))
    differences = [
        d for d in compare_plans(saved, plan) if not d.allowed or d.setting.startswith("schedule.duration")
    ]
    if not differences and ended.status == "complete":
        return ended
    has_checkpoint = saved_elsewhere or last_saved(directory) is not None
    if resume and has_checkpoint:
        return None
    if ended.lacks_export:
        raise RunDirectoryError(
            f"{directory} is trained; only its export failed: {ended.reason}",
            hint=f"fitune export {directory}, or --overwrite to start anew",
        )
    if resume:
        raise RunDirectoryError(
            f"{directory} holds a complete run and no checkpoint (save_steps was 0): there is nothing to go on from\n"
            f"{difference_table(differences)}",
            hint="--overwrite to start anew, or another output_dir; with save_steps a run can be made longer",
        )
    longer = " --resume to make it longer," if has_checkpoint and all(d.allowed for d in differences) else ""
    raise RunDirectoryError(
        f"{directory} holds a complete run with other settings\n{difference_table(differences)}",
        hint=f"{longer} --overwrite to start anew, or another output_dir".strip(),
    )


def _refuse_trained(directory: Path, plan: Plan) -> None:
    """Raises RunDirectoryError for a run that was killed in its export and kept no checkpoint: it would train again."""
    steps = readable_steps(directory / "metrics.jsonl")
    if not steps or steps[-1].step < steps[-1].total_steps or last_saved(directory) is not None:
        return
    from fitune.train.again import find_source

    try:
        source = find_source(directory, plan, None, step=steps[-1].step)
    except CheckpointError:
        return  # nothing of it is left
    raise RunDirectoryError(
        f"{directory} is trained; it was stopped during its export, and its weights are in {source.path.name}",
        hint=f"fitune export {directory}, or --overwrite to start anew",
    )


def _read_or_refuse(cls: type[T], file: Path, completed: Callable[[Any], Any] = lambda data: data) -> T:
    try:
        return from_data(cls, completed(parse_json(read_text(file, follow_links=False))))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}", hint="--overwrite, or another output_dir"
        ) from None


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
