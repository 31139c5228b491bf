"""Training with something on the host is training without: the same losses and the same weights, bit for bit."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.models.weights import compute_dtype
from fitune.spec.plan import Offload, Plan
from fitune.train.prepare import Prepared, prepare_loaded
from laws.test_memory_prediction import ROWS, bench

ALL = bench.LAYERS
ACTIVATIONS = Offload(activations="cpu")


def plan_of(offload: Offload, *, tuning: str, precision: str, recompute: int, accumulation: int = 1) -> Plan:
    plan = bench.plan_of(
        bench.small_model(), tuning=tuning, precision=precision, recompute=recompute, chunked=True,
        accumulation=accumulation,
    )  # fmt: skip
    return replace(plan, offload=offload)


def prepared(plan: Plan) -> Prepared:
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in bench.CONFIG.items() if key != "model_type"})
    return prepare_loaded(LlamaForCausalLM(config).to(compute_dtype(plan.precision)), plan)


def losses(ready: Prepared, plan: Plan, *, steps: int = 2, seed: int = 1) -> list[float]:
    """Of ``steps`` optimizer steps."""
    torch.manual_seed(seed)
    rows = [bench.random_rows(ROWS, vocab_size=plan.model.vocab_size) for _ in range(plan.batch.accumulation)]
    found = []
    for _ in range(steps):
        for micro in rows:
            loss = ready.engine.forward_backward(
                micro, supervised_tokens=micro.supervised_tokens, enter_phase=lambda phase: None
            )
            found.append(loss.item())
        ready.engine.update(learning_rate=1e-3, enter_phase=lambda phase: None)
    return found


def assert_same_training(one: Plan, other: Plan) -> None:
    first, second = prepared(one), prepared(other)
    assert losses(first, one) == losses(second, other)
    theirs = dict(second.model.whole.named_parameters())
    for name, parameter in first.model.whole.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize(
    ("tuning", "precision", "recompute", "accumulation"),
    [
        ("full", "fp32", 0, 2),
        ("full", "bf16", ALL // 2, 1),
        ("full", "fp32", ALL, 1),
        ("lora", "bf16", 0, 1),
        ("lora", "fp32", ALL // 2, 2),
        ("lora", "bf16-master", ALL, 1),
    ],
)
def test_activations_on_the_host_change_nothing(tuning, precision, recompute, accumulation):
    plan = plan_of(
        ACTIVATIONS, tuning=tuning, precision=precision, recompute=recompute, accumulation=accumulation
    )
    assert_same_training(replace(plan, offload=Offload()), plan)


def test_the_host_keeps_no_activations_between_two_steps():
    plan = plan_of(ACTIVATIONS, tuning="full", precision="fp32", recompute=2)
    ready = prepared(plan)
    losses(ready, plan)
    assert ready.host.bytes == 0


def taken_from(ready: Prepared) -> list[tuple[int, int]]:
    """From now on notes every copy to the host: the storage it is of, and its elements."""
    taken: list[tuple[int, int]] = []
    take = ready.host.take

    def noted(tensor):
        taken.append((tensor.untyped_storage()._cdata, tensor.numel()))
        return take(tensor)

    ready.host.take = noted
    return taken


def test_weights_are_never_copied_to_the_host():
    """Autograd keeps every weight that it multiplies."""
    plan = plan_of(ACTIVATIONS, tuning="full", precision="fp32", recompute=0)
    ready = prepared(plan)
    taken = taken_from(ready)
    losses(ready, plan, steps=1)
    weights = {parameter.untyped_storage()._cdata for parameter in ready.model.whole.parameters()}
    assert taken
    assert not weights & {storage for storage, _ in taken}


def test_recompute_alone_leaves_the_block_inputs_to_the_host():
    plan = plan_of(ACTIVATIONS, tuning="full", precision="fp32", recompute=ALL)
    ready = prepared(plan)
    taken = taken_from(ready)
    losses(ready, plan, steps=1)
    assert [elements for _, elements in taken] == [sum(ROWS) * 128] * (ALL - 1)  # the last one's stays
