"""The program with one rank that fails: ``faulty_ranks.py RANK CALL FAULT train …``.

In the CALL-th backward pass of that rank FAULT happens, or at its start where CALL is 0. The launcher, which has no
RANK of its own, starts its ranks by the same words. SILENCE in the environment: seconds after which a node that says
nothing is lost.
"""

import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fitune.checkpoint import save
from fitune.cli import main
from fitune.errors import DataError
from fitune.launch import nodes
from fitune.models.language_model import LanguageModel


def raise_value_error() -> None:
    raise ValueError("a fault of the test")


def raise_data_error() -> None:
    raise DataError("row 7 of the test cannot be read", hint="another row")


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/shard")


def fill_disk_of_save() -> None:
    """From now on no file of a checkpoint can be written, and this rank is slow to leave its group: the agent stops
    it before it ends."""
    in_next_save(fill_disk)
    leave = dist.destroy_process_group

    def leave_late(*words: Any) -> None:
        time.sleep(2.0)
        leave(*words)

    dist.destroy_process_group = leave_late


def kill_in_save() -> None:
    in_next_save(kill)


def in_next_save(fault: Callable[[], None]) -> None:
    def failing(path: Any, chunks: Any) -> Any:
        fault()

    save.write_hashed = failing


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(3600)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def pause() -> None:
    """Be stopped for four seconds, as by a full disk or a machine that swaps."""
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def lack_a_module() -> None:
    importlib.import_module("no_such_module_for_this_test")


def wait() -> None:
    """Say READY to whoever started the program and wait for a signal or a file beside the run."""
    os.write(1, b"READY\n")
    for _ in range(12_000):
        time.sleep(0.01)
        if os.path.exists(os.environ["GO"]):
            break


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        raise_value_error, raise_data_error, fill_disk, fill_disk_of_save, kill_in_save, kill, crash, hang,
        freeze, pause, lack_a_module, wait,
    )
}  # fmt: skip


def fail_in(call: int, fault: Callable[[], None]) -> None:
    real, calls = LanguageModel.loss_and_gradient, [0]

    def failing(*words: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            fault()
        return real(*words, **named)

    LanguageModel.loss_and_gradient = failing


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's ignore this one
    torch.set_num_threads(1)
    nodes.SILENCE_SECONDS = float(os.environ.get("SILENCE", nodes.SILENCE_SECONDS))
    rank, call, name, *words = sys.argv[1:]
    sys.argv = [sys.argv[0], *words]
    if os.environ.get("RANK") == rank:
        if call == "0":
            FAULTS[name]()
        fail_in(int(call), FAULTS[name])
    main()
