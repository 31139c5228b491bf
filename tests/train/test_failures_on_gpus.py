"""Errors of a GPU are told by the rank's own card. torch's functions are replaced."""

import torch

from fitune.measure.memory import CudaMeter
from fitune.train.failure import Whereabouts, shortage_of


def test_a_rank_that_runs_out_of_memory_asks_its_own_card(monkeypatch):
    """cuda:0 has room, cuda:1 is full: rank 1 tells of cuda:1."""

    def of(zero, one):
        return lambda device: (zero, one)[torch.device(device).index]

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", of(1_000, 7_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of(2_000, 8_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", of((90_000, 100_000), (500, 10_000)))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", of(1.0, 1.0))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    found = shortage_of(
        error, Whereabouts(doing="backward", step=3), meter=CudaMeter(torch.device("cuda", 1))
    )
    assert (found.in_use_bytes, found.capacity_bytes, found.asked_bytes) == (7_000, 8_500, 2 * 1024**2)
