"""The program with one rank that fails: ``faulty_ranks.py RANK CALL FAULT train …``.

In the CALL-th backward pass of that rank FAULT happens, or at its start where CALL is 0. The launcher, which has no
RANK of its own, starts its ranks by the same words; torch and transformers, five seconds that it does not need, are
imported by ranks alone. In the environment: GO, a file that lets a rank go on which waits; SILENCE, seconds after which
a node that says nothing is lost; TOGETHER, seconds in which two signals are one.
"""

import errno
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fitune.cli import main
from fitune.errors import DataError, MissingExtra
from fitune.launch import nodes
from fitune.report import run_page
from fitune.session import program


def raise_value_error():
    raise ValueError("a fault of the test")


def raise_data_error():
    raise DataError("row 7 of the test cannot be read", hint="another row")


def fill_disk_of_save():
    """From now on no file of a checkpoint can be written, and this rank is slow to leave its group: the agent stops
    it before it ends."""
    import torch.distributed as dist

    def fill_disk():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/shard")

    in_next_save(fill_disk)
    leave = dist.destroy_process_group

    def leave_late(*words):
        time.sleep(2.0)
        leave(*words)

    dist.destroy_process_group = leave_late


def kill_in_save():
    in_next_save(kill)


def in_next_save(fault):
    from fitune.checkpoint import save

    def failing(path, chunks):
        fault()

    save.write_hashed = failing


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def lack_a_module():
    importlib.import_module("no_such_module_for_this_test")


def wait():
    """Say READY to whoever started the program and wait for a signal or a file beside the run."""
    os.write(1, b"READY\n")
    for _ in range(60_000):
        time.sleep(0.01)
        if os.path.exists(os.environ["GO"]):
            break


def draw_nothing(run):
    raise MissingExtra("pictures", extra="plots")


def write_down_signals():
    """Let a file beside GO have a byte for every signal, also while this rank waits in torch for the others."""
    heard = _heard(Path(os.environ["GO"]), os.environ["RANK"])
    signal.set_wakeup_fd(os.open(heard, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK))


def until_ready(started):
    """Wait until a started program says READY."""
    while "READY" not in (line := started.stdout.readline()):
        assert line, started.communicate()


def until_heard(go, *, ranks=(0, 1), signals=1):
    """Wait until each of the ranks has so many signals."""
    until = time.monotonic() + 120
    for heard in (_heard(go, rank) for rank in ranks):
        while not heard.exists() or heard.stat().st_size < signals:
            assert time.monotonic() < until, f"{signals} signals were not {heard.name}"
            time.sleep(0.01)


def _heard(go, rank):
    return go.with_name(f"heard by rank {rank}")


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        raise_value_error, raise_data_error, fill_disk_of_save, kill_in_save, kill, hang, freeze, lack_a_module, wait,
    )
}  # fmt: skip


def fail_in(call, fault):
    from fitune.models.language_model import LanguageModel

    real, calls = LanguageModel.loss_and_gradient, [0]

    def failing(*words, **named):
        calls[0] += 1
        if calls[0] == call:
            fault()
        return real(*words, **named)

    LanguageModel.loss_and_gradient = failing


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup's ignore this one
    os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads
    run_page.draw_pictures = draw_nothing  # longer than the run that they show
    nodes.SILENCE_SECONDS = float(os.environ.get("SILENCE", nodes.SILENCE_SECONDS))
    program._ONE_REQUEST_SECONDS = float(os.environ.get("TOGETHER", program._ONE_REQUEST_SECONDS))
    rank, call, name, *words = sys.argv[1:]
    sys.argv = [sys.argv[0], *words]
    if "RANK" in os.environ:
        write_down_signals()
    if os.environ.get("RANK") == rank:
        if call == "0":
            FAULTS[name]()
        fail_in(int(call), FAULTS[name])
    main()
