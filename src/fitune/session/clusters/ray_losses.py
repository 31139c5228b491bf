"""Lost ranks of a Ray run: who writes the loss down, how long the others may take to say why, what the cause is."""

import time
from dataclasses import replace
from pathlib import Path

from fitune.errors import PeerGone
from fitune.spec.rank_status import RankStatus, error_of, read_statuses, write_status
from fitune.track.metrics import last_step

WORD_SECONDS = 15.0
"""Ranks have so long to say why they end, once one of them is gone: rank 0 writes the report in that time."""
_LOOK_SECONDS = 0.1


def take_down_losses(logs: Path, ranks: list[int]) -> None:
    """Write down that ``ranks`` are lost, and return once the others have said why they end: Ray, which found the loss,
    waits for this and then ends them at once."""
    write_losses(logs, ranks)
    until = time.monotonic() + WORD_SECONDS
    while not all(status.has_ended for status in read_statuses(logs).values()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def write_losses(logs: Path, ranks: list[int]) -> None:
    """Write into the statuses of ``ranks`` that they ended without a word, where they said none."""
    statuses = read_statuses(logs)
    for status in (statuses[rank] for rank in ranks if rank in statuses):
        if status.error is None:
            error = error_of(PeerGone(status.loss(last_step(logs.parent))), exit_code=PeerGone.exit_code)
            write_status(logs, replace(status, error=replace(error, is_by_another=True)))


def has_first_ended(logs: Path) -> bool:
    """True once rank 0 has said why it ends, with the report written before, or is gone."""
    first = read_statuses(logs).get(0)
    return first is None or first.has_ended


def has_said_why(logs: Path) -> bool:
    """True if a rank failed by an error of its own, which would come again."""
    return bool(_failed_by_themselves(read_statuses(logs)))


def _failed_by_themselves(statuses: dict[int, RankStatus]) -> list[RankStatus]:
    """Statuses of the ranks that failed by another error than the loss of a rank."""
    return [s for s in statuses.values() if s.error is not None and s.error.kind != PeerGone.__name__]


def cause_of_loss(statuses: dict[int, RankStatus]) -> str:
    """Which rank ended first and why, as far as it or another one wrote it down."""
    if failed := _failed_by_themselves(statuses):
        first = min(failed, key=lambda status: status.error.at if status.error else 0.0)
        return f"rank {first.rank} failed: {first.error.message if first.error else ''}"
    named = [
        s.error.message
        for s in statuses.values()
        if s.error is not None and s.error.message.startswith("rank ")
    ]
    if named:
        return named[0]
    silent = [s for s in statuses.values() if s.error is None]
    if 0 < len(silent) < len(statuses):
        return silent[0].loss()
    return "the workers were lost"
