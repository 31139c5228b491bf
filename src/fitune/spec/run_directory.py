"""The names that a run writes into its directory, and that real files and folders stand behind them.

A link among them would let a run write, delete or read somewhere else; a named pipe would let it wait for ever.
"""

import os
import stat
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.spec.ownership import LOCK
from fitune.spec.temporaries import TEMPORARY

RETRY = "retry.json"
"""The next attempt after one that ran out of memory, until the fresh process takes it over."""

FILES = (
    "plan.json", "recipe.yaml", "estimate.json", "metrics.jsonl", "samples_before.json", "report.json", "report.html",
    "traceback.txt", RETRY, LOCK,
)  # fmt: skip
FOLDERS = (
    "checkpoints", "adapter", "adapter-unverified", "merged", "model", "model-unverified", "tensorboard",
)  # fmt: skip
"""Names that a run writes into its directory; --overwrite removes these and nothing else."""

_POINTERS = ("latest", "best")
"""The links that a run makes itself, in checkpoints/."""


def require_real_files(directory: Path, *, names: tuple[str, ...] = (*FILES, *FOLDERS)) -> None:
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
    """All but what is not finished: that is removed and never read; a killed run leaves links among it."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(TEMPORARY)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunDirectoryError(
            f"{folder} cannot be read: {error.strerror}", hint="choose another output_dir"
        ) from None
