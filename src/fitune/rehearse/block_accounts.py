"""One step of a model with chosen blocks, recorded on fake tensors: its storages and what its operations compute; and
the account of it: for each block what it keeps, needs and moves, storage by storage."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig, PreTrainedModel

from fitune.errors import ModelError
from fitune.measure.device_rates import computes, moved_bytes
from fitune.models.language_model import blocks_of, body_of, embeds_for_blocks
from fitune.rehearse.recorder import DEVICE, Recorder
from fitune.rehearse.shapes import BLOCK_NUMBERS
from fitune.rehearse.step import recording, rehearsed
from fitune.rehearse.trace import Allocated, Entered, Freed, Reached, Trace
from fitune.values.plan import Plan
from fitune.values.predictions import Phase


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

        def begins(index: int) -> Any:
            """A hook before block ``index``."""

            def note(module: nn.Module, args: Any, kwargs: Any) -> None:
                """Notes the block's input [B, T, D]; block 0 also marks when backward reaches it."""
                hidden = args[0] if args else kwargs["hidden_states"]
                self.inputs[self.turn, index] = self._serial_of(hidden)
                if index == 0 and hidden.requires_grad:
                    hidden.register_hook(self._mark("backward", EMBEDDING))

            return note

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            """Notes the last block's output [B, T, D] as the input of a block behind it."""
            hidden = output if isinstance(output, Tensor) else output[0]
            self.inputs[self.turn, len(blocks)] = self._serial_of(hidden)

        def leaves(module: nn.Module, args: Any, output: Any) -> None:
            """Notes the body's output."""
            self.outputs[self.turn] = self._serial_of(output.last_hidden_state)

        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(begins(index), with_kwargs=True)
        blocks[-1].register_forward_hook(ends)
        body.register_forward_hook(leaves)

    def _serial_of(self, tensor: Tensor) -> int:
        return self._serials[tensor.untyped_storage()._cdata]

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
    return Work(event, bytes=float(moved_bytes(args, kwargs, result)))


Numbers = tuple[float, float, float]
"""Bytes at one moment of a backward: kept, gradients, everything else."""


@dataclass(slots=True)
class Account:
    """One sample by moments, in bytes."""

    hidden: int = 0
    stream: int = 0
    """What goes from block to block: one hidden state for each token, or several (AltUp)."""
    around: int = 0
    around_forward: int = 0
    kept: list[int] = field(default_factory=list)
    final_kept: int = 0
    final_forward: list[int] = field(default_factory=list)
    final_backward: list[int] = field(default_factory=list)
    forward: dict[int, list[int]] = field(default_factory=dict)
    """Bytes beyond what there was when the block began."""
    backward: dict[tuple[int, int], list[Numbers]] = field(default_factory=dict)
    """By micro-batch and block."""
    work: dict[tuple[str, int], list[Work]] = field(default_factory=dict)


def _storages(
    trace: Trace, seen: _BlockRecorder, blocks: int
) -> tuple[dict[Any, int], dict[Any, Any], Counter[Any]]:
    """Size of each storage; what it belongs to: a block, the final norm, the hidden states, or what is around; and
    bytes alive between forward and backward of the first micro-batch by owner."""
    sizes: dict[Any, int] = {}
    owners: dict[Any, Any] = {}
    kept: Counter[Any] = Counter()
    turn, phase = -1, Phase.IDLE
    place: Any = "around"
    going_in = {serial: block for (_, block), serial in seen.inputs.items()}
    born: dict[Any, Any] = {}
    for event in trace.events:
        match event:
            case Entered(phase=entered):
                if entered is Phase.LOSS:
                    owners |= born
                    for storage, owner in born.items() if turn == 0 else ():
                        kept[owner] += sizes[storage]
                turn, phase, place = turn + (entered is Phase.FORWARD), entered, "around"
                born = {}
            case Reached(direction="forward", block=block):
                place = "final" if block is None else block
            case Allocated(storage=storage, size=size):
                sizes[storage] = size
                if phase is Phase.FORWARD:
                    of: Any = place
                    if storage in going_in:
                        block = going_in[storage]
                        of = block if block < blocks else "final"
                    born[storage] = "hidden" if storage in seen.outputs.values() else of
            case Freed(storage=storage):
                born.pop(storage, None)
    return sizes, owners, kept


