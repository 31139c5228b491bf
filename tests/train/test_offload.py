"""Training with something on the host is training without: the same losses and the same weights, bit for bit."""

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.engine.host import HostMemory
from fitune.engine.streamed_weights import StreamedWeights
from fitune.models.weights import compute_dtype
from fitune.train.prepare import prepare_loaded
from fitune.values.plan import AdamW, Nf4, Offload, PlainLoss, Precision, Sgd
from laws.test_memory_prediction import ROWS, bench
from models.streams import forward_backward, optimizer_step

ALL = bench.LAYERS
ACTIVATIONS = Offload(activations="cpu")
OPTIMIZER = Offload(optimizer="cpu")
FROZEN = Offload(parameters="cpu")
ALL_THREE = Offload(parameters="cpu", optimizer="cpu", activations="cpu")


def plan_of(offload, *, tuning, precision, recompute=ALL // 2, accumulation=1):
    plan = bench.plan_of(
        bench.small_model(), tuning=tuning, precision=precision, recompute=recompute, chunked=True,
        accumulation=accumulation,
    )  # fmt: skip
    return replace(plan, offload=offload)


def prepared(plan):
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in bench.CONFIG.items() if key != "model_type"})
    return prepare_loaded(LlamaForCausalLM(config).to(compute_dtype(plan.precision)), plan)


def losses(ready, plan, *, steps=2, seed=1):
    """Of ``steps`` optimizer steps."""
    torch.manual_seed(seed)
    rows = [bench.random_rows(ROWS, vocab_size=plan.model.vocab_size) for _ in range(plan.batch.accumulation)]
    found = []
    for _ in range(steps):
        for micro in rows:
            loss = forward_backward(ready.engine, micro)
            found.append(loss.item())
        optimizer_step(ready.engine, 1e-3)
    return found


def assert_same_training(one, other):
    first, second = prepared(one), prepared(other)
    assert losses(first, one) == losses(second, other)
    assert_equal(first, second)


def assert_equal(one, other):
    """Parameters and buffers hold the same bytes, packed ones too."""
    theirs = tensors_of(other)
    for name, tensor in tensors_of(one).items():
        assert torch.equal(as_bytes(tensor), as_bytes(theirs[name])), name


def tensors_of(ready):
    whole = ready.model.whole
    return dict(chain(whole.named_parameters(), whole.named_buffers()))


