"""Kill -9 a save at every system call it makes, and report what a resume would find.

Run as a program with a folder: ``killed_saves.py FOLDER``. Each attempt is a forked child that saves step 3 beside
steps 1 and 2, alone or as two ranks one after the other, and dies just before its n-th call; the parent then looks with
fresh eyes. Prints one JSON list of {call, found, warnings, intact, tidy} for each number of ranks; the last attempt has
nothing left to die of.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fitune.checkpoint.commit import Attempt, Descent
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.checkpoint.save import begin_save, commit_save, write_share
from fitune.checkpoint.slices import Divided, share_of
from fitune.checkpoint.state import NAMES, TrainState
from fitune.engine.ranks import ALONE
from fitune.spec.counts import rows_of_share
from fitune.train.saving import save_together

_CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir")


def save(run, state, *, keep, eval_loss):
    """As one attempt that began at the beginning."""
    descent = Descent(line=(Attempt(id="only", after=0),))
    save_together(
        ALONE, run, share_of(state, rank=0), descent=descent, keep=keep, eval_loss=eval_loss, on_note=print, spare=()
    )  # fmt: skip
    return run / "checkpoints" / f"step-{state.step}"


def save_as_ranks(run, shares, *, keep, eval_loss):
    """As the ranks of one job, each of which writes one of ``shares``."""
    descent = Descent(line=(Attempt(id="only", after=0),))
    folder = begin_save(run, shares[0], descent=descent, needed_bytes=0)
    written = [write_share(folder, share, rank=rank) for rank, share in enumerate(shares)]
    commit_save(
        run, folder, shares[0], written, descent=descent, keep=keep, eval_loss=eval_loss, on_note=print
    )
    return run / "checkpoints" / f"step-{shares[0].step}"


def shares_of(state, world):
    """What ``world`` ranks write of ``state`` when FSDP2 has divided its matrices and vectors by rows."""
    shares = []
    for rank in range(world):
        own = share_of(state, rank=rank)
        parts = {}
        slices = {}
        for group, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                if group == "rng" or not tensor.ndim:
                    continue
                own.whole.get(group, {}).pop(name, None)
                start, stop = rows_of_share(len(tensor), world, rank)
                if stop > start:
                    parts.setdefault(group, {})[name] = tensor[start:stop]
                    slices.setdefault(group, {})[name] = Divided(
                        shape=tuple(tensor.shape),
                        dtype=NAMES[tensor.dtype],
                        dim=0,
                        parts=((rank, start, stop),),
                    )
        shares.append(replace(own, parts=parts, slices=slices))
    return shares


def state_of(step):
    generator = torch.Generator().manual_seed(step)
    weights = {
        "w": torch.randn(5, 3, generator=generator),
        "b": torch.randn(3, generator=generator).bfloat16(),
    }
    moments = {f"exp_avg/{name}": torch.randn(3, generator=generator) for name in weights}
    tensors = {"model": weights, "optimizer": moments, "rng": {"cpu": generator.get_state()}}
    return TrainState(step=step, tensors=tensors, facts={"position": step * 8})


def same(left, right):
    return (left.step, left.facts, left.tensors.keys()) == (
        right.step,
        right.facts,
        right.tensors.keys(),
    ) and all(
        left.tensors[group].keys() == tensors.keys()
        and all(torch.equal(left.tensors[group][name], tensor) for name, tensor in tensors.items())
        for group, tensors in right.tensors.items()
    )


def main(folder):
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # a killed process loses nothing that the kernel has; still a place to die
    start = folder / "start"
    for step in (1, 2):
        save(start, state_of(step), keep=2, eval_loss=float(step))
    for world in (1, 2):
        attempts = []
        while not attempts or attempts[-1]["call"] != "none":
            run = folder / f"killed-{len(attempts)}"
            shutil.copytree(start, run, symlinks=True)
            attempts.append(_attempt(run, calls=len(attempts), world=world))
            shutil.rmtree(run)
        print(json.dumps(attempts))


def _attempt(run, *, calls, world):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _die_before(calls, write)
        if world > 1:
            save_as_ranks(run, shares_of(state_of(3), world), keep=1, eval_loss=0.5)
        else:
            save(run, state_of(3), keep=1, eval_loss=0.5)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    call = os.read(read, 400).decode() if os.WIFSIGNALED(status) else "none"
    os.close(read)
    found = newest_checkpoint(run)
    state = load_checkpoint(found.path)
    intact = same(state, state_of(state.step))  # read before it is pruned
    save(run, state_of(4), keep=1, eval_loss=0.1)
    return {
        "call": call,
        "found": state.step,
        "warnings": found.warnings,
        "intact": intact,
        "tidy": sorted(path.name for path in (run / "checkpoints").iterdir())
        == ["LINE", "best", "latest", "step-4"],
    }


def _die_before(calls, report):
    """Let ``calls`` system calls through, then name the next one and be killed in its place."""
    left, write = [calls], os.write

    def counted(name):
        original = getattr(os, name)

        def call(*args, **kwargs):
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
