"""Messages of a rank to the others outside their collectives: that it lives, why it ended, and who keeps them waiting.

Each rank has a file of its status in ``rank-logs/``. A thread keeps it up to date and watches over the steps: where
nothing moves for FITUNE_STALL_SECONDS, every rank writes down its stacks, and the job ends with the name of the rank
that is behind. Loading, saving and exporting have no such limit but that of the collectives (engine/ranks.py): how
long they take depends on the disk.
"""

import faulthandler
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from fitune.engine.protocol import Lazy
from fitune.engine.ranks import Ranks
from fitune.errors import (
    FituneError,
    HardwareError,
    PeerGone,
    RecipeError,
    RunDirectoryError,
    TrainingFailed,
    exit_code_of,
)
from fitune.measure.memory import highest_peaks
from fitune.models.weight_files import weights_identity
from fitune.track.metrics import last_step
from fitune.train.current import Run
from fitune.train.failure import Whereabouts
from fitune.units import counted
from fitune.values.plan import Plan
from fitune.values.predictions import Phase
from fitune.values.rank_status import (
    RankStatus,
    error_of,
    first_failure,
    is_left_to_launcher,
    read_statuses,
    write_status,
)
from fitune.values.reports import RankReport, StepReport
from fitune.values.run_directory import LOGS, rank_log, rank_stacks
from fitune.values.run_lock import owners_of
from fitune.values.serial import to_json

STALL = "FITUNE_STALL_SECONDS"
_STALL_SECONDS = 1800.0
"""The default of ``ddp_timeout`` in transformers: no step of any plan that is sensible takes so long in one phase."""

WATCHED = (*(phase.value for phase in Phase), "reading a batch", "evaluating")
_WORD_SECONDS = 3.0
"""A rank that failed has written why before its connections close; one that was killed is known by its process."""

GiveUp = Callable[[TrainingFailed], object]


def stall_seconds() -> float:
    """The longest time without progress in a step, from the environment; 0 is no limit."""
    text = os.environ.get(STALL, "")
    try:
        seconds = float(text) if text else _STALL_SECONDS
        if not 0 <= seconds < float("inf"):
            raise ValueError
    except ValueError:
        raise RecipeError(
            f"{STALL} is {text!r}", hint=f"seconds, e.g. {STALL}=3600; 0 for no limit"
        ) from None
    return seconds


@contextmanager
def known_to_peers(ranks: Ranks, directory: Path, where: Whereabouts, *, on_stall: GiveUp) -> Iterator[None]:
    """Inside, this rank's status is kept for the others, with its error when it fails.

    ``on_stall`` is called in another thread with the error that this process then ends with.
    """
    if ranks.is_alone:
        yield
        return
    logs = directory / LOGS
    watch = _Watch(RankStatus(rank=ranks.rank), logs, where, world=ranks.world, on_stall=on_stall)
    try:
        yield
    except Exception as error:  # written down for the others, and raised again
        if isinstance(error, PeerGone):
            name_the_cause(error, logs)
        watch.end(
            error if isinstance(error, FituneError) else TrainingFailed(f"{type(error).__name__}: {error}")
        )
        raise
    watch.end(None)


def name_the_cause(error: PeerGone, logs: Path) -> None:
    """Say in ``error`` which rank ended first and why, as far as its status or the end of its process tells."""
    if error.is_named:
        return
    error.is_named = True
    until = time.monotonic() + _WORD_SECONDS
    while True:
        statuses = {rank: s for rank, s in read_statuses(logs).items() if s.pid != os.getpid()}
        failed, gone = first_failure(statuses), [s for s in statuses.values() if s.is_lost]
        if failed or gone or time.monotonic() > until:
            break
        time.sleep(0.05)
    if failed:
        rank, cause = failed
        error.message = f"rank {rank} failed: {cause.message}"
        error.hint = cause.hint or f"what it said is in {logs.parent / rank_log(rank)}"
    elif gone:
        lost = gone[0]
        error.message = lost.error.message if lost.error else lost.loss(last_step(logs.parent))
        error.hint = "it was killed, or it crashed: `dmesg` tells of processes killed for want of memory"


