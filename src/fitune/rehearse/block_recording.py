"""One step of a model with chosen blocks, recorded on fake tensors: its storages and what its operations compute."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig, PreTrainedModel

from fitune.measure.device_rates import computes
from fitune.models.language_model import blocks_of, body_of, embeds_for_blocks
from fitune.rehearse.recorder import DEVICE, Recorder
from fitune.rehearse.shapes import BLOCK_NUMBERS
from fitune.rehearse.step import recording, rehearsed
from fitune.rehearse.trace import Trace
from fitune.spec.plan import Plan
from fitune.spec.predictions import Phase


def keep_blocks(model: PreTrainedModel, chosen: Sequence[int]) -> None:
    """Leave only the ``chosen`` blocks, in that order, and what the config lists for each.

    A body that embeds each token once for every block (Gemma 3n and 4) goes on to do so for all of them.
    """
    blocks, body = blocks_of(model), body_of(model)
    config = model.config.get_text_config()
    count = len(blocks)
    kept = [blocks[index] for index in chosen]
    for place, block in enumerate(kept):
        for module in block.modules():
            for key in BLOCK_NUMBERS & vars(module).keys():
                setattr(module, key, place)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[index] for index in chosen])
    if embeds_for_blocks(body):
        body.config = copy.copy(config)
    config.num_hidden_layers = len(chosen)
    parent = next(m for m in model.modules() for child in m.children() if child is blocks)
    name = next(n for n, child in parent.named_children() if child is blocks)
    setattr(parent, name, nn.ModuleList(kept))


EMBEDDING = -1
"""In place of a block's number, when backward has passed the first block."""


@dataclass(slots=True)
class Work:
    """FLOPs and bytes of one operation."""

    event: int
    flops: float = 0.0
    bytes: float = 0.0
    is_product: bool = False
    heads: tuple[int, int] | None = None
    """Number and size of the heads of fused attention."""


@dataclass(slots=True)
class Sample:
    """The events and the work of one step, and the storages that go into the blocks and come out of the body."""

    trace: Trace
    inputs: dict[tuple[int, int], Any]
    outputs: dict[int, Any]
    work: list[Work]
    blocks: int
    keeps: bool
    """False where every block is recomputed."""


class _BlockRecorder(Recorder):
    """A recorder that also counts work and remembers what goes into blocks."""

    def __init__(self, *args: Any) -> None:
        self.work: list[Work] = []
        self.inputs: dict[tuple[int, int], Any] = {}
        self.outputs: dict[int, Any] = {}
        self.turn = -1
        super().__init__(*args)

    def enter(self, phase: Phase) -> None:
        """Each forward is a turn of its own."""
        self.turn += phase is Phase.FORWARD
        super().enter(phase)

    def watch(self, blocks: Sequence[nn.Module], body: nn.Module) -> None:
        """Remember the storages of the residual stream before each block, behind the last, and of hidden states."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._note_input(index), with_kwargs=True)
        blocks[-1].register_forward_hook(self._note_last(len(blocks)))
        body.register_forward_hook(self._note_output)

    def _note_last(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            """Notes the storage of the last block's output [B, T, D] as the input of block ``index``."""
            hidden = output if isinstance(output, Tensor) else output[0]
            self.inputs[self.turn, index] = self._serials[hidden.untyped_storage()._cdata]

        return note

    def _note_input(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            """Notes the storage of the block's input [B, T, D]; block 0 also marks when backward reaches it."""
            hidden = args[0] if args else kwargs["hidden_states"]
            self.inputs[self.turn, index] = self._serials[hidden.untyped_storage()._cdata]
            if index == 0 and hidden.requires_grad:
                hidden.register_hook(self._mark("backward", EMBEDDING))

        return note

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[self.turn] = self._serials[output.last_hidden_state.untyped_storage()._cdata]

    def operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation as the Recorder does, and counts its FLOPs or bytes."""
        result = super().operate(func, types, args, kwargs)
        if func is not DEVICE and computes(func) and not func._schema.name.startswith("prim::"):
            self.work.append(work_of(func, args, kwargs, result, event=len(self.trace.events)))
        return result


def work_of(func: Any, args: Any, kwargs: Any, result: Any, *, event: int) -> Work:
    """FLOPs of a product, heads of fused attention, bytes of any other operation."""
    name = func._schema.name.split("::")[1]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if "attention" in name:
        heads, size = (int(tensors[0].shape[axis]) for axis in (1, -1))
        return Work(event, heads=(heads, size))
    if name == "_grouped_mm":
        one, other = tensors[0], tensors[1]
        return Work(event, flops=2.0 * one.shape[-2] * one.shape[-1] * other.shape[-1], is_product=True)
    if name == "convolution_backward":  # torch's count of the weight's gradient takes groups for one
        gradient, _, weight, wanted = args[0], args[1], args[2], args[-1]
        one = 2.0 * gradient.numel() * weight[0].numel()
        return Work(event, flops=one * sum(wanted[:2]), is_product=True)
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return Work(event, flops=float(counted(*args, **kwargs, out_val=result)), is_product=True)
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    read = {id(x): x for x in tensors}
    moved = sum(x.numel() * x.element_size() for x in [*read.values(), *written])
    return Work(event, bytes=float(moved))


def recorded(plan: Plan, config: PretrainedConfig, chosen: Sequence[int], rows: tuple[int, ...]) -> Sample:
    """One step of a model with the ``chosen`` blocks."""
    own = copy.deepcopy(config)  # it will list the chosen blocks alone
    labels = sum(rows) - len(rows)
    with (
        rehearsed(plan, own, change=lambda model: keep_blocks(model, chosen)) as prepared,
        recording(plan, prepared, rows, labels, by=_BlockRecorder) as (recorder, run_passes),
    ):
        recorder.watch(prepared.model.blocks, prepared.model.body)
        run_passes()
        return Sample(
            trace=recorder.finished(), inputs=recorder.inputs, outputs=recorder.outputs, work=recorder.work,
            blocks=len(chosen), keeps=plan.recompute.blocks == 0,
        )  # fmt: skip
