"""Saves that are killed and others: states to save, alone or as the ranks of a job, and whether two are the same."""

from dataclasses import replace

import torch

from fitune.checkpoint.commit import Attempt, Descent
from fitune.checkpoint.save import begin_save, commit_save, write_share
from fitune.checkpoint.slices import Divided, file_of, share_of
from fitune.checkpoint.state import NAMES, TrainState
from fitune.engine.ranks import ALONE
from fitune.train.saving import save_together
from fitune.values.counts import rows_of_share


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
    written = [write_share(folder, share) for share in shares]
    commit_save(
        run, folder, shares[0], written, descent=descent, keep=keep, eval_loss=eval_loss, on_note=print
    )
    return run / "checkpoints" / f"step-{shares[0].step}"


def shares_of(state, world):
    """What ``world`` ranks write of ``state`` when FSDP2 has divided its matrices and vectors by rows."""
    shares = []
    for rank in range(world):
        own = share_of(state, rank=rank)
        files, slices = own.files, {}
        for group, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                if group == "rng" or not tensor.ndim:
                    continue
                files.get(file_of(group), {}).pop(name, None)
                start, stop = rows_of_share(len(tensor), world, rank)
                if stop > start:
                    files.setdefault(file_of(group, rank), {})[name] = tensor[start:stop]
                    slices.setdefault(group, {})[name] = Divided(
                        shape=tuple(tensor.shape),
                        dtype=NAMES[tensor.dtype],
                        dim=0,
                        parts=((rank, start, stop),),
                    )
        shares.append(replace(own, slices=slices))
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
