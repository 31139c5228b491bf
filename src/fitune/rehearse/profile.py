"""A traced profile: the blocks of any architecture, traced as training builds them and fitted as polynomials in tokens.

One step of a model with one block of each kind is recorded on fake tensors at three lengths of rows. The same storages
begin and end in the same order at each length, so every storage's size is fitted by itself, and any moment's bytes are
a sum of polynomials. Where the order depends on the length (loops over chunks), whole moments are fitted instead.

Bytes are those of micro-batches after the first too: gradients exist then, and fresh ones are added to them.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PretrainedConfig, PreTrainedModel

from fitune.errors import FituneError, ModelError
from fitune.measure.device_rates import computes
from fitune.models.door import model_config, text_config
from fitune.models.language_model import blocks_of
from fitune.rehearse.layer_extrapolation import make_states, parameter_keys
from fitune.rehearse.recorder import Recorder
from fitune.rehearse.shapes import BLOCK_NUMBERS, read_shapes
from fitune.rehearse.stand_ins import StandIns
from fitune.rehearse.step import full_stream, rehearsed
from fitune.rehearse.trace import Allocated, Entered, Freed, ParameterKey, Reached
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Plan, Recompute, trains_embeddings, updates_in_backward
from fitune.spec.predictions import Phase
from fitune.spec.traced_profile import Moment, Size, TracedBlock, TracedPass, TracedStep
from fitune.spec.tracing import Way

SIZES = (1, 2, 4)
"""Lengths of rows that are traced, as multiples of the first."""


def keep_blocks(model: PreTrainedModel, chosen: Sequence[int]) -> None:
    """Leave only the ``chosen`` blocks, in that order, and what the config lists for each."""
    blocks = blocks_of(model)
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
    config.num_hidden_layers = len(chosen)
    parent = next(m for m in model.modules() for child in m.children() if child is blocks)
    name = next(n for n, child in parent.named_children() if child is blocks)
    setattr(parent, name, nn.ModuleList(kept))


_EMBEDDING = -1
"""In place of a block's number, when backward has passed the first block."""


@dataclass(slots=True)
class _Work:
    """What one operation asked of the device."""

    event: int
    flops: float = 0.0
    bytes: float = 0.0
    is_product: bool = False
    heads: tuple[int, int] | None = None
    """Number and size of the heads of fused attention."""


@dataclass(slots=True)
class _Sample:
    """The events of one step, and the storages that go into the blocks and come out of the body."""

    events: list[Any]
    gradients: dict[Any, ParameterKey]
    inputs: dict[tuple[int, int], Any]
    outputs: dict[int, Any]
    work: list[_Work]
    tokens: int
    rows: int
    blocks: int
    keeps: bool
    """False where every block is recomputed."""


