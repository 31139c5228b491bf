"""Kill -9 a save at every system call it makes, and report what a resume would find.

Run as a program with a folder: ``killed_saves.py FOLDER``. Each attempt is a forked child that saves step 3
beside steps 1 and 2 and dies just before its n-th call; the parent then looks with fresh eyes. Prints one
JSON list of {call, found, warnings, intact, tidy}; the last attempt has nothing left to die of.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from fitune.checkpoint.commit import Attempt, Descent
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.checkpoint.save import save_checkpoint
from fitune.checkpoint.state import TrainState

_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir")


def save(run: Path, state: TrainState, *, keep: int, eval_loss: float | None) -> Path:
    """As one attempt that began at the beginning."""
    descent = Descent(line=(Attempt(id="only", after=0),))
    return save_checkpoint(run, state, descent=descent, keep=keep, eval_loss=eval_loss)


def state_of(step: int) -> TrainState:
    generator = torch.Generator().manual_seed(step)
    weights = {
        "w": torch.randn(5, 3, generator=generator),
        "b": torch.randn(3, generator=generator).bfloat16(),
    }
    moments = {f"exp_avg/{name}": torch.randn(3, generator=generator) for name in weights}
    tensors = {"model": weights, "optimizer": moments, "rng": {"cpu": generator.get_state()}}
    return TrainState(step=step, tensors=tensors, facts={"position": step * 8})


def same(left: TrainState, right: TrainState) -> bool:
    return (left.step, left.facts, left.tensors.keys()) == (
        right.step,
        right.facts,
        right.tensors.keys(),
    ) and all(
        left.tensors[group].keys() == tensors.keys()
        and all(torch.equal(left.tensors[group][name], tensor) for name, tensor in tensors.items())
        for group, tensors in right.tensors.items()
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # a killed process loses nothing that the kernel has; still a place to die
    start = folder / "start"
    for step in (1, 2):
        save(start, state_of(step), keep=2, eval_loss=float(step))
    attempts: list[dict[str, object]] = []
    while not attempts or attempts[-1]["call"] != "none":
        run = folder / f"killed-{len(attempts)}"
        shutil.copytree(start, run, symlinks=True)
        attempts.append(_attempt(run, calls=len(attempts)))
        shutil.rmtree(run)
    print(json.dumps(attempts))


def _attempt(run: Path, *, calls: int) -> dict[str, object]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _die_before(calls, write)
        save(run, state_of(3), keep=1, eval_loss=0.5)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    call = os.read(read, 400).decode() if os.WIFSIGNALED(status) else "none"
    os.close(read)
    found = newest_checkpoint(run)
    state = load_checkpoint(found.path)
    save(run, state_of(4), keep=1, eval_loss=0.1)
    return {
        "call": call,
        "found": state.step,
        "warnings": found.warnings,
        "intact": same(state, state_of(state.step)),
        "tidy": sorted(path.name for path in (run / "checkpoints").iterdir())
        == ["LINE", "best", "latest", "step-4"],
    }


def _die_before(calls: int, report: int) -> None:
    """Let ``calls`` system calls through, then name the next one and be killed in its place."""
    left, write = [calls], os.write

    def counted(name: str) -> None:
        original = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                write(report, f"{name} {args[0]}".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return original(*args, **kwargs)

        setattr(os, name, call)

    for name in _CALLS:
        counted(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