def account_of(plan: Plan, config: PretrainedConfig, chosen: Sequence[int], rows: tuple[int, ...]) -> Account:
    """Bytes of each of the ``chosen`` blocks in one step of a model that has them alone: kept, needed for a moment,
    left as gradients. Raises ModelError where the residual stream takes other bytes from block to block."""
    own = copy.deepcopy(config)  # it will list the chosen blocks alone
    labels = sum(rows) - len(rows)
    with (
        rehearsed(plan, own, change=lambda model: keep_blocks(model, chosen)) as prepared,
        recording(plan, prepared, rows, labels, by=_BlockRecorder) as (recorder, run_passes),
    ):
        recorder.watch(prepared.model.blocks, prepared.model.body)
        run_passes()
        return _account(recorder.finished(), recorder, blocks=len(chosen), keeps=plan.recompute.blocks == 0)


def _account(trace: Trace, seen: _BlockRecorder, *, blocks: int, keeps: bool) -> Account:
    """``keeps``: False where every block is recomputed."""
    sizes, owners, kept_by = _storages(trace, seen, blocks)
    streams = {sizes[storage] for (_, block), storage in seen.inputs.items() if block}
    account = Account(hidden=sizes[seen.outputs[0]], stream=max(streams))
    if len(streams) > 1 or account.stream % account.hidden:
        raise ModelError("the stream between the blocks takes other bytes than the hidden states behind them")
    account.kept = [kept_by[block] for block in range(blocks)]
    account.around, account.final_kept = kept_by["around"], kept_by["final"]

    def label(storage: Any) -> Any:
        """The kind of a storage: a gradient, kept by a block of this micro-batch, or anything else."""
        of = trace.gradients.get(storage)
        return ("kept", owners.get(storage)) if of is None else ("gradient", of[0])

    alive: Counter[Any] = Counter()
    total = start = 0
    turn, phase, place = -1, Phase.IDLE, None
    number = 0
    for index, event in enumerate(trace.events):
        while number < len(seen.work) and seen.work[number].event <= index:
            if turn == 0 and isinstance(place, int) and phase in (Phase.FORWARD, Phase.BACKWARD):
                account.work.setdefault((phase.value, place), []).append(seen.work[number])
            number += 1
        match event:
            case Entered(phase=phase):
                turn, place = turn + (phase is Phase.FORWARD), None
                continue
            case Reached(direction="forward", block=block):
                place, start = ("final" if block is None else block), total
                if block == blocks - 1 and turn == 0:
                    account.around_forward = total - sum(account.kept[:block]) - account.stream
                continue
            case Reached(block=block):
                place = block
                continue
            case Allocated(storage=storage, size=size):
                total += size
                alive[label(storage)] += size
            case Freed(storage=storage):
                if storage in sizes:
                    total -= sizes[storage]
                    alive[label(storage)] -= sizes[storage]
                continue
        if phase is Phase.FORWARD and turn == 0 and isinstance(place, int):
            account.forward.setdefault(place, []).append(total - start)
        elif phase is Phase.FORWARD and turn == 0 and place == "final":
            held = account.around_forward + sum(account.kept) + account.final_kept + account.hidden
            account.final_forward.append(total - held)
        elif phase is Phase.BACKWARD:
            _note_backward(account, alive, total, turn, place, keeps=keeps)
    return account


def _note_backward(
    account: Account, alive: Counter[Any], total: int, turn: int, place: Any, *, keeps: bool
) -> None:
    gradients = sum(size for (kind, _), size in alive.items() if kind == "gradient")
    others = total - gradients - account.around
    if place == EMBEDDING:
        return
    if place is None:  # before the last block: the final norm goes back
        if turn == 0:
            account.final_backward.append(others - sum(account.kept) - account.final_kept + account.hidden)
        return
    others -= sum(account.kept[:place])
    if keeps:
        own = alive["kept", place]
        others -= own
    else:
        own = 0
        others -= account.kept[place]
    fresh = alive["gradient", place] if turn == 0 else 0
    account.backward.setdefault((turn, place), []).append((own, fresh, others))
