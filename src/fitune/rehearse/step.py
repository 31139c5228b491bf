"""A rehearsal: the Plan's own step with the model and engine that training would build, recorded on fake tensors.

Its micro-batch is the one that takes the most memory the plan allows. Of a deep model a few blocks are built, and the
update of all is recorded with them: the optimizer sees parameters and no blocks, so those that stand for others are
repeated, not built.
"""

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter
from transformers import PretrainedConfig, PreTrainedModel

from fitune.engine.protocol import Engine
from fitune.engine.ranks import local_part
from fitune.models.language_model import LanguageModel
from fitune.models.liger import computing_with
from fitune.models.readers import empty_model, model_config, with_layers
from fitune.models.row_attention import attending_as
from fitune.models.weights import compute_dtype
from fitune.rehearse.layer_extrapolation import Depth, Irregular, extrapolated
from fitune.rehearse.recorder import Recorder, fake_ranks, modules_may_move
from fitune.rehearse.stand_ins import LIGER_STAND_INS, StandIns, cuda_functions
from fitune.rehearse.trace import ParameterKey, Trace, peaks_by_kind, reserved_peak
from fitune.train.prepare import Prepared, engine_for, prepare_loaded
from fitune.values.model.traits import largest_rows
from fitune.values.plan import Lora, Offload, Plan, Recompute, Zero, updates_in_backward
from fitune.values.predictions import Rehearsal


def rehearse(plan: Plan, *, exact: bool = False, outside: dict[str, int] | None = None) -> Rehearsal:
    """Trace the second step of ``plan``; ``exact`` traces every block instead of a few that stand for all.

    ``outside`` is what no tensor explains (contexts, workspaces), by name: it is taken as given.
    """
    config = model_config(plan.model_path)
    if plan.added_tokens:
        config.vocab_size = plan.model.vocab_size
    trace, traced = trace_plan(plan, config, exact=exact)
    on_cuda = not plan.hardware.gpu.is_cpu
    return Rehearsal(
        phases=peaks_by_kind(trace, on_cuda=on_cuda),
        outside=outside or {},
        reserved_bytes=reserved_peak(trace),
        layers_traced=traced,
    )


def trace_plan(plan: Plan, config: PretrainedConfig, *, exact: bool) -> tuple[Trace, int]:
    """The step's events and how many blocks were traced for them.

    What leaves the device leaves while the next block works: such a step is traced whole.
    """
    layers = plan.model.num_layers
    recomputed = min(plan.recompute.blocks, layers)
    depth = Depth(recomputed=recomputed, kept=layers - recomputed)
    # Blocks differ where windowed and global attention take turns, or where some have adapters and others have none.
    some_adapted = isinstance(plan.tuning, Lora) and bool(plan.tuning.layers)
    one_kind = len(set(getattr(config, "layer_types", None) or ())) <= 1 and len(plan.model.kinds) <= 1
    repeats = one_kind and not some_adapted and plan.offload == Offload()
    if not exact and depth.shallow() != depth and repeats:
        with suppress(Irregular):  # then every block is traced
            passes, update = record_few_blocks(plan, config, depth)
            return extrapolated(passes, update, depth), depth.shallow().layers
    return record_step(plan, config), layers


RowLengths = tuple[int, ...]


def record_step(
    plan: Plan, config: PretrainedConfig, *, rows: RowLengths | None = None, labels: int | None = None
) -> Trace:
    """Everything from the first micro-batch to the end of the update, after a step that made the states.

    ``rows`` and ``labels`` replace the largest micro-batch the plan allows.
    """
    with rehearsed(plan, config) as prepared:
        make_states(plan, prepared.engine, prepared.model.trained.values())
        with recording(plan, prepared, rows, labels) as (recorder, run_passes):
            run_passes()
            prepared.engine.update(learning_rate=1.0, enter_phase=recorder.enter)
            return recorder.finished()


