"""Memory that torch cannot pin on the host is told as that, and not as a full GPU."""

import pytest
import torch

from fitune.engine.host import pinning
from fitune.errors import NoPinnedMemory, OutOfMemory, is_out_of_memory

NO_ROOM = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"


def test_only_what_the_driver_refuses_is_pinned_memory():
    """The allocator of a GPU that is full has a type of its own, and stays out of memory: smaller batches help."""
    with (
        pytest.raises(NoPinnedMemory, match=r"would not pin 3\.0 MiB of memory") as refused,
        pinning(3 << 20, pinned_bytes=0),
    ):
        raise torch.AcceleratorError(NO_ROOM)
    assert not isinstance(refused.value, OutOfMemory)
    assert not is_out_of_memory(refused.value)
    with pytest.raises(torch.OutOfMemoryError), pinning(1, pinned_bytes=0):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.AcceleratorError, match="illegal"), pinning(1, pinned_bytes=0):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
