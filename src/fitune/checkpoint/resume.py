"""Find, check and read a checkpoint; and may a run go on from it under another plan? Every setting that differs, and
why it may or may not."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fitune.checkpoint.commit import (
    ABANDONED,
    DAMAGED,
    FOLDER,
    LOG,
    STATE,
    Attempt,
    Descent,
    Line,
    OnNote,
    Parent,
    present_line,
    read_commit,
    set_aside,
    step_folders,
    verify,
    write_line,
)
from fitune.checkpoint.slices import INDEX, Groups, SavedTensors, groups_in, read_index
from fitune.checkpoint.state import Json, TrainState
from fitune.errors import CheckpointError
from fitune.files import read_bytes
from fitune.units import text_table
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import ClipByNorm, ClipByValue, Full, Plan, clip_in_backward
from fitune.values.run_directory import moved, placed
from fitune.values.serial import TABLE_BYTES, read_object, to_data
from fitune.values.words import devices_with_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest valid checkpoint of the present line; None when there is none."""

    path: Path | None
    warnings: tuple[str, ...] = ()
    """One for each newer checkpoint that does not count, and for a line that cannot be read."""
    damaged: tuple[Path, ...] = ()


def newest_checkpoint(root: Path, on_note: OnNote = lambda _: None) -> Found:
    """The newest valid one of the present line in ``root/checkpoints``; every file of it was hashed."""
    folder = root / FOLDER
    folders = step_folders(folder)
    line, warnings = present_line(folder, any_saved=bool(folders))
    damaged: list[Path] = []
    for path in reversed(folders):
        try:
            commit = read_commit(path)
            if not commit.is_on(line):
                warnings.append(f"{path.name} is skipped: the run went on from an older step")
                continue
            verify(path, on_note=on_note)
        except CheckpointError as error:
            warnings.append(f"{path.name} is skipped: {error.message}")
            damaged.append(path)
            continue
        return Found(
            path=path, warnings=(*warnings, *_lost(line, commit.step, folders)), damaged=tuple(damaged)
        )
    return Found(path=None, warnings=(*warnings, *_lost(line, 0, folders)), damaged=tuple(damaged))


def begin_line(
    root: Path, *, attempt: str, base: Path | None, damaged: tuple[Path, ...], on_note: OnNote
) -> Descent:
    """Make this attempt the end of the present line; whatever is not on it, or damaged, is set aside.

    The line is written first: from then on an abandoned checkpoint counts no longer, wherever it lies.
    ``base``: the checkpoint that the attempt goes on from. Raises CheckpointError.
    """
    folder = root / FOLDER
    descent = Descent(line=(Attempt(id=attempt, after=0),))
    if base is not None:
        commit = read_commit(base)
        descent.line = (*commit.line, Attempt(id=attempt, after=commit.step))
        descent.parent = Parent(step=commit.step, digest=commit.digest)
    try:
        if base is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            write_line(folder, descent.line)
            for path in reversed(step_folders(folder)):
                word = DAMAGED if path in damaged else _word(path, descent.line)
                if word:
                    on_note(set_aside(path, word))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror}", hint="check the free space and the permissions"
        ) from error
    return descent


