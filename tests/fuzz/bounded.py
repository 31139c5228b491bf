"""A child process that runs one command of the program after another and is watched: time, memory, tracebacks.

It is started once and used again: importing torch takes longer than most commands.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from fitune.units import GIB, format_bytes

CPU_LIMIT_S = 30.0
"""Processor time of one command, also on a slow machine: the clock would measure its other work, too."""
CLOCK_LIMIT_S = 300.0
"""For commands that wait: nothing they wait for will ever come."""
GROWTH_LIMIT = GIB
_ROOM = 8 * GIB
"""Of data, for the child as a whole: a command that wants more gets a MemoryError and spares the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended. ``crash`` is the traceback of an exception that reached the top."""

    code: int
    out: str
    err: str
    crash: str
    cpu_s: float
    grown_bytes: int

    def require_orderly(self):
        """Success, or an error for people, within the limits."""
        assert not self.crash, self.crash
        assert "Traceback (most recent call last)" not in self.out + self.err, self.err
        assert self.code in (0, 1, 2, 3), f"exit code {self.code}: {self.err}"
        if self.code:
            assert re.search(r"^error: \S", self.err, re.MULTILINE), f"no error for people: {self.err!r}"
        assert self.cpu_s < CPU_LIMIT_S, f"{self.cpu_s:.1f} s of processor time"
        assert self.grown_bytes < GROWTH_LIMIT, f"{format_bytes(self.grown_bytes)} more than before"


class Bounded:
    """``run(words)`` is ``fitune words`` in the child. A child that hangs or dies fails the example; the next one
    gets a new child."""

    def __init__(self, folder):
        self._folder = folder
        self._child = None
        self._pipe = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._end()

    def run(self, words):
        pipe = self._pipe or self._start()
        pipe.send(list(words))
        try:
            if not pipe.poll(CLOCK_LIMIT_S):
                raise AssertionError(f"still running after {CLOCK_LIMIT_S:g} s: fitune {' '.join(words)}")
            outcome = pipe.recv()
        except EOFError:
            code = self._end()
            raise AssertionError(f"the process died with code {code}: fitune {' '.join(words)}") from None
        except AssertionError:
            self._end()
            raise
        return outcome

    def _start(self):
        spawn = multiprocessing.get_context("spawn")  # a fork of a process that has run torch may hang
        self._pipe, far_end = spawn.Pipe()
        self._child = spawn.Process(target=_serve, args=(far_end, str(self._folder)), daemon=True)
        self._child.start()
        far_end.close()
        return self._pipe

    def _end(self):
        child, pipe, self._child, self._pipe = self._child, self._pipe, None, None
        if child is None or pipe is None:
            return None
        child.kill()
        child.join()
        pipe.close()
        return child.exitcode


def _serve(pipe, folder):
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody is there to answer
    import torch

    for module in (
        "fitune.session.train.training",
        "fitune.score.run",
    ):  # what most need, before memory is counted
        importlib.import_module(module)

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_ROOM, _ROOM))
    while True:
        try:
            words = pipe.recv()
        except EOFError:
            return
        pipe.send(_watched(words))


def _watched(words):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, began = _resident("VmRSS"), time.process_time()
    out, err = io.StringIO(), io.StringIO()
    code, crash = 0, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _command(words)
        except BaseException:
            crash = traceback.format_exc()
    return Outcome(
        code=code, out=out.getvalue(), err=err.getvalue(), crash=crash,
        cpu_s=time.process_time() - began, grown_bytes=_resident("VmHWM") - before,
    )  # fmt: skip


def _command(words):
    from fitune.cli import main

    sys.argv = ["fitune", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _resident(field):
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