def as_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("offload", "tuning", "precision", "recompute", "accumulation"),
    [
        (ACTIVATIONS, "full", "fp32", 0, 2),
        (ACTIVATIONS, "full", "bf16", ALL // 2, 1),
        (ACTIVATIONS, "lora", "fp32", ALL // 2, 2),
        (ACTIVATIONS, "lora", "bf16-master", ALL, 1),
        (FROZEN, "lora", "fp32", 0, 2),
        (FROZEN, "lora", "bf16-master", ALL, 1),
        (Offload(parameters="cpu", optimizer="cpu"), "full", "fp32", 0, 1),
        (ALL_THREE, "full", "fp32", ALL // 2, 1),
        (ALL_THREE, "lora", "fp32", ALL // 2, 1),
    ],
)
def test_activations_and_weights_on_the_host_change_nothing(
    offload, tuning, precision, recompute, accumulation
):
    plan = plan_of(
        offload, tuning=tuning, precision=precision, recompute=recompute, accumulation=accumulation
    )
    assert_same_training(replace(plan, offload=Offload()), plan)


@pytest.mark.parametrize(
    ("tuning", "optimizer", "recompute"),
    [("full", AdamW(weight_decay=0.1), 0), ("lora", Sgd(momentum=0.9), ALL // 2)],
)
def test_an_optimizer_on_the_host_is_the_one_on_the_device_in_fp32(tuning, optimizer, recompute):
    """With the loss in one chunk: over several micro-batches a head's chunks are added up in another order."""
    plan = plan_of(OPTIMIZER, tuning=tuning, precision="fp32", recompute=recompute, accumulation=2)
    plan = replace(plan, loss=PlainLoss(), optimizer=optimizer)
    assert_same_training(replace(plan, offload=Offload()), plan)


def test_in_bf16_it_is_the_one_with_masters():
    """Clipping is off: the norm is summed over gradients in fp32 here and in 16 bit there."""
    plan = plan_of(OPTIMIZER, tuning="full", precision="bf16", recompute=0)
    plan = replace(plan, optimizer=AdamW(weight_decay=0.1))
    plan = replace(plan, schedule=replace(plan.schedule, max_grad_norm=0.0))
    with_masters = replace(plan, precision=Precision.BF16_MASTER)
    away, away_with_masters, here = (
        (ready := prepared(each), losses(ready, each))
        for each in (plan, with_masters, replace(with_masters, offload=Offload()))
    )
    for ready, found in (away_with_masters, here):
        assert found == away[1]
        assert_equal(ready, away[0])


def test_an_overflow_in_fp16_changes_nothing_on_the_host():
    plan = plan_of(OPTIMIZER, tuning="lora", precision="fp16")
    ready = prepared(plan)
    losses(ready, plan, steps=1)
    before = {name: tensor.clone() for name, tensor in ready.engine.state().tensors.items()}
    ready.engine.loss_scale.value = 2.0**40
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    forward_backward(ready.engine, rows, 1)
    assert optimizer_step(ready.engine, 1e-3).skipped
    after = ready.engine.state().tensors
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def gone_on(ready, plan):
    """A model of ``plan`` with the weights and the states of ``ready``."""
    other = prepared(plan)
    other.model.whole.load_state_dict(ready.model.whole.state_dict())
    other.engine.restore(copy.deepcopy(ready.engine.state()))
    return other


def test_states_on_the_host_are_restored_bit_for_bit():
    plan = plan_of(OPTIMIZER, tuning="lora", precision="bf16-master", recompute=0)
    straight = prepared(plan)
    losses(straight, plan)
    resumed = gone_on(straight, plan)
    assert losses(straight, plan, seed=2) == losses(resumed, plan, seed=2)
    assert_equal(straight, resumed)


def test_a_run_may_move_its_optimizer_to_the_host_and_back():
    """The states have the same names; masters that were not saved are the weights."""
    plan = plan_of(Offload(), tuning="lora", precision="fp32")
    straight = prepared(plan)
    losses(straight, plan)
    moved = gone_on(straight, replace(plan, offload=OPTIMIZER))
    assert losses(straight, plan, seed=2) == losses(moved, plan, seed=2)
    back = gone_on(moved, plan)
    assert losses(back, plan, seed=3) == losses(moved, plan, seed=3)


def test_packed_weights_are_the_same_bytes_after_many_round_trips():
    """They are copied as bytes and never back, never packed anew."""
    pytest.importorskip("bitsandbytes")
    plan = plan_of(FROZEN, tuning="lora", precision="fp32", recompute=2)
    plan = replace(plan, tuning=replace(plan.tuning, base=Nf4()))
    here, away = prepared(replace(plan, offload=Offload())), prepared(plan)
    assert losses(here, plan, steps=3) == losses(away, plan, steps=3)
    assert_equal(here, away)


def test_weights_are_at_home_between_two_steps_and_after_an_evaluation():
    plan = plan_of(ALL_THREE, tuning="full", precision="fp32")
    ready = prepared(plan)
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    for run in (lambda: losses(ready, plan, steps=1), lambda: ready.model.loss(rows)):
        run()
        assert all(ready.host.owns(p) for block in ready.model.blocks for p in block.parameters())
        assert not ready.host.owns(ready.model.head.module.weight)


def test_a_forward_that_was_broken_off_leaves_nothing_behind():
    """Whatever is on the device then goes when the next one begins."""
    plan = plan_of(FROZEN, tuning="lora", precision="fp32")
    straight, broken = prepared(plan), prepared(plan)
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    broken.model.hidden_states(rows)
    assert losses(straight, plan) == losses(broken, plan)


@pytest.mark.parametrize("recompute", [0, ALL])
def test_only_what_backward_needs_goes_to_the_host_and_nothing_stays(recompute):
    """Never a weight, though autograd keeps all that it multiplies; of recomputed blocks their inputs."""
    plan = plan_of(ACTIVATIONS, tuning="full", precision="fp32", recompute=recompute)
    ready = prepared(plan)
    taken, take = [], ready.host.take

    def noted(tensors, *rooms):
        taken.extend((tensor.untyped_storage()._cdata, tensor.numel()) for tensor in tensors)
        return take(tensors, *rooms)

    ready.host.take = noted
    losses(ready, plan, steps=1)
    weights = {parameter.untyped_storage()._cdata for parameter in ready.model.whole.parameters()}
    assert taken
    assert not weights & {storage for storage, _ in taken}
    if recompute:
        inputs = [
            elements for _, elements in taken if elements
        ]  # torch 2.11 keeps an empty tensor a block, too
        assert inputs == [sum(ROWS) * 128] * (ALL - 1)  # the last one's stays
    assert not ready.host._owned


def test_tensors_of_any_type_and_shape_stream():
    """A scalar, a mask and a matrix of a block come whole, and go back to the memory that they came from."""
    block = nn.Module()
    block.register_parameter(
        "matrix", nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16), requires_grad=False)
    )
    block.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float64))
    block.register_buffer("mask", torch.tensor([True, False, True]))
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    host = HostMemory(torch.device("cpu"))
    places = StreamedWeights(nn.ModuleList([block]), host, trained=False)
    for away in (True, False, True):
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, before[name])
            assert host.owns(tensor) is away
        if away:
            places.begins(0, shared=set())
        else:
            places._only(-1, -1)


@pytest.mark.parametrize(
    ("offload", "changes"),
    [
        (FROZEN, {"layers": (2, 4)}),  # backward ends at block 2: those before come and go in forward alone
        (ALL_THREE, {"layers": (2, 4)}),
        (ALL_THREE, {"modules_to_save": ("embed_tokens", "lm_head")}),
    ],
    ids=["frozen", "all three", "tables"],
)
def test_with_adapters_in_some_blocks_and_beside_tables_it_is_the_same_too(offload, changes):
    plan = plan_of(offload, tuning="lora", precision="fp32", recompute=3)
    plan = replace(plan, tuning=replace(plan.tuning, **changes), loss=PlainLoss())
    assert_same_training(replace(plan, offload=Offload()), plan)
