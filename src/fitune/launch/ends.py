"""How ranks ended: from their exit codes, statuses and logs to one exit code and its cause."""

import signal
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import PeerGone, RankFailed, TrainingFailed
from fitune.spec.rank_status import RankStatus, read_statuses
from fitune.spec.run_directory import LOGS, rank_log

_STOPPED = {-signal.SIGTERM, -signal.SIGHUP, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
"""Exit codes of a rank that ended because it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a node's ranks: an exit code, and what is to be said of the rank that caused it."""

    exit_code: int
    cause: str = ""
    """Empty when all is well, and where another node has the cause."""
    hint: str = ""
    is_said: bool = False
    """Rank 0 has said it on its terminal, which other ranks do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of one rank's process: its exit code, negative for a signal, and the second at which it was seen."""

    code: int
    at: int = 0


def ended(exits: dict[int, Exit], directory: Path, *, received: list[int], ranks: range) -> Ended:
    """End of the job whose ``ranks`` on this node ended so, after the signals that this program received.

    The cause is the rank that failed first by itself: not one whose peer was gone, or that was asked to stop. The
    agent kills ranks that do not stop, but half a minute later; and it stops ranks that have just written down why
    they fail.
    """
    statuses = read_statuses(directory / LOGS)
    own = {
        rank: end
        for rank, end in (_told(statuses, ranks) | exits).items()
        if end.code and end.code not in _STOPPED and not _waited_for_another(end.code, statuses.get(rank))
    }
    if not own and received:
        return Ended(exit_code=128 + received[0])
    if not own:
        return Ended(exit_code=TrainingFailed.exit_code if exits else 0)
    rank = min(
        own, key=lambda rank: (own[rank].at, own[rank].code >= 0, _failed_at(statuses.get(rank)), rank)
    )
    log, code = directory / rank_log(rank), own[rank].code
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system kills so where memory runs out: see `dmesg`" if code == -signal.SIGKILL else ""
        going_on = "fitune train … --resume goes on from the last checkpoint"
        return Ended(
            exit_code=TrainingFailed.exit_code, cause=f"rank {rank} was killed by {name}{hint}", hint=going_on
        )
    status = statuses.get(rank)
    more = f"what it said is in {log}" if rank else ""
    if status is None or status.error is None:
        return Ended(
            exit_code=code, cause=f"rank {rank} failed: {_last_line(log)}", hint=more, is_said=rank == 0
        )
    said = status.error.message
    is_of_all = _message(statuses.get(0)) == said
    return Ended(
        exit_code=code,
        cause=said if is_of_all else f"rank {rank} failed: {said}",
        hint="; ".join(part for part in (status.error.hint, more) if part),
    )


def _told(statuses: dict[int, RankStatus], ranks: range) -> dict[int, Exit]:
    """The ends that these ``ranks`` have written down."""
    errors = {rank: statuses[rank].error for rank in ranks if rank in statuses}
    return {
        rank: Exit(code=error.exit_code, at=int(error.at))
        for rank, error in errors.items()
        if error is not None
    }


def _waited_for_another(code: int, status: RankStatus | None) -> bool:
    if code != RankFailed.exit_code:
        return False
    return status is None or status.error is None or status.error.kind == PeerGone.__name__


def _failed_at(status: RankStatus | None) -> float:
    return status.error.at if status is not None and status.error is not None else 0.0


def _message(status: RankStatus | None) -> str:
    return status.error.message if status is not None and status.error is not None else ""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "it said nothing"
