"""trackers/tracked.json in the run directory: under which id each tracker has the run, where, and how much of it."""

from dataclasses import dataclass
from pathlib import Path

from fitune.files import read_text, write_atomically
from fitune.values.serial import from_json, to_json

FOLDER = "trackers"
"""In the run directory: this record, and what the trackers' libraries say, a file each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """A run in one tracker, over all attempts at it."""

    tracker: str
    run_id: str
    has_begun: bool = False
    """True once the tracker has the run."""
    link: str = ""
    command: str = ""
    """Shows or sends what lies on this disk."""
    note: str = ""
    sent: int = 0
    """Steps."""
    lost: int = 0
    """Steps that the tracker did not take."""
    failure: str = ""
    """Why the last attempt was not tracked to its end."""

    def describe(self) -> str:
        """One sentence for people."""
        place = self.link or (f"`{self.command}`" if self.command else "")
        parts = [f"{self.sent:,} steps" + (f", {self.lost:,} lost" if self.lost else ""), place, self.note]
        if self.failure:
            parts.append(f"failed: {self.failure}")
        return f"tracker {self.tracker}: {'; '.join(part for part in parts if part)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    tracked: tuple[Tracked, ...] = ()


def read_tracked(directory: Path) -> tuple[Tracked, ...]:
    """The record of each tracker of the run in ``directory``; none where the file is absent or damaged: a tracker is
    never worth a run."""
    try:
        return from_json(_Record, read_text(directory / FOLDER / _FILE, follow_links=False)).tracked
    except (OSError, ValueError):
        return ()


def write_tracked(directory: Path, tracked: tuple[Tracked, ...]) -> None:
    """Raises OSError."""
    (directory / FOLDER).mkdir(exist_ok=True)
    write_atomically(directory / FOLDER / _FILE, to_json(_Record(tracked=tracked)))


def log_of(directory: Path, tracker: str) -> Path:
    """File into which the library of ``tracker`` writes its words."""
    return directory / FOLDER / f"{tracker}.log"


_FILE = "tracked.json"