def record_few_blocks(plan: Plan, config: PretrainedConfig, depth: Depth) -> tuple[Trace, Trace]:
    """Forward and backward of a shallow model, and the update of the whole one."""
    few = depth.shallow()
    model = replace(plan.model, num_layers=few.layers)
    shallow = replace(plan, model=model, recompute=Recompute(blocks=few.recomputed))
    with rehearsed(shallow, with_layers(config, few.layers)) as prepared:
        if updates_in_backward(plan.tuning):  # its states are there when the second step goes back
            make_states(shallow, prepared.engine, prepared.model.trained.values())
        with recording(shallow, prepared) as (recorder, run_passes):
            run_passes()
            if updates_in_backward(plan.tuning):
                prepared.engine.update(learning_rate=1.0, enter_phase=recorder.enter)
            passes = recorder.finished()
        return passes, record_update(plan, prepared.model, depth)


@contextmanager
def rehearsed(
    plan: Plan,
    config: PretrainedConfig,
    *,
    change: Callable[[PreTrainedModel], object] = lambda model: None,
) -> Iterator[Prepared]:
    """Model and engine of ``plan`` on fake tensors, its blocks not compiled.

    ``change`` is done to the model first of all.
    """
    collecting, gpu = gc.isenabled(), plan.hardware.gpu
    gc.disable()  # what only the cycle collector frees is freed at no moment that could be predicted
    try:
        with (
            fake_ranks(plan) as mesh,
            FakeTensorMode() as mode,  # on a fake cpu: a build of torch without CUDA cannot make them on cuda
            attending_as(gpu.capability),
            computing_with(LIGER_STAND_INS),
            nullcontext() if gpu.is_cpu else cuda_functions(),
        ):
            with modules_may_move(mode):
                model = empty_model(config, compute_dtype(plan.precision))
                change(model)
                prepared = prepare_loaded(model, replace(plan, compile_blocks=False), mesh=mesh)
            yield prepared
    finally:
        if collecting:
            gc.enable()


@contextmanager
def recording(
    plan: Plan,
    prepared: Prepared,
    rows: RowLengths | None = None,
    labels: int | None = None,
    *,
    by: Callable[..., Recorder] = Recorder,
) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A recorder of the kind ``by`` at work, and what runs all micro-batches under it and then names the gradients."""
    whole, engine = prepared.model.whole, prepared.engine
    supervised = labels or plan.batch.most_labels
    stream = full_stream(rows or largest_rows(plan))
    resident = {
        "weights": map(local_part, (*whole.parameters(), *whole.buffers())),
        "optimizer": list(map(local_part, engine.state().tensors.values())),
        "batch": list(stream.tensors()),
    }
    stand_ins = StandIns(gpu=plan.hardware.gpu, supervised_tokens=supervised)
    recorder = by(resident, stand_ins, prepared.host)
    recorder.mark_blocks(prepared.model.blocks)

    def run_passes() -> None:
        """Runs forward and backward of micro-batches, then names the storages of the gradients.

        From the second on gradients exist, and every further one is like the second. At stage 1 the last one differs
        again.
        """
        stage_1 = isinstance(plan.sharding, Zero) and plan.sharding.stage == 1
        count = min(plan.batch.accumulation, 3 if stage_1 else 2)
        for number in range(count):
            engine.forward_backward(
                stream, divisor=supervised, enter_phase=recorder.enter, last=number == count - 1
            )
        keys = {id(parameter): key for key, parameter in _parameters(prepared.model)}
        recorder.name_gradients((keys[id(p)], p.grad) for p in prepared.model.trained.values())

    with recorder:
        yield recorder, run_passes


@dataclass(frozen=True, slots=True)
class RowStream:
    """A micro-batch that no data is read for: rows end to end in a flat stream of T tokens."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]

    @property
    def supervised_tokens(self) -> int:
        """Tokens with a label."""
        return int((self.labels_T >= 0).sum())

    def tensors(self) -> tuple[Tensor, ...]:
        """Ids, labels and positions, [T] each."""
        return self.input_ids_T, self.labels_T, self.position_ids_T


