"""The update of a deep model, traced with a shallow one.

The optimizer sees parameters and no blocks: those that stand for others are repeated, not built.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fitune.engine.protocol import Engine
from fitune.engine.ranks import local_part
from fitune.models.language_model import LanguageModel
from fitune.rehearse.layer_extrapolation import Depth
from fitune.rehearse.recorder import Recorder
from fitune.rehearse.stand_ins import StandIns
from fitune.rehearse.trace import ParameterKey, Trace
from fitune.spec.plan import Plan, updates_in_backward
from fitune.train.prepare import engine_for

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


def parameter_keys(model: LanguageModel) -> dict[int, ParameterKey]:
    """id of a parameter -> its block and its name there."""
    return {id(parameter): key for key, parameter in _parameters(model)}


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
