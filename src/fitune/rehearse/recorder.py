"""Fake tensors and fake ranks, and a recorder of every storage a step makes and lets go of.

Steps are counted as real ones are. Fake tensors have shapes and no content; collectives of the fake group send nothing.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from fitune.engine.ranks import local_part
from fitune.errors import RecipeError
from fitune.measure.memory import LiveTensors, OtherMemory, is_of_all_ranks
from fitune.rehearse.stand_ins import StandIns
from fitune.rehearse.trace import Allocated, Entered, Freed, ParameterKey, Reached, Trace
from fitune.values.plan import Plan, Zero
from fitune.values.predictions import Phase
from fitune.values.rules import require_rules

DEVICE = torch.ops.prim.device.default
"""Fake tensors are asked for their device by an operation, more often than they compute."""


class Recorder(LiveTensors):
    """LiveTensors that also writes down what happened, and answers what a fake tensor cannot (StandIns)."""

    def __init__(
        self,
        resident: Mapping[str, Iterable[Tensor]],
        stand_ins: StandIns,
        host: OtherMemory | None = None,
    ) -> None:
        self.trace = Trace()
        self._numbers = itertools.count()
        self._serials: dict[int, int] = {}
        self._stand_ins = stand_ins
        self._kind: str | None = None
        self._streams = {id(torch.cpu.current_stream()): 0}
        super().__init__((), host)
        self.trace.events.clear()
        for self._kind, tensors in resident.items():
            for tensor in tensors:
                self._add(tensor)
        self._kind = None

    def operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation, or what stands in for it, and records the workspace that its CUDA kernel would take."""
        if func is DEVICE:
            return args[0].fake_device
        if is_of_all_ranks(types):
            return NotImplemented
        workspace = self._stand_ins.workspace_bytes(func, args)
        if workspace:
            serial = next(self._numbers)
            self.trace.events.append(Allocated(serial, workspace))
            self.current_bytes += workspace
        result = super().operate(self._stand_ins.instead_of(func), types, args, kwargs)
        if workspace:
            self.current_bytes -= workspace
            self.trace.events.append(Freed(serial))
        return result

    def enter(self, phase: Phase) -> None:
        """The change of phase is written down too."""
        self.trace.events.append(Entered(phase))
        super().enter(phase)

    def mark_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """Records from now on when a block begins, forward and backward: before FSDP2's hooks gather it."""
        last: nn.Module | None = None
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._mark("forward", index), prepend=True)
            block.register_forward_hook(self._mark_gradient(index), prepend=True)
            last = block
        if last is not None:
            last.register_forward_hook(self._mark("forward", None))

    def finished(self) -> Trace:
        """The trace so far; storages freed from now on are not part of the step."""
        trace, self.trace = self.trace, Trace()
        return trace

    def name_gradients(self, gradients: Iterable[tuple[ParameterKey, Tensor | None]]) -> None:
        """Say which storages are the gradients of which parameters; of the first, where several share one."""
        for key, gradient in gradients:
            if gradient is not None:
                storage = local_part(gradient).untyped_storage()
                self.trace.gradients.setdefault(self._serials[storage._cdata], key)

    def _mark(self, direction: str, block: int | None) -> Callable[..., None]:
        def note(*_: Any) -> None:
            """Records that the step reaches ``block``; what the hook is given is not used."""
            self.trace.events.append(Reached(direction, block))

        return note

    def _mark_gradient(self, block: int) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            """Lets the gradient of the block's output record that backward reaches the block."""
            hidden = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:  # backward ends at the first block that trains
                hidden.register_hook(self._mark("backward", block))

        return note

    def _begin(self, storage: torch.UntypedStorage) -> None:
        super()._begin(storage)
        key = storage._cdata
        serial = self._serials[key] = next(self._numbers)
        if self._kind is not None:
            self.trace.resident[serial] = (self._kind, self._sizes[key])
        else:
            # the stream that FSDP2 has chosen: on a CPU torch only remembers which one it is
            stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
            self.trace.events.append(Allocated(serial, self._sizes[key], stream))

    def _remove(self, key: int) -> None:
        if key in self._sizes:
            super()._remove(key)
            self.trace.events.append(Freed(self._serials.pop(key)))


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

    Raises RecipeError for what does not run on fake tensors, and where this torch has no fake collectives (2.9 has none
    but for a few).
    """
    require_rules(plan, "rehearse")
    if not isinstance(plan.sharding, Zero):
        yield None
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fitune.engine.fsdp import mesh_of

    if dist.is_initialized():
        raise RecipeError(
            "a rehearsal of several ranks needs a process of its own: this one is in a group already"
        )
    dist.init_process_group("fake", rank=0, world_size=plan.hardware.num_gpus, store=FakeStore())
    try:
        yield mesh_of(plan.sharding, plan.hardware, device="cpu")  # it stands for the plan's
    except UnsupportedOperatorException as error:
        if error.func.namespace != "c10d":
            raise
        raise RecipeError(
            f"torch {torch.__version__} cannot rehearse several ranks: it has no {error.func} for fake tensors",
            hint="torch 2.11 has; fitune plan and fitune train work with this one",
        ) from error
    finally:
        dist.destroy_process_group()
