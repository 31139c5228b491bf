"""A rank in a worker of Ray Train: the function of every worker, which joins the others and trains like any rank.

An error is the end, since it would come again; a rank that lost another one without a word raises, and Ray starts all
of them anew. Then the last COMMIT says where they go on, whatever Ray remembers.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitune.checkpoint.commit import Commit, last_saved
from fitune.errors import FituneError, PeerGone, RankFailed, exit_code_of
from fitune.launch.ray_cluster import loaded_ray
from fitune.launch.torchrun import Ended
from fitune.session.events import Emit, Note, ignore_event
from fitune.session.signals import INTERRUPTED
from fitune.session.train.attempts import Attempt, resumed_from
from fitune.session.train.beginning import ready_to_push
from fitune.track.metrics import last_step, readable_steps
from fitune.values.plan import Plan
from fitune.values.rank_status import (
    LAUNCHER,
    RankStatus,
    error_of,
    first_failure,
    read_statuses,
    write_status,
)
from fitune.values.reports import Restart, RunReport, StepReport
from fitune.values.run_directory import LOGS
from fitune.values.run_lock import WAIT_VARIABLE
from fitune.values.serial import from_json, to_json

WORD_SECONDS = 15.0
"""Ranks have so long to say why they end, once one of them is gone: rank 0 writes the report in that time."""
_ASKING_SECONDS = 2.0
_OWNER_SECONDS = "30"
"""A former first rank may live, and own the run's directory, so long after its connections closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Why the workers of a job were asked to save and end, and others go on."""

    cause: str
    workers_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders for every worker."""

    attempts: dict[int, str]
    """By the number of workers."""
    had: Commit | None
    """The last checkpoint before this job."""
    change: Change | None
    folder: str
    """Folder of the driver: relative paths of the plan begin there."""
    environment: dict[str, str]
    threads: int
    mailbox: Any


def train_as_rank(config: dict[str, Any]) -> Ended:
    """Train as the rank that Ray made this process; every worker calls this."""
    orders: Orders = config["orders"]
    os.environ.update({WAIT_VARIABLE: _OWNER_SECONDS, **orders.environment, LAUNCHER: str(os.getppid())})
    with suppress(OSError):
        os.chdir(orders.folder)
    import torch

    from fitune.engine.ranks import joined_ranks
    from fitune.session.train.training import run_to_end  # only the workers train

    torch.set_num_threads(orders.threads)
    with joined_ranks() as ranks:
        ray = loaded_ray()
        try:
            mine = int(ray.get(orders.mailbox.begin.remote(ranks.rank)))
        except ray.exceptions.RayError:
            return Ended(exit_code=1)  # the driver waits no longer
        before = ranks.from_first(lambda: mine)  # a group that grew has ranks that never began
        attempt = from_json(Attempt, orders.attempts[ranks.world])
        emit: Emit = (lambda event: orders.mailbox.tell.remote(event)) if ranks.is_first else ignore_event
        talker = Talker(orders.mailbox)
        try:
            if before and ranks.from_first(lambda: first_failure(read_statuses(attempt.directory / LOGS))):
                return Ended(exit_code=1)  # the statuses say why: it would fail again
            change = None if before else orders.change
            if before or change:
                attempt = ranks.from_first(lambda: going_on(attempt, orders.had, ranks.world, change=change))
                if ranks.is_first and not change:
                    emit(Note("; ".join(one.cause for one in attempt.restarts[-1:]) + ": starting again"))
            ready_to_push(attempt.plan, ranks)  # the driver's token is not here
            report = run_to_end(attempt, emit=emit, stop_asked=talker.stop_asked, sinks=[talker], ranks=ranks)
            talker.close(ranks.gathered)
            code = INTERRUPTED if report.status == "interrupted" else 0
            return Ended(exit_code=code, left_nodes=talker.left_nodes)
        except FituneError as error:
            talker.abandon()
            if isinstance(error, PeerGone) and not first_failure(read_statuses(attempt.directory / LOGS)):
                raise RankFailed(error.message) from error
            end = Ended(exit_code=exit_code_of(error), cause=error.message, hint=error.hint or "")
            if not ranks.is_alone and not isinstance(error, PeerGone):
                # It is written down. The others see the end of this process' connections, which nothing else closes
                # while they wait in a collective.
                with suppress(ray.exceptions.RayError):
                    ray.get(orders.mailbox.fail.remote(to_json(end)))
                os._exit(end.exit_code)
            return end


def going_on(attempt: Attempt, had: Commit | None, workers: int, *, change: Change | None = None) -> Attempt:
    """The attempt from the last checkpoint that this job saved, else from where the job began; ``had`` is the one
    before the job. ``change``: why, where no rank was lost."""
    directory = attempt.directory
    last = last_saved(directory)
    saved = None if last == had else last
    earlier = last if saved or (attempt.resume and not attempt.overwrite) else None
    after_step = 0 if earlier is None else earlier.step
    log, logs = directory / "metrics.jsonl", directory / LOGS
    lost = [step for step in readable_steps(log) if step.step > after_step]
    statuses = read_statuses(logs)
    change = change or Change(
        cause=cause_of_loss(statuses), workers_before=max(statuses, default=workers - 1) + 1
    )
    signs = [file.stat().st_mtime for file in (*logs.glob("rank*.json"), log) if file.is_file()]
    present = Restart(
        cause=change.cause, workers_before=change.workers_before, workers=workers, after_step=after_step,
        lost_steps=len(lost), lost_at=max(signs, default=time.time()),
        repeated_seconds=sum(step.step_seconds + step.data_seconds for step in lost),
    )  # fmt: skip
    return replace(
        attempt,
        resume=resumed_from(attempt, has_saved=saved is not None),
        overwrite=attempt.overwrite and saved is None,
        restarts=(
            *(one for step in lost for one in step.restarts),
            present,
        ),  # lost steps alone tell of earlier ones
    )


class Talker:
    """Talks with Ray for this rank, in a thread beside the steps. It is one of the run's sinks.

    Every two seconds it asks Ray whether a node will be taken away, which is a barrier of all ranks.
    """

    left_nodes: tuple[str, ...] = ()

    def __init__(self, mailbox: Any) -> None:
        self._stop, self._over = threading.Event(), threading.Event()
        self._lock, self._rounds = threading.Lock(), 0
        self._thread = threading.Thread(target=self._talk, name="ray", daemon=True)
        self._listener = threading.Thread(target=self._listen, args=(mailbox,), name="mailbox", daemon=True)
        self._listener.start()

    def stop_asked(self) -> bool:
        """True once the mailbox has told the ranks to stop."""
        return self._stop.is_set()

    def start(self, plan: Plan, run_name: str) -> None:
        """Begins to ask Ray; a later call changes nothing."""
        if not self._thread.is_alive():
            self._thread.start()

    def step(self, report: StepReport) -> None:
        """Does nothing."""
        return

    def finish(self, report: RunReport | None) -> None:
        """Does nothing: ``close`` and ``abandon`` end the asking."""
        return

    def close(self, gathered: Callable[[int], Sequence[int]]) -> None:
        """Ask a last time. Every rank has to ask as often as the others."""
        with self._lock:
            self._over.set()
        last = max(gathered(self._rounds)) + 1
        if self._thread.is_alive():
            self._thread.join()  # in a round that the others have not begun yet
        while self._rounds < last:
            self._rounds += 1
            self._round()

    def abandon(self) -> None:
        """Ends the asking without waiting for the other ranks."""
        self._over.set()

    def _listen(self, mailbox: Any) -> None:
        ray = loaded_ray()
        with suppress(ray.exceptions.RayError):
            ray.get(mailbox.stop_asked.remote())
            self._stop.set()

    def _talk(self) -> None:
        ray = loaded_ray()
        with suppress(ray.exceptions.RayError):  # another worker is lost: the run sees it by itself
            while not self._over.wait(_ASKING_SECONDS):
                with self._lock:
                    if self._over.is_set():
                        return
                    self._rounds += 1
                self._round()

    def _round(self) -> None:
        ray = loaded_ray()
        if (notice := ray.train.get_preemption_info()) is not None:
            self.left_nodes = tuple(notice.preempted_node_ids)
            self._stop.set()


def take_down_losses(logs: Path, ranks: list[int]) -> None:
    """Write down that ``ranks`` are lost, and return once the others have said why they end: Ray, which found the loss,
    waits for this and then ends them at once."""
    write_losses(logs, ranks)
    until = time.monotonic() + WORD_SECONDS
    while not all(status.has_ended for status in read_statuses(logs).values()) and time.monotonic() < until:
        time.sleep(0.1)


def write_losses(logs: Path, ranks: list[int]) -> None:
    """Write into the statuses of ``ranks`` that they ended without a word, where they said none."""
    statuses = read_statuses(logs)
    for status in (statuses[rank] for rank in ranks if rank in statuses):
        if status.error is None:
            error = error_of(PeerGone(status.loss(last_step(logs.parent))), exit_code=PeerGone.exit_code)
            write_status(logs, replace(status, error=replace(error, is_by_another=True)))


def cause_of_loss(statuses: dict[int, RankStatus]) -> str:
    """Which rank ended first and why, as far as it or another one wrote it down."""
    if failed := first_failure(statuses):
        return f"rank {failed[0]} failed: {failed[1].message}"
    named = [s.error.message for s in statuses.values() if s.error and s.error.message.startswith("rank ")]
    silent = [s for s in statuses.values() if s.error is None]
    if not named and 0 < len(silent) < len(statuses):
        return silent[0].loss()
    return named[0] if named else "the workers were lost"
