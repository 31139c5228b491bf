"""Memory that the host does not pin is told as what it is, whichever library asked for it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.test_kept_rows import one_of
from fitune.engine import deepspeed
from fitune.errors import NoPinnedMemory, OutOfMemory, is_out_of_memory, pinning
from fitune.spec.plan import AdamW, Precision

NO_ROOM = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


def test_only_what_the_driver_refuses_is_pinned_memory():
    """The allocator of a GPU that is full has a type of its own, and stays out of memory: smaller batches help."""
    with (
        pytest.raises(NoPinnedMemory, match=r"would not pin 3\.0 MiB of memory") as refused,
        pinning(3 << 20),
    ):
        raise torch.AcceleratorError(NO_ROOM)
    assert not isinstance(refused.value, OutOfMemory)
    assert not is_out_of_memory(refused.value)
    with pytest.raises(torch.OutOfMemoryError), pinning():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.AcceleratorError, match="illegal"), pinning():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_deepspeed_that_cannot_pin_is_no_full_gpu(monkeypatch):
    def initialize(**_):
        raise torch.AcceleratorError(NO_ROOM)

    monkeypatch.setattr(deepspeed, "import_deepspeed", lambda: SimpleNamespace(initialize=initialize))
    linear = nn.Linear(2, 2)
    with one_of(world=2, rank=0), pytest.raises(NoPinnedMemory, match="the host would not pin memory for"):
        deepspeed.DeepSpeedEngine(
            SimpleNamespace(), dict(linear.named_parameters()), whole=linear, head=deepspeed.Head(linear),
            optimizer=AdamW(), precision=Precision.BF16, config={"zero_optimization": {"stage": 2}},
            device=torch.device("cpu"),
        )  # fmt: skip
