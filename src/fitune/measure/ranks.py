"""Rates at which ranks send to one another, measured when several were started."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fitune.spec.hardware import Collectives
from fitune.units import MIB

_SUMMED_BYTES = {"gloo": 32 * MIB, "nccl": 256 * MIB}
_CALLS = 5


@contextmanager
def process_group() -> Iterator[int]:
    """This process's rank; under torchrun a process group exists inside. gloo on the processor, nccl on GPUs."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def collective_rates(device: torch.device) -> Collectives | None:
    """All-reduce of one number and of a large buffer; None for a rank alone.

    A ring sends 2 (n−1)/n of a buffer from every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ranks = dist.get_world_size()
    size = _SUMMED_BYTES[dist.get_backend()]
    small, large = (_all_reduce_seconds(device, elements) for elements in (1, size // 4))
    sent = 2 * (ranks - 1) / ranks * size
    return Collectives(ranks=ranks, start_seconds=small, bandwidth=sent / max(large - small, 1e-9))


def _all_reduce_seconds(device: torch.device, elements: int) -> float:
    """The least of a few, the same number on every rank: a rank that calls once more would wait for ever."""
    buffer = torch.zeros(elements, device=device)
    times = []
    for _ in range(_CALLS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(min(times[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
