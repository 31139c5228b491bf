"""The status of each rank of a job, a small file each in ``rank-logs/``: read by the other ranks, by the launcher that
started them, and by people."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fitune.errors import FituneError, PeerGone
from fitune.files import process_lives, remove_stale_siblings, temporary_sibling
from fitune.values.serial import from_data, read_json, to_json

LAUNCHER = "FITUNE_LAUNCHER"
"""Environment of a rank: the process id of the program that started it, and tells people of its signals and error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """Reason why a rank ended."""

    kind: str
    message: str
    hint: str = ""
    exit_code: int
    at: float
    """``time.time`` when it happened."""
    is_by_another: bool = False
    """Another process found the rank ended without a word, and wrote this for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """State of a rank when it last looked at itself."""

    rank: int
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    step: int = 0
    doing: str = "starting"
    signs: int = 0
    """Phases begun so far, in all steps."""
    is_waiting: bool = False
    """It waits for the other ranks."""
    stalled: bool = False
    """It has seen no progress of its own for longer than the limit."""
    error: RankError | None = None

    @property
    def is_gone(self) -> bool:
        """True if its process ran on this machine and no longer does."""
        return self.host == socket.gethostname() and not process_lives(self.pid)

    @property
    def is_lost(self) -> bool:
        """True if it is known to have ended without a word."""
        return self.is_gone if self.error is None else self.error.is_by_another

    @property
    def has_ended(self) -> bool:
        """True if it has said why it ends, or its process is known to be gone."""
        return self.error is not None or self.is_gone

    def loss(self, logged: int = 0) -> str:
        """The sentence of a rank that ended without a word. It wrote its status up to ten seconds before: ``logged``,
        the last step in metrics.jsonl, may be later."""
        where = f"process {self.pid} on {self.host}"
        log = f"; metrics.jsonl ends at step {logged}" * (logged > self.step)
        return f"rank {self.rank} ({where}) ended without a word (last seen: {self.doing}, step {self.step}{log})"


def status_of(rank: int) -> str:
    """File name of a rank's status."""
    return f"rank{rank}.json"


def write_status(logs: Path, status: RankStatus) -> None:
    """Replace the file of this rank, unsynced: it is of use while the machine runs."""
    temporary = temporary_sibling(logs / status_of(status.rank))
    temporary.write_text(to_json(status))
    os.replace(temporary, logs / status_of(status.rank))


def read_statuses(logs: Path) -> dict[int, RankStatus]:
    """Every readable status in ``logs``, by rank."""
    found: dict[int, RankStatus] = {}
    for file in sorted(logs.glob("rank*.json")):
        try:
            status = from_data(RankStatus, read_json(file))
        except (OSError, ValueError):
            continue
        found[status.rank] = status
    return found


def first_failure(statuses: Mapping[int, RankStatus]) -> tuple[int, RankError] | None:
    """The rank that failed first by an error of its own, not by the loss of another, and that error."""
    own = {rank: s.error for rank, s in statuses.items() if s.error and s.error.kind != PeerGone.__name__}
    return min(own.items(), key=lambda one: one[1].at, default=None)


def is_left_to_launcher(logs: Path) -> bool:
    """True if this process wrote down its error for a launcher of ours, which says it: a rank may be stopped for the
    error of another one before it has said its own."""
    own = [status for status in read_statuses(logs).values() if status.pid == os.getpid()]
    return LAUNCHER in os.environ and any(status.error is not None for status in own)


def forget_statuses(logs: Path) -> None:
    """Remove the statuses of an earlier job."""
    for file in logs.glob("rank*.json"):
        file.unlink(missing_ok=True)
    remove_stale_siblings(logs)


def error_of(error: FituneError, *, exit_code: int) -> RankError:
    """Returns the error as a rank's status keeps it."""
    return RankError(
        kind=error.kind, message=error.message, hint=error.hint or "", exit_code=exit_code, at=time.time()
    )