def load_checkpoint(path: Path, *, verified: bool = False, on_note: OnNote = lambda _: None) -> TrainState:
    """Read ``path``; its tensors are read, to the host, when they are asked for.

    ``verified`` saves the hashing that ``newest_checkpoint`` just did.
    Raises CheckpointError naming the file that is missing, truncated or changed.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such checkpoint", hint="--resume without a path takes the newest one of output_dir"
        )
    if (path / FOLDER).is_dir():
        found = newest_checkpoint(path).path
        raise CheckpointError(
            f"{path} is the directory of a run, not a checkpoint",
            hint=f"resume: {found}" if found else "it holds no checkpoint; start a new run",
        )
    commit = read_commit(path) if verified else verify(path, on_note=on_note)
    file = path
    try:
        file, divided = path / INDEX, Groups()
        if INDEX in commit.files:
            divided = read_index(read_bytes(file, limit=TABLE_BYTES, follow_links=False))
        file = path / STATE
        content = read_object(file, largest_bytes=TABLE_BYTES, follow_links=False)
        facts: dict[str, Json] = content["facts"]
        file, log = path / LOG, b""
        if LOG in commit.files:
            log = read_bytes(file, limit=commit.files[LOG].bytes, follow_links=False)
    except (OSError, ValueError, KeyError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{file}: cannot be read: {cause}") from error
    if content.get("step") != commit.step:
        raise CheckpointError(
            f"{path / STATE}: of step {content.get('step')!r}, and COMMIT is of step {commit.step}"
        )
    groups = groups_in(commit.files, divided)
    tensors = {group: SavedTensors(path, group, divided.get(group, {})) for group in groups}
    return TrainState(step=commit.step, tensors=tensors, facts=facts, log=log)


def _lost(line: Line | None, found_step: int, folders: list[Path]) -> list[str]:
    """Says so when the checkpoint that the last attempt went on from is not there."""
    after = line[-1].after if line else 0
    if after <= found_step or any(path.name == f"step-{after}" for path in folders):
        return []
    return [f"step-{after}, from which the last attempt went on, is not in {FOLDER}/"]


def _word(path: Path, line: Line) -> str:
    """Reason why ``path`` is set aside; empty when it is kept. Kept files are hashed before one is counted on."""
    try:
        return "" if read_commit(path).is_on(line) else ABANDONED
    except CheckpointError:
        return DAMAGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting, as the checkpoint has it and as it is wanted now."""

    setting: str
    saved: str
    wanted: str
    allowed: bool
    reason: str


def compare_plans(saved: Plan, wanted: Plan) -> list[Difference]:
    """Every setting that differs, in the order of the Plan; the same file is the same by any path to it, also where the
    run was moved together with it."""
    wanted = placed(wanted)
    saved = placed(replace(moved(saved, Path(wanted.run.output_dir)), run=saved.run))
    if saved.model_path == wanted.model_path:  # the name may be a relative path to it
        saved = replace(saved, model=replace(saved.model, name=wanted.model.name))
    before, after = _settings(saved), _settings(wanted)
    changed = [each for each in dict.fromkeys([*before, *after]) if before.get(each) != after.get(each)]
    kinds = [each.removesuffix("kind") for each in changed if each.endswith(".kind")]
    differences = []
    for setting in changed:
        if any(setting.startswith(kind) and setting != f"{kind}kind" for kind in kinds):
            continue  # a setting of one kind has no counterpart in the other
        one, other = (_in_words(settings.get(setting, "–")) for settings in (before, after))
        if setting == "hardware" and one == other:
            other += ", with other rates or links"
        allowed, reason = _verdict(setting, saved, wanted)
        differences.append(
            Difference(setting=setting, saved=one, wanted=other, allowed=allowed, reason=reason)
        )
    return differences


def with_unsaid_fields(saved: Any, wanted: Plan) -> Any:
    """The data of a saved plan, with the fields of its model that plans did not have yet as ``wanted`` has them.

    They say more about the same config.json; that it describes the same weights is judged by the others.
    """
    if not isinstance(saved, Mapping) or not isinstance(saved.get("model"), Mapping):
        return saved
    now = to_data(wanted.model)
    later = {f.name: now[f.name] for f in fields(ModelSpec) if f.default is not MISSING}
    return {**saved, "model": {**later, **saved["model"]}}


def require_resumable(saved: Plan, wanted: Plan) -> list[Difference]:
    """The differences, all allowed, for the caller to print. Raises CheckpointError with a table when one is not."""
    differences = compare_plans(saved, wanted)
    refused = [difference for difference in differences if not difference.allowed]
    if refused:
        raise CheckpointError(
            f"settings that forbid going on from this checkpoint: {len(refused)}\n{difference_table(differences)}",
            hint="set them back, or start a new run in another output_dir",
        )
    return differences


