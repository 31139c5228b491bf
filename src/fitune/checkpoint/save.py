"""Save a TrainState so that it is whole or absent, whatever happens on the way.

checkpoints/.tmp-step-20-<pid>-<random>/    files are written and synced here
checkpoints/step-20/                the same folder after one rename
checkpoints/step-20/COMMIT          from here on the checkpoint exists
checkpoints/latest, best            relative links
then all but the newest ``keep`` and the best are removed
"""

import json
import math
import os
from pathlib import Path

from fitune.checkpoint.commit import COMMIT, FOLDER, STATE, Commit, is_committed, read_commit, step_folders
from fitune.checkpoint.durable import link_atomically, require_space, write_hashed
from fitune.checkpoint.state import TrainState
from fitune.checkpoint.tensors import tensor_chunks, tensors_bytes
from fitune.errors import CheckpointError
from fitune.spec.disk import sync_folder, write_atomically
from fitune.spec.run_directory import require_real_files
from fitune.spec.serial import to_json
from fitune.spec.temporaries import remove, remove_stale_siblings, temporary_sibling
from fitune.units import MIB, format_bytes

_MARGIN_BYTES = MIB
"""Folders, COMMIT, links and the file system's rounding to blocks."""


def save_checkpoint(root: Path, state: TrainState, *, keep: int, eval_loss: float | None) -> Path:
    """Write ``root/checkpoints/step-N`` and return it; ``root`` is the run directory, owned by this process.

    A checkpoint of the same step is replaced. Afterwards the newest ``keep`` and the one with the lowest
    evaluation loss remain. Raises CheckpointError when the disk is too small or fails; whatever was
    committed before is then still there.
    """
    if keep < 1:
        raise CheckpointError(
            f"keep_checkpoints {keep} would remove the checkpoint just written", hint="1 or more"
        )
    folder = root / FOLDER
    target = folder / f"step-{state.step}"
    facts = _facts(state)
    needed = checkpoint_bytes(state)
    try:
        require_real_files(root, names=(FOLDER,))  # a link put there meanwhile would lead the pruning astray
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        require_space(folder, needed, what=f"checkpoint {target.name}")
        _write(target, state, facts, eval_loss)
    except OSError as error:
        _clean_up(folder)
        raise CheckpointError(
            f"checkpoint {target} could not be saved: {error.strerror}; "
            f"it needs {format_bytes(needed)}. {_last(folder)}",
            hint="free some space or choose another output_dir, then resume",
        ) from error
    _link_and_prune(folder, target, keep)
    return target


def checkpoint_bytes(state: TrainState) -> int:
    """Free space that one save needs."""
    return sum(tensors_bytes(group) for group in state.tensors.values()) + len(_facts(state)) + _MARGIN_BYTES


def _facts(state: TrainState) -> bytes:
    return json.dumps({"step": state.step, "facts": state.facts}, indent=1, ensure_ascii=False).encode()


def _write(target: Path, state: TrainState, facts: bytes, eval_loss: float | None) -> None:
    temporary = temporary_sibling(target)
    os.mkdir(temporary)
    files = {
        name: write_hashed(temporary / name, chunks)
        for name, chunks in (
            *((f"{group}.safetensors", tensor_chunks(tensors)) for group, tensors in state.tensors.items()),
            (STATE, [facts]),
        )
    }
    sync_folder(temporary)
    _publish(temporary, target, Commit(step=state.step, eval_loss=eval_loss, files=files))


def _publish(temporary: Path, target: Path, commit: Commit) -> None:
    """Rename, then COMMIT. An older checkpoint of the same step waits aside until the new one counts."""
    aside = temporary_sibling(target.with_name(f"replaced-{target.name}"))
    replaces = target.exists()
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
        sync_folder(target.parent)
        write_atomically(target / COMMIT, to_json(commit))
    except OSError:
        if replaces:
            remove(target)
            os.rename(aside, target)
        raise
    if replaces:
        remove(aside)


def _link_and_prune(folder: Path, newest: Path, keep: int) -> None:
    try:
        link_atomically(folder / "latest", newest.name)
        best = _best([path for path in step_folders(folder) if is_committed(path)])
        if best is not None:
            link_atomically(folder / "best", best.name)
        _prune(folder, keep)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {newest} is saved, but {folder} could not be tidied: {error.strerror}",
            hint="resume from it once the cause is gone",
        ) from error


def _prune(folder: Path, keep: int) -> None:
    committed = [path for path in step_folders(folder) if is_committed(path)]
    wanted = {*committed[-keep:], _best(committed)}
    for path in committed:
        if path not in wanted:
            doomed = temporary_sibling(path.with_name(f"pruned-{path.name}"))
            os.rename(path, doomed)  # a half-removed folder must not look like a damaged checkpoint
            remove(doomed)


def _best(committed: list[Path]) -> Path | None:
    """Lowest finite evaluation loss; the earlier one of two equals."""
    losses = {
        path: loss for path in committed if (loss := _eval_loss(path)) is not None and math.isfinite(loss)
    }
    return min(losses, key=losses.__getitem__, default=None)


def _eval_loss(path: Path) -> float | None:
    try:
        return read_commit(path).eval_loss
    except CheckpointError:
        return None  # a damaged COMMIT is no candidate; resume names it


def _remove_unfinished(folder: Path) -> None:
    """What an attempt that died while saving left behind."""
    remove_stale_siblings(folder)
    for path in step_folders(folder):
        if not is_committed(path):
            remove(path)


def _clean_up(folder: Path) -> None:
    try:
        _remove_unfinished(folder)
    except OSError:
        return  # the disk that failed may fail again; the next save tries once more


def _last(folder: Path) -> str:
    committed = [path.name for path in step_folders(folder) if is_committed(path)]
    return f"The last saved one is {committed[-1]}." if committed else "None was saved before."
