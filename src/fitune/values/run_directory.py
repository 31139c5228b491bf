"""A run's directory: names of its files, links and pipes among which are refused, and the paths of its plan, which move
with it.

A link would let a run write, delete or read somewhere else; a named pipe would let it wait for ever.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import TEMPORARY, is_there
from fitune.values.plan import DataSource, Plan

LOCK = "run.lock"
LAUNCH_LOCK = "launch.lock"
"""Held by the program that starts the ranks of a run; the first of them holds the other one."""


RETRY = "retry.json"
"""The next attempt after one that ran out of memory, until the fresh process takes it over."""

FILES = (
    "plan.json", "recipe.yaml", "estimate.json", "metrics.jsonl", "samples_before.json", "report.json", "report.html",
    "traceback.txt", RETRY, LOCK, LAUNCH_LOCK,
)  # fmt: skip
FOLDERS = (
    "checkpoints", "adapter", "adapter-unverified", "merged", "model", "model-unverified", "tensorboard", "trackers",
)  # fmt: skip
"""Names that a run writes into its directory; --overwrite removes these and nothing else."""
LOGS = "rank-logs"
"""Folder of what the ranks after the first say, a file each. They write before the run begins, so it stays."""


SHORTAGE = f"{LOGS}/out-of-memory.json"
"""File with the facts of a rank whose memory ran out, for the launcher to choose the next attempt."""


def rank_log(rank: int) -> str:
    """Path of a rank's log within the run directory."""
    return f"{LOGS}/rank{rank}.log"


def traceback_of(rank: int) -> str:
    """Path of a rank's traceback within the run directory."""
    return f"{LOGS}/rank{rank}-traceback.txt" if rank else "traceback.txt"


def rank_stacks(rank: int) -> str:
    """Path of a rank's stacks within the run directory."""
    return f"{LOGS}/rank{rank}-stacks.txt"


_POINTERS = ("latest", "best")
"""The links that a run makes itself, in checkpoints/."""


def require_real_files(directory: Path, *, names: tuple[str, ...] = (*FILES, *FOLDERS, LOGS)) -> None:
    """Raises RunDirectoryError when a link, a named pipe or a device stands under one of ``names``, or deeper.

    ``directory`` itself may be a link: people put runs on other disks.
    """
    waiting = [entry for entry in _entries(directory) if entry.name in names]
    while waiting:
        entry = waiting.pop()
        if entry.is_dir(follow_symlinks=False):
            waiting += _entries(Path(entry.path))
        else:
            _require_real(entry, directory)


def _require_real(entry: os.DirEntry[str], directory: Path) -> None:
    if entry.is_symlink():
        _require_pointer(Path(entry.path), directory)
    elif not entry.is_file(follow_symlinks=False):
        kind = (
            "a named pipe" if stat.S_ISFIFO(entry.stat(follow_symlinks=False).st_mode) else "no regular file"
        )
        raise RunDirectoryError(f"{entry.path} is {kind}", hint="remove it: no run of fitune wrote it")


def _require_pointer(link: Path, directory: Path) -> None:
    """``checkpoints/latest`` and ``best`` lead to a step beside them; a run writes no other link."""
    target = os.readlink(link)
    is_ours = link.parent == directory / "checkpoints" and link.name in _POINTERS
    if not (is_ours and target.startswith("step-") and "/" not in target):
        raise RunDirectoryError(
            f"{link} is a symbolic link, to {target}: a run neither reads nor writes through links",
            hint="remove the link, or put the real file there; output_dir itself may be a link",
        )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder without unfinished ones, which are removed and never read: killed runs leave links there."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(TEMPORARY)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be read: {error.strerror}", hint="choose another output_dir"
        ) from None


def placed(plan: Plan) -> Plan:
    """The plan with absolute paths: that of the run, and those of model and data that exist in the current folder."""

    def absolute(path: str) -> str:
        """The absolute path of what is in the current folder; a URL, a Hub id and all else as it is."""
        file = (
            os.path.join(path, "config.json") if path == plan.model_path else path
        )  # else a Hub id, like a folder
        return os.path.abspath(path) if "://" not in path and is_there(file) else path

    return _with_paths(plan, absolute, output_dir=os.path.abspath(Path(plan.run.output_dir).expanduser()))


def moved(plan: Plan, directory: Path) -> Plan:
    """The plan of a run that lies in ``directory`` now. What is no longer where it was is looked for beside it, where
    it lay before."""
    before = plan.run.output_dir

    def beside(path: str) -> str:
        """The path; where it is gone, the one with the same place relative to ``directory``, if that exists."""
        if not (os.path.isabs(before) and os.path.isabs(path)) or is_there(path):
            return path
        now = os.path.normpath(directory / os.path.relpath(path, before))
        return now if is_there(now) else path

    return _with_paths(plan, beside, output_dir=str(directory))


def _with_paths(plan: Plan, change: Callable[[str], str], *, output_dir: str) -> Plan:
    def changed(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
        """The sources with their paths changed."""
        return tuple(replace(source, path=change(source.path)) for source in sources)

    data = replace(
        plan.data, sources=changed(plan.data.sources), eval_sources=changed(plan.data.eval_sources),
        chat_template=change(plan.data.chat_template),
    )  # fmt: skip
    run = replace(plan.run, output_dir=output_dir)
    return replace(plan, model_path=change(plan.model_path), data=data, run=run)