def difference_table(differences: list[Difference]) -> str:
    """setting | checkpoint | now | verdict, one line each."""
    rows = [("setting", "checkpoint", "now", "")]
    for d in differences:
        rows.append((d.setting, d.saved, d.wanted, f"{'allowed' if d.allowed else 'refused'}: {d.reason}"))
    return text_table(rows, indent=2, left=range(4))


_FREE = {
    "only a place": (
        "run.output_dir run.upload_to run.push_to_hub run.hub_public data.cache_dir offload.activations "
        "offload.nvme_path"
    ),
    "changes what is written, not what is learned": (
        "run.log_every run.evals_per_epoch run.saves_per_epoch run.eval_every run.save_every run.keep_checkpoints "
        "run.async_save run.export run.report_to run.tracking run.samples"
    ),
    "same arithmetic, done twice": "recompute",
    "same arithmetic, divided otherwise": "sharding",
    "same function, rounded differently": "attention kernels compile_blocks loss",
}
"""Why a setting may change -> the settings, each with everything below it."""


def _verdict(setting: str, saved: Plan, wanted: Plan) -> tuple[bool, str]:
    """May this setting differ, and why."""
    for reason, settings in _FREE.items():
        if _below(setting, *settings.split()):
            return True, reason
    if _below(setting, "batch.micro_batch_size", "batch.accumulation", "hardware"):
        (rows, how), (rows_now, how_now) = _global_batch(saved), _global_batch(wanted)
        verb = "stays" if rows == rows_now else "changes"
        return rows == rows_now, f"the global batch {verb}: {how}, then {how_now}"
    if _below(setting, "schedule.duration"):
        before, after = saved.schedule.duration, wanted.schedule.duration
        if type(before) is not type(after):
            return False, "epochs and steps cannot be compared before the data is read"
        if after.count >= before.count:
            return True, "the run is made longer and its learning-rate schedule stretched"
        return False, "a run may be made longer, not shorter"
    # in backward or after it: the optimizer's states are the same, and so are its steps if gradients are clipped alike
    if (
        _below(setting, "tuning.update")
        and isinstance(saved.tuning, Full)
        and isinstance(wanted.tuning, Full)
    ):
        is_same = _clip(saved) == _clip(wanted)
        return is_same, "the same steps, clipped alike" if is_same else "gradients would be clipped otherwise"
    if setting == "model_path" and isinstance(wanted.tuning, Full):
        return True, "all weights come from the checkpoint"
    return False, "another run would come out"


def _below(setting: str, *prefixes: str) -> bool:
    return any(setting == each or setting.startswith((f"{each}.", f"{each}[")) for each in prefixes)


def _global_batch(plan: Plan) -> tuple[int, str]:
    """Rows per optimizer step over all devices, and how they come about."""
    batch, devices = plan.batch, plan.hardware.num_gpus
    rows = batch.global_batch_size * devices
    return rows, f"{batch.micro_batch_size} × {batch.accumulation} × {devices} = {rows}"


def _clip(plan: Plan) -> ClipByValue | ClipByNorm:
    return clip_in_backward(plan.tuning) or ClipByNorm(max_norm=plan.schedule.max_grad_norm)


def _settings(plan: Plan) -> dict[str, Any]:
    """Each setting of ``plan`` as ``a.b[0].c`` -> value, without what is measured anew for every plan.

    The hardware is one setting, and so is a list of words or of a model's matrices.
    """
    hardware = replace(
        plan.hardware,
        nvme_bytes=0,
        host_memory_bytes=0,
        calibration=None,
        taken_bytes=0,
        left_out="",
        measured=None,
    )
    data = to_data(replace(plan, batch=replace(plan.batch, mean_row_tokens=0)))
    return dict(_flat({**data, "hardware": hardware}, ""))


def _flat(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping) and data:
        for key, item in data.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and data and isinstance(data[0], Mapping) and path != "model.linears":
        for index, item in enumerate(data):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, data


def _in_words(value: Any) -> str:
    if isinstance(value, Hardware):
        return devices_with_memory(value)
    if not isinstance(value, list):
        return str(value)
    matrices = f"a list of {len(value)}" if value and isinstance(value[0], Mapping) else ""
    return matrices or ", ".join(map(str, value)) or "none"
