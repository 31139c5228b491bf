"""Names of the files in a run's directory; links and pipes among them are refused.

A link would let a run write, delete or read somewhere else; a named pipe would let it wait for ever.
"""

import os
import stat
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import TEMPORARY

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