class _BlockRecorder(Recorder):
    """A recorder that also counts work and remembers what goes into blocks."""

    def __init__(self, *args: Any) -> None:
        self.work: list[_Work] = []
        self.inputs: dict[tuple[int, int], Any] = {}
        self.outputs: dict[int, Any] = {}
        self.turn = -1
        super().__init__(*args)

    def enter(self, phase: Phase) -> None:
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
            hidden = output if isinstance(output, Tensor) else output[0]
            self.inputs[self.turn, index] = self._serials[hidden.untyped_storage()._cdata]

        return note

    def _note_input(self, index: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.inputs[self.turn, index] = self._serials[hidden.untyped_storage()._cdata]
            if index == 0 and hidden.requires_grad:
                hidden.register_hook(self._mark("backward", _EMBEDDING))

        return note

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[self.turn] = self._serials[output.last_hidden_state.untyped_storage()._cdata]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if computes(func) and not func._schema.name.startswith("prim::"):
            self.work.append(_work_of(func, args, kwargs or {}, result, event=len(self.trace.events)))
        return result


def _work_of(func: Any, args: Any, kwargs: Any, result: Any, *, event: int) -> _Work:
    name = func._schema.name.split("::")[1]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if "attention" in name:
        heads, size = (int(tensors[0].shape[axis]) for axis in (1, -1))
        return _Work(event, heads=(heads, size))
    if name == "_grouped_mm":
        one, other = tensors[0], tensors[1]
        return _Work(event, flops=2.0 * one.shape[-2] * one.shape[-1] * other.shape[-1], is_product=True)
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return _Work(event, flops=float(counted(*args, **kwargs, out_val=result)), is_product=True)
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    read = {id(x): x for x in tensors}
    moved = sum(x.numel() * x.element_size() for x in [*read.values(), *written])
    return _Work(event, bytes=float(moved))


def _recorded(plan: Plan, config: PretrainedConfig, chosen: Sequence[int], rows: Sequence[int]) -> _Sample:
    """One step of a model with the ``chosen`` blocks."""
    in_backward = updates_in_backward(plan.tuning)
    own = copy.deepcopy(config)  # it will list the chosen blocks alone
    with rehearsed(plan, own, change=lambda model: keep_blocks(model, chosen)) as prepared:
        engine, model = prepared.engine, prepared.model
        if in_backward:
            make_states(plan, engine, model.trained.values())
        stream, supervised = full_stream(tuple(rows)), sum(rows) - len(rows)
        resident = {
            "weights": [*model.whole.parameters(), *model.whole.buffers()],
            "optimizer": list(engine.state().tensors.values()),
            "batch": list(stream.tensors()),
        }
        stand_ins = StandIns(gpu=plan.hardware.gpu, supervised_tokens=supervised)
        recorder = _BlockRecorder(resident, stand_ins)
        recorder.mark_blocks(model.blocks)
        recorder.watch(model.blocks, model.body)
        turns = 1 if in_backward else 2
        with recorder:
            for turn in range(turns):
                engine.forward_backward(
                    stream, supervised_tokens=supervised, enter_phase=recorder.enter, last=turn == turns - 1
                )
            keys = parameter_keys(model)
            recorder.name_gradients((keys[id(p)], p.grad) for p in model.trained.values())
            trace = recorder.finished()
    return _Sample(
        events=trace.events,
        gradients=trace.gradients,
        inputs=recorder.inputs,
        outputs=recorder.outputs,
        work=recorder.work,
        tokens=sum(rows),
        rows=len(rows),
        blocks=len(chosen),
        keeps=plan.recompute.blocks == 0,
    )


Numbers = tuple[float, float, float]
"""Of one moment of a backward: kept, gradients, everything else."""


@dataclass(slots=True)
class _Account:
    """One sample by moments, in bytes."""

    hidden: int = 0
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
    work: dict[tuple[str, int], list[_Work]] = field(default_factory=dict)


@dataclass(slots=True)
class _Storages:
    """Size of each storage, and what it belongs to: a block, the final norm, the hidden states, or what is around."""

    sizes: dict[Any, int] = field(default_factory=dict)
    owners: dict[Any, Any] = field(default_factory=dict)
    kept: dict[tuple[int, Any], int] = field(default_factory=dict)
    """Bytes alive between forward and backward by micro-batch and owner."""


def _storages(sample: _Sample) -> _Storages:
    found = _Storages()
    turn, phase = -1, Phase.IDLE
    place: Any = "around"
    going_in = {serial: (turn, block) for (turn, block), serial in sample.inputs.items()}
    born: dict[Any, Any] = {}
    for event in sample.events:
        match event:
            case Entered(phase=entered):
                if entered is Phase.LOSS:
                    for storage, owner in born.items():
                        found.owners[storage] = owner
                        key = (turn, owner)
                        found.kept[key] = found.kept.get(key, 0) + found.sizes[storage]
                turn, phase, place = turn + (entered is Phase.FORWARD), entered, "around"
                born = {}
            case Reached(direction="forward", block=block):
                place = "final" if block is None else block
            case Allocated(storage=storage, size=size):
                found.sizes[storage] = size
                if phase is Phase.FORWARD:
                    of: Any = place
                    if storage in going_in:
                        block = going_in[storage][1]
                        of = block if block < sample.blocks else "final"
                    born[storage] = "hidden" if storage in sample.outputs.values() else of
            case Freed(storage=storage):
                born.pop(storage, None)
    return found


def _account(sample: _Sample) -> _Account:
    found = _storages(sample)
    account = _Account(hidden=found.sizes[sample.outputs[0]])
    if any(found.sizes[storage] != account.hidden for storage in sample.inputs.values()):
        raise ModelError(
            "what goes from block to block is not one hidden state, which no estimate is made for"
        )
    kept = {block: found.kept.get((0, block), 0) for block in range(sample.blocks)}
    account.kept = [kept[block] for block in range(sample.blocks)]
    account.around = found.kept.get((0, "around"), 0)
    account.final_kept = found.kept.get((0, "final"), 0)
    alive: Counter[Any] = Counter()
    total = start = 0
    turn, phase, place = -1, Phase.IDLE, None
    number = 0
    for index, event in enumerate(sample.events):
        while number < len(sample.work) and sample.work[number].event <= index:
            _credit(account, sample.work[number], turn, phase, place)
            number += 1
        match event:
            case Entered(phase=phase):
                turn, place = turn + (phase is Phase.FORWARD), None
                continue
            case Reached(direction="forward", block=block):
                place, start = ("final" if block is None else block), total
                if block == sample.blocks - 1 and turn == 0:
                    before = sum(kept[j] for j in range(block))
                    account.around_forward = total - before - account.hidden
                continue
            case Reached(block=block):
                place = block
                continue
            case Allocated(storage=storage, size=size):
                total += size
                alive[_label(storage, found, sample, turn)] += size
            case Freed(storage=storage):
                if storage in found.sizes:
                    total -= found.sizes[storage]
                    alive[_label(storage, found, sample, turn)] -= found.sizes[storage]
                continue
        if phase is Phase.FORWARD and turn == 0 and isinstance(place, int):
            account.forward.setdefault(place, []).append(total - start)
        elif phase is Phase.FORWARD and turn == 0 and place == "final":
            held = account.around_forward + sum(account.kept) + account.final_kept + account.hidden
            account.final_forward.append(total - held)
        elif phase is Phase.BACKWARD:
            _note_backward(account, sample, alive, total, turn, place)
    return account


def _label(storage: Any, found: _Storages, sample: _Sample, turn: int) -> Any:
    """What a storage counts as: a gradient, what a block keeps of this micro-batch, or anything else."""
    if storage in sample.gradients:
        return "gradient", sample.gradients[storage][0]
    return "kept", found.owners.get(storage)


def _note_backward(
    account: _Account, sample: _Sample, alive: Counter[Any], total: int, turn: int, place: Any
) -> None:
    gradients = sum(size for (kind, _), size in alive.items() if kind == "gradient")
    others = total - gradients - account.around - 2 * account.hidden
    if place == _EMBEDDING:
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


def _credit(account: _Account, work: _Work, turn: int, phase: Phase, place: Any) -> None:
    if turn == 0 and isinstance(place, int) and phase in (Phase.FORWARD, Phase.BACKWARD):
        account.work.setdefault((phase.value, place), []).append(work)


def _fitted(values: Sequence[float], tokens: Sequence[int], rows: int) -> Size:
    """The polynomial through three values, whose tokens are as 1 : 2 : 4; squares are of rows."""
    one, two, four = values
    first = tokens[0]
    square = ((four - two) - 2 * (two - one)) / (6 * first * first)
    if abs(square) * tokens[-1] ** 2 < _NO_SQUARE * max(1.0, abs(four)):
        square = 0.0
    token = (four - two) / (2 * first) - 6 * square * first
    return Size(
        constant=one - token * first - square * first * first, per_token=token, per_square=square * rows
    )


_NO_SQUARE = 1e-6
"""Share of a size below which a square term is rounding."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """The accounts of three lengths of rows, and what turns three values into a polynomial."""

    accounts: Sequence[_Account]
    tokens: Sequence[int]
    rows: int

    def size(self, of: Callable[[_Account], float]) -> Size:
        return _fitted([of(account) for account in self.accounts], self.tokens, self.rows)

    def sizes(self, of: Callable[[_Account], Sequence[int]]) -> tuple[Size, ...]:
        """The sizes of which the largest decides; one where the order of events depends on the length."""
        found = [of(account) or [0] for account in self.accounts]
        if len({len(values) for values in found}) > 1:
            return (self._fit([max(values) for values in found]),)
        return _largest([self._fit(values) for values in zip(*found, strict=True)], lambda size: size)

    def moments(self, of: Callable[[_Account], Sequence[Numbers]]) -> tuple[Moment, ...]:
        found = [of(account) or [(0, 0, 0)] for account in self.accounts]
        if len({len(values) for values in found}) > 1:
            found = [[max(values, key=sum)] for values in found]
        return _largest([self._moment(values) for values in zip(*found, strict=True)], lambda m: m.total)

    def passed(self, direction: Phase, block: int) -> TracedPass:
        def every(account: _Account) -> list[_Work]:
            return account.work.get((direction.value, block), [])

        longest = every(self.accounts[-1])
        return TracedPass(
            flops=self.size(lambda a: sum(w.flops for w in every(a))),
            bytes=self.size(lambda a: sum(w.bytes for w in every(a))),
            products=sum(w.is_product for w in longest),
            operations=sum(not w.is_product and w.heads is None for w in longest),
        )

    def heads(self, block: int) -> list[tuple[int, int]]:
        """Number and size of heads of each fused attention of one row (or of all rows at once)."""
        works = self.accounts[-1].work.get((Phase.FORWARD.value, block), [])
        found = [w.heads for w in works if w.heads is not None]
        return found[:: self.rows] if len(found) % self.rows == 0 else found

    def _fit(self, values: Sequence[float]) -> Size:
        return _fitted(values, self.tokens, self.rows)

    def _moment(self, values: Sequence[Numbers]) -> Moment:
        kept, gradients, rest = (self._fit([v[place] for v in values]) for place in range(3))
        return Moment(kept=kept, gradients=gradients.constant, temporaries=rest)


T = TypeVar("T")


def _largest(items: Sequence[T], size: Callable[[T], Size]) -> tuple[T, ...]:
    """Those that no other exceeds for every micro-batch."""
    kept: list[T] = []
    for item in items:
        if any(size(other).exceeds(size(item)) for other in kept):
            continue
        kept = [other for other in kept if not size(item).exceeds(size(other))]
        kept.append(item)
    return tuple(kept)


def trace_profile(plan: Plan, config: PretrainedConfig, *, first: int, rows: int) -> TracedStep:
    """The profile of one way of training; ``first`` is the shortest of three lengths of ``rows`` rows."""
    model = plan.model
    chosen = list(dict.fromkeys([0, *(_example(model, kind) for kind in range(len(model.kinds)))]))
    places = [chosen.index(_example(model, kind)) for kind in range(len(model.kinds))]
    keeping, again = (
        _fit_of(replace(plan, recompute=Recompute(blocks=blocks)), config, chosen, first=first, rows=rows)
        for blocks in (0, len(chosen))
    )
    blocks = tuple(_block(keeping, again, place) for place in places)
    enters = trains_embeddings(plan.tuning)
    return TracedStep(
        blocks=blocks,
        first=None if enters else _block(keeping, again, 0),
        around=keeping.size(lambda a: a.around),
        around_forward=keeping.size(lambda a: a.around_forward),
        final_norm_kept=keeping.size(lambda a: a.final_kept),
        final_norm_forward=_one(keeping.sizes(lambda a: a.final_forward)),
        final_norm_backward=_one(keeping.sizes(lambda a: a.final_backward)),
        squares_stream=model.masks_whole_stream,
    )


def _example(model: ModelSpec, kind: int) -> int:
    """A block of that kind, another than the first of all where there is one."""
    numbers = [index for index, its in enumerate(model.kind_of) if its == kind]
    return numbers[min(1, len(numbers) - 1)] if numbers[0] == 0 else numbers[0]


def _one(sizes: Sequence[Size]) -> Size:
    """The largest per token: that of a norm has no other term that matters."""
    return max(sizes, key=lambda size: size.per_token)


def _fit_of(plan: Plan, config: PretrainedConfig, chosen: Sequence[int], *, first: int, rows: int) -> _Fit:
    samples = [
        _recorded(_shallow(plan, len(chosen)), config, chosen, (first * times,) * rows) for times in SIZES
    ]
    whole = plan.model.masks_whole_stream
    return _Fit([_account(sample) for sample in samples], [s.tokens for s in samples], 1 if whole else rows)


def _shallow(plan: Plan, blocks: int) -> Plan:
    return replace(plan, model=replace(plan.model, num_layers=blocks))


def _block(keeping: _Fit, again: _Fit, block: int) -> TracedBlock:
    turns = {turn for turn, _ in keeping.accounts[0].backward}
    adding = max(turns)
    heads = keeping.heads(block)
    return TracedBlock(
        kept=keeping.size(lambda a: a.kept[block]),
        forward=again.sizes(lambda a: a.forward.get(block, [])),
        building=keeping.sizes(lambda a: [x + a.hidden for x in a.forward.get(block, [])]),
        backward=keeping.moments(lambda a: a.backward.get((0, block), [])),
        adding=keeping.moments(lambda a: a.backward.get((adding, block), [])),
        recomputed=again.moments(lambda a: a.backward.get((0, block), [])),
        recomputed_adding=again.moments(lambda a: a.backward.get((adding, block), [])),
        there=keeping.passed(Phase.FORWARD, block),
        back=keeping.passed(Phase.BACKWARD, block),
        heads=max((n for n, _ in heads), default=0),
        head_size=max((size for _, size in heads), default=0),
        flops_per_pair=12.0 * sum(n * size for n, size in heads),
    )


class TransformersTracer:
    """Builds models of transformers without memory: spec/tracing.py's Tracer."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> ModelSpec:
        """Raises ModelError for an architecture that transformers does not have, or that has no decoder blocks."""
        return read_shapes(text_config(config), name=name, digest=digest, dtype=dtype)

    def profile(self, way: Way) -> TracedStep:
        """Trace it. Raises ModelError for blocks that do not run on fake tensors."""
        config = model_config(way.plan.model_path)
        with reading_blocks(way.plan.model.name):
            return trace_profile(way.plan, config, first=way.first, rows=way.rows)


@contextmanager
def reading_blocks(name: str) -> Iterator[None]:
    """What transformers raises while blocks run on fake tensors becomes a ModelError."""
    try:
        yield
    except FituneError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        NotImplementedError,
        IndexError,
    ) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{name}: its blocks cannot be traced: {first}", hint="a model of another architecture"
        ) from error