class _Watch:
    """A thread beside the training that looks at it a few times per limit."""

    def __init__(
        self, status: RankStatus, logs: Path, where: Whereabouts, *, world: int, on_stall: GiveUp
    ) -> None:
        self.limit = stall_seconds()
        self.every = min(max((self.limit or _STALL_SECONDS) / 20, 0.05), 10.0)
        self.status, self.logs, self.where, self.world, self.on_stall = status, logs, where, world, on_stall
        self.main_thread = threading.get_ident()
        self.ended = threading.Event()
        logs.mkdir(parents=True, exist_ok=True)
        self.stacks = (logs.parent / rank_stacks(status.rank)).open("w")
        write_status(logs, status)
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    def end(self, error: FituneError | None) -> None:
        """Stops the thread and writes the last status, with ``error`` if there is one; an empty file of stacks goes."""
        self.ended.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.stacks.close()
        if not Path(self.stacks.name).stat().st_size:
            Path(self.stacks.name).unlink()
        told = None if error is None else error_of(error, exit_code=exit_code_of(error))
        write_status(self.logs, replace(self._now(), doing=self.where.doing, error=told))

    def _watch(self) -> None:
        """Time is counted in looks, so a job that was stopped as a whole (SIGSTOP) is not late afterwards."""
        last, still = self._now(), 0.0
        while not self.ended.wait(self.every):
            now = self._now()
            if now != last:
                last, still = now, 0.0
                self._tell(now)
                # for a hang that keeps Python's lock, and with it this thread: the dump of C ends the process, too
                faulthandler.cancel_dump_traceback_later()
                if self.limit and now.doing in WATCHED:
                    faulthandler.dump_traceback_later(2 * self.limit + 60, exit=True, file=self.stacks)
            elif self.limit and now.doing in WATCHED:
                still += self.every
                if still >= self.limit:
                    self._give_up()

    def _now(self) -> RankStatus:
        where = self.where
        return replace(self.status, step=where.step, doing=where.doing, signs=where.signs)

    def _tell(self, status: RankStatus) -> None:
        with suppress(OSError):  # a full disk stops the run where it matters
            write_status(self.logs, status)

    def _give_up(self) -> None:
        faulthandler.dump_traceback(self.stacks, all_threads=True)
        frame = sys._current_frames().get(
            self.main_thread
        )  # inside torch.distributed it waits for another rank
        collective = os.path.join("torch", "distributed", "")
        is_waiting = frame is not None and collective in frame.f_code.co_filename
        last = self._now()
        now = replace(last, stalled=True, is_waiting=is_waiting)
        self._tell(now)
        if self.ended.wait(4 * self.every + 1.0) or self._now() != last:
            return  # it went on after all; else the others have given up in this time, too
        error = stalled_error(read_statuses(self.logs), now, world=self.world, limit=self.limit)
        self._tell(replace(now, error=error_of(error, exit_code=error.exit_code)))
        self.on_stall(error)
        if self.status.rank == 0 and not is_left_to_launcher(self.logs):
            os.write(2, f"error: {error}\n".encode())
        os._exit(error.exit_code)  # the thread that trains cannot be reached


def stalled_error(
    statuses: dict[int, RankStatus], mine: RankStatus, *, world: int, limit: float
) -> TrainingFailed:
    """Names the ranks that are behind: those that do not answer, else the ones with the least done, and of these
    the ones that wait for nobody."""
    silent = [rank for rank in range(world) if rank not in statuses or not statuses[rank].stalled]
    least = min(((s.step, s.signs) for s in statuses.values()), default=(0, 0))
    last = [s for s in statuses.values() if (s.step, s.signs) == least]
    busy = [s.rank for s in last if not s.is_waiting]
    behind = silent or busy or [s.rank for s in last]
    names = f"rank {behind[0]} is" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} are"
    at = statuses.get(behind[0], mine)
    seen = "gives no sign of life, last seen in " if silent else ""
    return TrainingFailed(
        f"no progress for {limit:g} s: {names} behind ({seen}{at.doing}, step {at.step})",
        hint=f"the stacks of the ranks are in {LOGS}/; --resume goes on from the last checkpoint; "
        f"a longer limit: {STALL}={2 * limit:g}",
    )


_SEEN_SECONDS = 5.0
"""A network disk shows a new file to other machines within seconds."""


