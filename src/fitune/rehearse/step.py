"""The Plan's own step: the model and the engine that training would build, on fake tensors, recorded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from fitune.engine.protocol import Engine
from fitune.models.attention import attending_as
from fitune.models.build import empty_model, with_layers
from fitune.models.weights import compute_dtype
from fitune.rehearse.batch import FullStream, full_stream, heaviest_rows, most_labels
from fitune.rehearse.cuda_functions import CudaFunctions
from fitune.rehearse.events import ParameterKey, Trace
from fitune.rehearse.fake import fake_tensors, modules_may_move
from fitune.rehearse.recorder import Recorder
from fitune.rehearse.stand_ins import StandIns
from fitune.spec.hardware import Gpu
from fitune.spec.plan import Plan, Recompute
from fitune.train.prepare import Prepared, prepare_loaded

RowLengths = tuple[int, ...]


def record_step(
    plan: Plan, config: PretrainedConfig, *, rows: RowLengths | None = None, labels: int | None = None
) -> Trace:
    """Everything from the first micro-batch to the end of the update, after a step that made the states.

    ``rows`` and ``labels`` replace the largest micro-batch the plan allows.
    """
    with rehearsed(plan, config) as prepared:
        stream, recorder = _record(plan, prepared, rows, labels)
        recorder.mark_blocks(prepared.model.blocks)
        with recorder:
            for _ in range(_micro_batches(plan)):
                _forward_backward(prepared.engine, stream, recorder, labels or most_labels(plan.batch))
            _name_gradients(recorder, prepared)
            prepared.engine.update(learning_rate=1.0, enter_phase=recorder.enter)
        return recorder.finished()


def record_update(plan: Plan, config: PretrainedConfig) -> Trace:
    """Only the update, of a model that has its gradients: they are among what is resident."""
    with rehearsed(plan, config) as prepared:
        _set_gradients(prepared)
        _, recorder = _record(plan, prepared, None, None)
        _name_gradients(recorder, prepared)
        with recorder:
            prepared.engine.update(learning_rate=1.0, enter_phase=recorder.enter)
        return recorder.finished()


@contextmanager
def rehearsed(plan: Plan, config: PretrainedConfig) -> Iterator[Prepared]:
    """Model and engine of ``plan`` on fake tensors, with optimizer states."""
    collecting = gc.isenabled()
    gc.disable()  # what only the cycle collector frees is freed at no moment that could be predicted
    try:
        with fake_tensors() as mode, _standing_for(plan.hardware.gpu):
            with modules_may_move(mode):
                prepared = prepare_loaded(empty_model(config, compute_dtype(plan.precision)), plan)
            _make_states(plan, prepared)
            yield prepared
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _standing_for(gpu: Gpu) -> Iterator[None]:
    with attending_as(gpu.capability), nullcontext() if gpu.is_cpu else CudaFunctions():
        yield


def shallow_plan(plan: Plan, *, layers: int, recomputed: int) -> Plan:
    """The same plan for fewer blocks."""
    model = replace(plan.model, num_layers=layers)
    return replace(plan, model=model, recompute=Recompute(blocks=recomputed))


def shallow_config(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    return with_layers(config, layers)


def parameter_keys(blocks: nn.ModuleList, whole: nn.Module) -> dict[int, ParameterKey]:
    """id of a parameter -> its block and its name there."""
    keys: dict[int, ParameterKey] = {id(p): (None, name) for name, p in whole.named_parameters()}
    for index, block in enumerate(blocks):
        keys.update({id(p): (index, name) for name, p in block.named_parameters()})
    return keys


def _micro_batches(plan: Plan) -> int:
    """From the second on gradients exist, and every further one is like the second."""
    return min(plan.batch.accumulation, 2)


def _record(
    plan: Plan, prepared: Prepared, rows: RowLengths | None, labels: int | None
) -> tuple[FullStream, Recorder]:
    stream = full_stream(rows or heaviest_rows(plan))
    stand_ins = StandIns(gpu=plan.hardware.gpu, supervised_tokens=labels or most_labels(plan.batch))
    whole = prepared.model.whole
    gradients = [p.grad for p in whole.parameters() if p.grad is not None]
    resident = {
        "weights": [*whole.parameters(), *whole.buffers()],
        "optimizer": list(prepared.engine.state().tensors.values()),
        "batch": list(stream.tensors()),
        "gradients": gradients,
    }
    return stream, Recorder(resident, stand_ins)


def _make_states(plan: Plan, prepared: Prepared) -> None:
    """An update on gradients of no content: the optimizer makes its states as in a first step."""
    _set_gradients(prepared)
    with Recorder({}, StandIns(gpu=plan.hardware.gpu, supervised_tokens=1)):
        prepared.engine.update(learning_rate=1.0, enter_phase=lambda phase: None)


def _set_gradients(prepared: Prepared) -> None:
    for parameter in prepared.model.trained.values():
        parameter.grad = torch.empty_like(parameter)


def _forward_backward(engine: Engine, stream: FullStream, recorder: Recorder, labels: int) -> None:
    engine.forward_backward(stream, supervised_tokens=labels, enter_phase=recorder.enter)


def _name_gradients(recorder: Recorder, prepared: Prepared) -> None:
    keys = parameter_keys(prepared.model.blocks, prepared.model.whole)
    for parameter in prepared.model.trained.values():
        if parameter.grad is not None:
            recorder.trace.gradients[recorder.serial_of(parameter.grad)] = keys[id(parameter)]
