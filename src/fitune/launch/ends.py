"""How ranks ended: from their exit codes, statuses and logs to one exit code and its cause."""

import signal
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import PeerGone, RankFailed, TrainingFailed
from fitune.spec.rank_status import read_statuses
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
    left_nodes: tuple[str, ...] = ()
    """Ids of nodes of a Ray cluster that will be taken away, for which the ranks were stopped."""

    @property
    def is_stop(self) -> bool:
        """True if a signal ended it: the step was finished and saved."""
        return self.exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)

    @property
    def is_well(self) -> bool:
        """True if it is complete, or was asked to stop."""
        return not self.exit_code or self.is_stop


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
    errors = {rank: status.error for rank, status in statuses.items() if status.error is not None}
    told = {
        rank: Exit(code=errors[rank].exit_code, at=int(errors[rank].at)) for rank in ranks if rank in errors
    }
    own = {
        rank: end
        for rank, end in (told | exits).items()
        if end.code
        and end.code not in _STOPPED
        and not (
            end.code == RankFailed.exit_code
            and (rank not in errors or errors[rank].kind == PeerGone.__name__)
        )
    }
    if not own and received:
        return Ended(exit_code=128 + received[0])
    if not own:
        return Ended(exit_code=TrainingFailed.exit_code if exits else 0)
    failed_at = {rank: errors[rank].at if rank in errors else 0.0 for rank in own}
    rank = min(own, key=lambda rank: (own[rank].at, own[rank].code >= 0, failed_at[rank], rank))
    log, code = directory / rank_log(rank), own[rank].code
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system kills so where memory runs out: see `dmesg`" if code == -signal.SIGKILL else ""
        going_on = "fitune train … --resume goes on from the last checkpoint"
        return Ended(
            exit_code=TrainingFailed.exit_code, cause=f"rank {rank} was killed by {name}{hint}", hint=going_on
        )
    more = f"what it said is in {log}" if rank else ""
    if rank not in errors:
        lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        cause = f"rank {rank} failed: {lines[-1] if lines else 'it said nothing'}"
        return Ended(exit_code=code, cause=cause, hint=more, is_said=rank == 0)
    error = errors[rank]
    is_of_all = 0 in errors and errors[0].message == error.message
    return Ended(
        exit_code=code,
        cause=error.message if is_of_all else f"rank {rank} failed: {error.message}",
        hint="; ".join(dict.fromkeys(part for part in (error.hint, more) if part)),
    )
