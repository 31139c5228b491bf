"""Tensors with shapes and no content, and one of many ranks: a fake process group, whose collectives send nothing."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fitune.engine.protocol import Engine
from fitune.errors import RecipeError
from fitune.rehearse.recorder import Recorder
from fitune.spec.plan import Plan, Zero
from fitune.spec.rules import require_rules


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


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def fake_ranks(plan: Plan) -> Iterator["DeviceMesh | None"]:
    """The mesh of a sharded plan, seen from its first rank, whose shares are the largest; None on one device.

    Raises RecipeError for what does not run on fake tensors.
    """
    require_rules(plan, "rehearse")
    if not isinstance(plan.sharding, Zero):
        yield None
        return
    from fitune.engine.fsdp import mesh_of

    with _fake_group(plan.hardware.num_gpus):
        yield mesh_of(plan.sharding, plan.hardware, device="cpu")  # it stands for the plan's


def announce(engine: Engine, *, last: bool) -> None:
    """Tell an engine on shares which micro-batch is the last of its step."""
    from fitune.engine.fsdp import ShardedEngine

    if isinstance(engine, ShardedEngine):
        engine.expect_micro_batch(last=last)


@contextmanager
def resizes_seen_by(recorder: Recorder) -> Iterator[None]:
    """FSDP2 frees gathered weights by resizing their storages, which no operation tells of."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.note_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


@contextmanager
def _fake_group(size: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RecipeError(
            "a rehearsal of several ranks needs a process of its own: this one is in a group already"
        )
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
