"""A run's line of descent: which attempts, one after another, led to where it is now.

checkpoints/LINE names the present line. An attempt that goes on from an older checkpoint leaves its line at that
step, and what was saved after it counts no longer: neither for resuming nor for pruning, nor as the best.
"""

from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.sealed import read_sealed, sealed
from fitune.errors import CheckpointError
from fitune.files import write_atomically
from fitune.spec.serial import to_json

LINE = "LINE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run."""

    id: str
    after: int
    """The step it went on from; 0 from the beginning."""


Line = tuple[Attempt, ...]
"""Attempts in their order, each of which saved but for the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint that another one was trained from."""

    step: int
    digest: str
    """Digest of its COMMIT."""


@dataclass(slots=True, kw_only=True)
class Descent:
    """Where the run that is going on comes from."""

    line: Line
    parent: Parent | None = None
    """The last checkpoint; each save puts its own here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LineFile:
    line: Line
    digest: str = ""


def is_on(line: Line, *, saved_on: Line, step: int) -> bool:
    """True if ``line`` passes through a checkpoint of ``step`` that was saved on the line ``saved_on``."""
    if not saved_on or line[: len(saved_on)] != saved_on:
        return False
    later = line[len(saved_on) :]
    return not later or step <= later[0].after


def write_line(folder: Path, line: Line) -> None:
    """Raises OSError."""
    write_atomically(folder / LINE, to_json(sealed(_LineFile(line=line))))


def keep_line(folder: Path, line: Line) -> None:
    """Write the present line where the file does not say so already. Raises OSError."""
    try:
        if read_line(folder) == line:
            return
    except CheckpointError:
        pass  # missing at the first save, or damaged since
    write_line(folder, line)


def read_line(folder: Path) -> Line:
    """The present line of ``folder``. Raises CheckpointError when the file is missing or damaged."""
    try:
        return read_sealed(_LineFile, folder / LINE).line
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{folder / LINE}: cannot be read: {cause}") from error