def require_shared_directory(ranks: Ranks, directory: Path, *, attempt: str) -> None:
    """Raises RunDirectoryError, on every rank, when one of them sees another ``directory`` than the first rank's.

    ``attempt`` owns that one. Else checkpoints would be in pieces, and the ranks could not say why they ended.
    """
    until = time.monotonic() + _SEEN_SECONDS
    seen = False
    while not seen and time.monotonic() < until:
        seen = any(owner.attempt == attempt for owner in owners_of(directory))
        time.sleep(0.0 if seen else 0.2)
    found = ranks.gathered((socket.gethostname(), seen))
    for rank, (host, has_seen) in enumerate(found):
        if not has_seen:
            raise RunDirectoryError(
                f"rank {rank} on {host} does not see output_dir {directory.absolute()} of rank 0 on {found[0][0]}: "
                "under that name it has another folder",
                hint="an output_dir on a disk that all machines share (NFS, Lustre, …), under the same path",
            )


def require_same_on_all(ranks: Ranks, plan: Plan, *, rows: str, base: str) -> None:
    """Raises HardwareError, on every rank, naming what differs between them: they would train different models."""
    if ranks.world != plan.hardware.num_gpus:
        raise HardwareError(
            f"the plan is for {counted(plan.hardware.num_gpus, 'rank')}, and {ranks.world} were started",
            hint=f"gpus: {max(1, ranks.world // plan.hardware.nodes)}, or start {plan.hardware.num_gpus}",
        )
    if plan.hardware.nodes > 1 and ranks.local == 0 and not base:  # each reads its own copy of them
        base = weights_identity(plan.model_path)
    facts = {
        "the plan": to_json(plan),
        "the training rows": rows,
        "the base model's weights": base,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    found = ranks.gathered(facts)
    for name, value in found[0].items():
        for rank, theirs in enumerate(found):
            if theirs[name] != value and theirs[name]:
                short = "" if name == "the plan" else f": {value[:16]} and {theirs[name][:16]}"
                raise HardwareError(
                    f"{name} differs between rank 0 and rank {rank}{short}",
                    hint="the same files, the same recipe and the same versions on every machine",
                )


def rows_of_ranks(run: Run) -> tuple[RankReport, ...]:
    """Peaks, and time of a step, of every rank; empty for one alone."""
    if run.ranks.is_alone:
        return ()
    steps = run.done[1:] or run.done
    waited = [step.waiting_seconds for step in steps if step.waiting_seconds is not None]
    busiest = max(steps, key=_busy_seconds, default=None)
    own = RankReport(
        rank=run.ranks.rank,
        memory=highest_peaks(step.memory_bytes for step in run.done),
        step_seconds=fmean(step.step_seconds for step in steps) if steps else 0.0,
        waiting_seconds=fmean(waited) if waited else None,
        busiest_step=busiest.step if busiest else 0,
        busiest_seconds=_busy_seconds(busiest) if busiest else 0.0,
    )
    return tuple(run.ranks.gathered(own))


def _busy_seconds(step: StepReport) -> float:
    return step.step_seconds - (step.waiting_seconds or 0.0)


class Gathered(Lazy):
    """The trained weights, each gathered from all ranks to the first one's host when it is asked for.

    The first rank asks for every one once, in their order; meanwhile the others ``follow``. So no rank holds more than
    one of them whole.
    """

    def __init__(self, ranks: Ranks, trained: Mapping[str, Tensor]) -> None:
        def gathered(name: str) -> Tensor:
            """The whole tensor, on every rank that calls. Raises RankFailed where the first rank failed."""
            tensor = trained[name]
            ranks.from_first(lambda: None)  # where the first rank fails, its error is said in this place
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        super().__init__(trained, lambda name: gathered(name).to("cpu"))
        self._gathered = gathered

    def follow(self) -> None:
        """Does the part of the other ranks. Raises RankFailed when the first one fails before it has asked for all."""
        for name in self:
            self._gathered(name)


def gathered_weights(run: Run) -> Gathered | None:
    """The trained weights of all ranks; None where each rank has all of them. Called by every rank."""
    trained = run.loaded.engine.trained()
    divided = any(isinstance(tensor, DTensor) for tensor in trained.values())
    return Gathered(run.ranks, trained) if divided else None
