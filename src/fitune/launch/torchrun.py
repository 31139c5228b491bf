"""Starts the ranks of one node with torch's elastic agent, and says which of them failed first and why.

Rank 0 has the terminal; the others write into ``rank-logs/`` of the run directory, a file each.
"""

import dataclasses
import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fitune.errors import PeerGone, RankFailed, TrainingFailed
from fitune.files import remove
from fitune.launch.board import interface_towards
from fitune.launch.command import RankCommand
from fitune.launch.nodes import TIMEOUT_SECONDS, Nodes, Place
from fitune.spec.rank_status import LAUNCHER, RankStatus, read_statuses
from fitune.spec.run_directory import LOGS, rank_log

_STOPPING_SECONDS = "10"
"""After a second signal, ranks have so long to end by themselves before they are killed."""

_SEEING_SECONDS = 10.0
"""Ranks have so long to see that those of another node are gone, before they are stopped."""

_LOOK_SECONDS = 0.5

_SENT = {signal.SIGINT: signal.SIGTERM, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGHUP}
"""Signal received -> signal sent to the ranks: a SIGINT while a rank still starts would end it with a traceback."""

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


def fresh_logs(directory: Path) -> None:
    """Remove what the ranks of an earlier job said."""
    remove(directory / LOGS)
    (directory / LOGS).mkdir(parents=True)


def run_ranks(command: RankCommand, *, directory: Path, nodes: Nodes, run_id: str) -> Ended:
    """Run every rank of this node to its end. The first signal to this process asks them to finish their step and
    save; the next stops them at once. Where another of the ``nodes`` cannot go on, they are stopped.

    ``run_id``: the same on every node, and new for every call.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    (directory / LOGS).mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it prints what is said below
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _STOPPING_SECONDS)
    os.environ.update(command.environment)
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    own_signals = {"signals_to_handle": ""} if "signals_to_handle" in fields else {}
    config = LaunchConfig(
        nproc_per_node=command.processes,
        run_id=run_id or uuid.uuid4().hex,
        max_restarts=0,
        logs_specs=_one_file_a_rank(directory),
        **_meeting_place(nodes.place),
        **own_signals,
    )
    first = command.processes * (0 if nodes.place is None else nodes.place.node)
    ranks = range(first, first + command.processes)
    program, *words = command.words
    exits: dict[int, Exit] = {}
    with _passed_on() as received, _stopped_by(nodes) as stopped:
        try:
            elastic_launch(config, program)(*words)
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


def _meeting_place(place: Place | None) -> dict[str, Any]:
    """Meeting place of torch's agents of all nodes: on one machine a port of its own; else the store of node 0, as
    its static rendezvous does, which numbers the nodes as they were told."""
    if place is None:
        return {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    host = "localhost" if place.node == 0 else place.host
    interface = interface_towards(place.host, place.port)
    if interface:  # gloo would take the one that this machine's name leads to, which often is lo
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return {
        "min_nodes": place.nodes,
        "max_nodes": place.nodes,
        "rdzv_backend": "static",
        "rdzv_endpoint": replace(place, host=host).address,
        "rdzv_configs": {"rank": place.node, "timeout": int(TIMEOUT_SECONDS)},
    }


@contextmanager
def _stopped_by(nodes: Nodes) -> Iterator[list[str]]:
    """Inside, the ranks of this node are stopped when another one has ended badly or is silent; gives why.

    They have time to see it themselves, by closed connections, and to say so in the report.
    """
    stopped: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if not nodes.trouble:
                continue
            if not is_over.wait(_SEEING_SECONDS):
                stopped.append(nodes.trouble)
                _stop(_ranks())
            return

    thread = threading.Thread(target=watch, name="other nodes", daemon=True)
    if nodes.place is not None:
        thread.start()
    try:
        yield stopped
    finally:
        is_over.set()
        if nodes.place is not None:
            thread.join()


@contextmanager
def _passed_on() -> Iterator[list[int]]:
    """Inside, the first signal is passed on to the ranks, and a second one ends this program; gives those received.

    The agent's own handler would stop waiting at the first: the time a step takes is not known to it.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ranks = _ranks()
        if len(received) > 1 or not ranks:
            raise SystemExit(128 + number)
        _say("stopping after this step; once more stops at once")
        for process in ranks:
            _signal(process, _SENT[signal.Signals(number)])

    wanted = [number for number in _SENT if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield received
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _say(text: str) -> None:
    with suppress(OSError):  # of a terminal that was closed
        os.write(2, f"\n{text}\n".encode())


def _ranks() -> list[psutil.Process]:
    """Children that lead a session: the agent starts each rank in one of its own."""
    return [child for child in psutil.Process().children() if _leads_session(child.pid)]


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _one_file_a_rank(directory: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class OneFile(LogsSpecs):  # type: ignore[misc]  # torch does not type it
        """Rank 0 keeps the terminal; the others write standard error, and with it all they say, into their file."""

        @property
        def root_log_dir(self) -> str:
            return str(directory / LOGS)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
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


def _stop_all(statuses: dict[int, RankStatus], ranks: range) -> None:
    """End every one of ``ranks`` that still runs, and all that it started."""
    _stop(psutil.Process().children(recursive=True))
    for status in (
        statuses[rank] for rank in ranks if rank in statuses
    ):  # a rank that was killed leaves its own children in its process group
        try:
            os.killpg(status.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _stop(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=int(_STOPPING_SECONDS))
    for process in alive:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
