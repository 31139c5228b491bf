"""Tensors with shapes and no content."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Inside, every tensor is fake, on a fake ``cpu`` that stands for the plan's device.

    A build of torch without CUDA cannot make fake tensors on ``cuda``.
    """
    with FakeTensorMode() as mode:
        yield mode


@contextmanager
def modules_may_move(mode: FakeTensorMode) -> Iterator[None]:
    """Let ``Module.to`` work on fake parameters: PEFT moves every adapter it makes.

    ``to`` swaps a fake parameter with its converted self, and refuses when a weak reference to either exists. The
    mode's memo of tensors it has seen holds such references, so for this while it holds strong ones.
    """
    converter = mode.fake_tensor_converter.meta_converter
    converter.tensor_memo = {}
    try:
        yield
    finally:
        converter.tensor_memo = weakref.WeakValueDictionary()