def full_stream(lengths: tuple[int, ...]) -> RowStream:
    """Rows of these lengths; inside a fake mode they hold nothing."""
    tokens = sum(lengths)
    ids_T, labels_T, positions_T = (torch.empty(tokens, dtype=torch.int64) for _ in range(3))
    return RowStream(ids_T, labels_T, positions_T, lengths)


Keyed = tuple[ParameterKey, Tensor]


def record_update(plan: Plan, shallow: LanguageModel, depth: Depth) -> Trace:
    """The update of ``plan``'s model, of which ``shallow`` has a few blocks.

    Its gradients, weights and states are among what is resident.
    """
    weights = dict(_deepened(_parameters(shallow), depth))
    trained = {key: p for key, p in weights.items() if isinstance(p, Parameter) and p.requires_grad}
    engine = engine_for(plan, shallow, {f"{block}.{name}": p for (block, name), p in trained.items()})
    make_states(plan, engine, trained.values())
    if not updates_in_backward(plan.tuning):
        _share_gradients(trained, dict(_parameters(shallow)), depth)
    buffers = _deepened(_by_block(shallow, lambda module: module.named_buffers()), depth)
    resident: dict[str, Iterable[Tensor]] = {
        "weights": [*weights.values(), *(buffer for _, buffer in buffers)],
        "optimizer": map(local_part, engine.state().tensors.values()),
        "gradients": (p.grad for p in trained.values() if p.grad is not None),  # a list would keep them alive
    }
    recorder = Recorder(resident, StandIns(gpu=plan.hardware.gpu, supervised_tokens=1))
    recorder.name_gradients((key, p.grad) for key, p in trained.items())
    with recorder:
        engine.update(learning_rate=1.0, enter_phase=recorder.enter)
        return recorder.finished()


def make_states(plan: Plan, engine: Engine, trained: Iterable[Tensor]) -> None:
    """An update on gradients of no content: the optimizer makes its states as in a first step."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    with Recorder({}, StandIns(gpu=plan.hardware.gpu, supervised_tokens=1)):
        engine.update(learning_rate=1.0, enter_phase=lambda phase: None)


def _share_gradients(
    trained: Mapping[ParameterKey, Parameter], shallow: Mapping[ParameterKey, Tensor], depth: Depth
) -> None:
    """Gradients of no content; where the shallow model's share a storage, as FSDP2's of a block do, so do these."""
    storages: dict[tuple[int | None, int], Tensor] = {}
    for (block, name), parameter in trained.items():
        example = shallow[depth.stood_for_by(block), name].grad
        assert example is not None
        local = local_part(example)
        whole = local.untyped_storage()
        place = (block, whole._cdata)
        if place not in storages:
            storages[place] = parameter.new_empty(whole.nbytes() // local.element_size(), dtype=local.dtype)
        parameter.grad = storages[place].as_strided(local.shape, local.stride(), local.storage_offset())


def _parameters(model: LanguageModel) -> Iterator[Keyed]:
    """Trained parameters in the order in which training hands them to the optimizer."""
    return _by_block(model, lambda module: module.named_parameters())


def _by_block(
    model: LanguageModel, members: Callable[[Module], Iterable[tuple[str, Tensor]]]
) -> Iterator[Keyed]:
    inside = {
        id(tensor): (index, name)
        for index, block in enumerate(model.blocks)
        for name, tensor in members(block)
    }
    for name, tensor in members(model.whole):
        yield inside.get(id(tensor), (None, name)), tensor


def _deepened(shallow: Iterable[Keyed], depth: Depth) -> Iterator[Keyed]:
    """New tensors of the same shapes, those of a block that stands for others once for each of them."""
    for block, group in itertools.groupby(shallow, key=lambda item: item[0][0]):
        members = [(name, tensor) for (_, name), tensor in group]
        for copy in [None] if block is None else depth.copies(block):
            for name, tensor in members:
                empty = torch.empty_like(local_part(tensor), requires_grad=False)
                is_parameter = isinstance(tensor, Parameter)
                yield (copy, name), Parameter(empty, tensor.requires_grad) if is_parameter else empty
