"""Starts the ranks of one machine with torch's elastic agent, and says which of them failed first and why.

Rank 0 has the terminal; the others write into ``rank-logs/`` of the run directory, a file each.
"""

import logging
import os
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fitune.errors import RankFailed
from fitune.files import remove
from fitune.launch.command import RankCommand
from fitune.spec.run_directory import LOGS, log_of

_SAVING_SECONDS = "600"
"""A rank that was asked to stop may finish its step and save for so long before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job ended: an exit code, and what is to be said of the rank that caused it."""

    exit_code: int
    cause: str = ""
    """Empty when all is well, and where rank 0 has said it itself."""


def run_ranks(command: RankCommand, *, directory: Path) -> Ended:
    """Run every rank to its end. A signal to this process goes to all of them."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    remove(directory / LOGS)
    (directory / LOGS).mkdir(parents=True)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it prints what is said below
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVING_SECONDS)
    os.environ.update(command.environment)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=command.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=_one_file_a_rank(directory),
    )
    program, *words = command.words
    try:
        elastic_launch(config, program)(*words)
    except SignalException as stopped:
        return Ended(exit_code=128 + stopped.sigval)
    except ChildFailedError as failed:
        return _ended({rank: failure.exitcode for rank, failure in failed.failures.items()}, directory)
    finally:
        _stop_all()
    return Ended(exit_code=0)


def _one_file_a_rank(directory: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class OneFile(LogsSpecs):  # type: ignore[misc]  # torch does not type it
        """Rank 0 keeps the terminal; the others write standard error, and with it all they say, into their file."""

        @property
        def root_log_dir(self) -> str:
            return str(directory / LOGS)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = {rank: str(directory / log_of(rank)) if rank else "" for rank in envs}
            for environment in envs.values():
                environment["TORCHELASTIC_ERROR_FILE"] = ""
            return LogsDest(
                stdouts={rank: os.devnull if rank else "" for rank in envs},
                stderrs=files,
                error_files=dict.fromkeys(envs, os.devnull),
            )

    return OneFile()


_CONSEQUENCES = (RankFailed.exit_code, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of ranks that ended because another was gone: the agent sends them SIGTERM."""


def _ended(codes: dict[int, int], directory: Path) -> Ended:
    """The first cause: a rank that failed by itself, and not because another was gone."""
    own = {rank: code for rank, code in codes.items() if code not in _CONSEQUENCES} or codes
    rank = min(own)
    code = own[rank]
    if code < 0:
        cause = f"rank {rank} was killed by {signal.Signals(-code).name}"
        return Ended(exit_code=128 - code, cause=cause)
    cause = "" if rank == 0 else f"rank {rank} failed; what it said is in {directory / log_of(rank)}"
    return Ended(exit_code=code, cause=cause)


def _stop_all() -> None:
    """Whatever ended this: no rank stays behind."""
    ranks = psutil.Process().children(recursive=True)
    for process in ranks:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    for process in alive:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
