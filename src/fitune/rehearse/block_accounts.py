"""The account of a recorded step: for each block what it keeps, needs and moves, storage by storage."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fitune.errors import ModelError
from fitune.rehearse.block_recording import EMBEDDING, Sample, Work
from fitune.rehearse.trace import Allocated, Entered, Freed, Reached
from fitune.spec.predictions import Phase

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


def _storages(sample: Sample) -> tuple[dict[Any, int], dict[Any, Any], Counter[Any]]:
    """Size of each storage; what it belongs to: a block, the final norm, the hidden states, or what is around; and
    bytes alive between forward and backward of the first micro-batch by owner."""
    sizes: dict[Any, int] = {}
    owners: dict[Any, Any] = {}
    kept: Counter[Any] = Counter()
    turn, phase = -1, Phase.IDLE
    place: Any = "around"
    going_in = {serial: block for (_, block), serial in sample.inputs.items()}
    born: dict[Any, Any] = {}
    for event in sample.trace.events:
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
                        of = block if block < sample.blocks else "final"
                    born[storage] = "hidden" if storage in sample.outputs.values() else of
            case Freed(storage=storage):
                born.pop(storage, None)
    return sizes, owners, kept


def account_of(sample: Sample) -> Account:
    """Bytes of each block of the ``sample``: kept, needed for a moment, left as gradients. Raises ModelError
    where the residual stream takes other bytes from block to block."""
    sizes, owners, kept_by = _storages(sample)
    streams = {sizes[storage] for (_, block), storage in sample.inputs.items() if block}
    account = Account(hidden=sizes[sample.outputs[0]], stream=max(streams))
    if len(streams) > 1 or account.stream % account.hidden:
        raise ModelError("the stream between the blocks takes other bytes than the hidden states behind them")
    account.kept = [kept_by[block] for block in range(sample.blocks)]
    account.around, account.final_kept = kept_by["around"], kept_by["final"]
    alive: Counter[Any] = Counter()
    total = start = 0
    turn, phase, place = -1, Phase.IDLE, None
    number = 0
    for index, event in enumerate(sample.trace.events):
        while number < len(sample.work) and sample.work[number].event <= index:
            if turn == 0 and isinstance(place, int) and phase in (Phase.FORWARD, Phase.BACKWARD):
                account.work.setdefault((phase.value, place), []).append(sample.work[number])
            number += 1
        match event:
            case Entered(phase=phase):
                turn, place = turn + (phase is Phase.FORWARD), None
                continue
            case Reached(direction="forward", block=block):
                place, start = ("final" if block is None else block), total
                if block == sample.blocks - 1 and turn == 0:
                    account.around_forward = total - sum(account.kept[:block]) - account.stream
                continue
            case Reached(block=block):
                place = block
                continue
            case Allocated(storage=storage, size=size):
                total += size
                alive[_label(storage, owners, sample)] += size
            case Freed(storage=storage):
                if storage in sizes:
                    total -= sizes[storage]
                    alive[_label(storage, owners, sample)] -= sizes[storage]
                continue
        if phase is Phase.FORWARD and turn == 0 and isinstance(place, int):
            account.forward.setdefault(place, []).append(total - start)
        elif phase is Phase.FORWARD and turn == 0 and place == "final":
            held = account.around_forward + sum(account.kept) + account.final_kept + account.hidden
            account.final_forward.append(total - held)
        elif phase is Phase.BACKWARD:
            _note_backward(account, sample, alive, total, turn, place)
    return account


def _label(storage: Any, owners: Mapping[Any, Any], sample: Sample) -> Any:
    """The kind of a storage: a gradient, kept by a block of this micro-batch, or anything else."""
    if storage in sample.trace.gradients:
        return "gradient", sample.trace.gradients[storage][0]
    return "kept", owners.get(storage)


def _note_backward(
    account: Account, sample: Sample, alive: Counter[Any], total: int, turn: int, place: Any
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
    if sample.keeps:
        own = alive["kept", place]
        others -= own
    else:
        own = 0
        others -= account.kept[place]
    fresh = alive["gradient", place] if turn == 0 else 0
    account.backward.setdefault((turn, place), []).append((own, fresh, others))
