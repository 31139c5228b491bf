"""Starts the ranks of one node with torch's elastic agent, passes signals on and stops them.

Rank 0 has the terminal; the others write into ``rank-logs/`` of the run directory, a file each.
"""

import dataclasses
import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fitune.errors import PeerGone, RankFailed, TrainingFailed
from fitune.files import remove
from fitune.launch.nodes import OneNode
from fitune.launch.place import TIMEOUT_SECONDS, interface_towards
from fitune.launch.signals import EXIT_CODES, STOPPING, handled_by
from fitune.values.rank_status import LAUNCHER, RankStatus, read_statuses
from fitune.values.run_directory import LOGS, rank_log

_STOPPING_SECONDS = "10"
"""After a second signal, ranks have so long to end by themselves before they are killed."""

_SEEING_SECONDS = 10.0
"""Ranks have so long to see that those of another node are gone, before they are stopped."""

_LOOK_SECONDS = 0.5

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
        return self.exit_code in EXIT_CODES.values()

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
    # who saw no progress says whose it is, and may have said so before the others could
    is_of_all = statuses[rank].stalled or (0 in errors and errors[0].message == error.message)
    return Ended(
        exit_code=code,
        cause=error.message if is_of_all else f"rank {rank} failed: {error.message}",
        hint="; ".join(dict.fromkeys(part for part in (error.hint, more) if part)),
    )


def fresh_logs(directory: Path) -> None:
    """Remove what the ranks of an earlier job said."""
    remove(directory / LOGS)
    (directory / LOGS).mkdir(parents=True)


def run_ranks(
    words: Sequence[str], *, processes: int, threads: int, directory: Path, nodes: OneNode, run_id: str
) -> Ended:
    """Run the ``processes`` of this node, each by ``words``, to their end.

    The first signal to this process asks them to finish their step and save; the next stops them at once. Where another
    of the ``nodes`` cannot go on, they are stopped.
    ``run_id``: the same on every node, and new for every call.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it prints what is said below
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _STOPPING_SECONDS)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    own_signals = {"signals_to_handle": ""} if "signals_to_handle" in fields else {}
    place = nodes.place
    if place is None:  # a port of this machine
        meeting: dict[str, Any] = {"max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    else:  # the store of node 0, as torch's static rendezvous does, which numbers the nodes as they were told
        if interface := interface_towards(place.host, place.port):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would often take lo
        host = "localhost" if place.node == 0 else place.host
        meeting = {
            "max_nodes": place.nodes, "rdzv_backend": "static", "rdzv_endpoint": replace(place, host=host).address,
            "rdzv_configs": {"rank": place.node, "timeout": int(TIMEOUT_SECONDS)},
        }  # fmt: skip
    config = LaunchConfig(
        nproc_per_node=processes, min_nodes=meeting["max_nodes"], run_id=run_id or uuid.uuid4().hex, max_restarts=0,
        logs_specs=_one_file_a_rank(directory), **meeting, **own_signals,
    )  # fmt: skip
    first = processes * nodes.number
    ranks = range(first, first + processes)
    exits: dict[int, Exit] = {}
    with _passed_on() as received, _stopped_by(nodes) as stopped:
        try:
            elastic_launch(config, words[0])(*words[1:])
        except ChildFailedError as failed:
            exits = {
                rank: Exit(code=failure.exitcode, at=failure.timestamp)
                for rank, failure in failed.failures.items()
            }
        finally:
            _stop_all(read_statuses(directory / LOGS), ranks)
    if stopped:
        return Ended(exit_code=TrainingFailed.exit_code)
    return ended(exits, directory, received=received, ranks=ranks)


@contextmanager
def _stopped_by(nodes: OneNode) -> Iterator[list[str]]:
    """Inside, the ranks of this node are stopped when another one has ended badly or is silent; gives why.

    They have time to see it themselves, by closed connections, and to say so in the report.
    """
    stopped: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        """Waits for trouble on another node; stops ranks that run _SEEING_SECONDS later; notes why."""
        while not is_over.wait(_LOOK_SECONDS):
            if not nodes.trouble:
                continue
            if not is_over.wait(_SEEING_SECONDS):
                stopped.append(nodes.trouble)
                _stop(_ranks())
            return

    if nodes.place is None:
        yield stopped
        return
    thread = threading.Thread(target=watch, name="other nodes", daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _passed_on() -> Iterator[list[int]]:
    """Inside, the first signal is passed on to the ranks, and a second one ends this program; gives those received.

    The agent's own handler would stop waiting at the first: the time a step takes is not known to it.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        """Passes the first signal on to the ranks. Raises SystemExit at the second one, or where no rank runs."""
        received.append(number)
        ranks = _ranks()
        if len(received) > 1 or not ranks:
            raise SystemExit(128 + number)
        with suppress(OSError):  # of a terminal that was closed
            os.write(2, f"\n{STOPPING}\n".encode())
        for process in ranks:
            # a SIGINT while a rank still starts would end it with a traceback
            _signal(process, signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM)

    with handled_by(handle):
        yield received


def _ranks() -> list[psutil.Process]:
    """Children that lead a session: the agent starts each rank in one of its own."""
    found = []
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                found.append(child)
    return found


def _one_file_a_rank(directory: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class OneFile(LogsSpecs):  # type: ignore[misc]  # torch does not type it
        """Rank 0 keeps the terminal; the others write standard error, and with it all they say, into their file."""

        @property
        def root_log_dir(self) -> str:
            """Folder in the run directory, where torch would make a temporary one."""
            return str(directory / LOGS)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """Output of each local rank; sets the launcher's process id and no error file in its environment."""
            ranks = {local: int(environment["RANK"]) for local, environment in envs.items()}
            for environment in envs.values():
                environment["TORCHELASTIC_ERROR_FILE"] = ""
                environment[LAUNCHER] = str(os.getpid())
            return LogsDest(
                stdouts={local: os.devnull if rank else "" for local, rank in ranks.items()},
                stderrs={
                    local: str(directory / rank_log(rank)) if rank else "" for local, rank in ranks.items()
                },
                error_files=dict.fromkeys(envs, os.devnull),
            )

    return OneFile()


def _stop_all(statuses: dict[int, RankStatus], ranks: range) -> None:
    """End every one of ``ranks`` that still runs, and all that it started."""
    _stop(psutil.Process().children(recursive=True))
    for rank in statuses.keys() & set(
        ranks
    ):  # a rank that was killed leaves its own children in its process group
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(statuses[rank].pid, signal.SIGKILL)


def _stop(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=int(_STOPPING_SECONDS))
    for process in alive:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
