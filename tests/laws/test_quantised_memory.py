"""Adapters on a packed base: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.rehearse.step import record_step
from fitune.values.plan import Hqq, Nf4
from fitune.values.predictions import Phase
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench
from laws.test_memory_prediction_families import ROWS, measured_peak
from laws.test_rehearsal_estimate import hidden_states_off
from plans import gpu, plan_for
from rehearse.tiny_configs import tensor_peak, tiny

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")

BASES = [
    Nf4(),
    pytest.param(Nf4(double_quant=False), marks=pytest.mark.slow),
    Hqq(bits=4),
    pytest.param(Hqq(bits=3), marks=pytest.mark.slow),
]
ALL = bench.LAYERS


def plan_on(base, model, *, precision, recompute, chunked, accumulation=1):
    plan = bench.plan_of(
        model, tuning="lora", precision=precision, recompute=recompute, chunked=chunked, accumulation=accumulation
    )  # fmt: skip
    return replace(plan, tuning=replace(plan.tuning, base=base))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize(
    ("precision", "recompute", "chunked"), [("bf16", 0, True), ("bf16-master", 3, False), ("fp32", ALL, True)]
)
def test_the_estimate_is_the_real_step(model, base, precision, recompute, chunked):
    """Within 1 % of the peak and 2 % of the phases, as for a dense base."""
    plan = plan_on(base, model, precision=precision, recompute=recompute, chunked=chunked)
    test_memory_prediction.check(plan)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize(
    ("precision", "recompute", "accumulation"),
    [("bf16", 3, 1), pytest.param("fp16", ALL, 2, marks=pytest.mark.slow)],
)
def test_the_rehearsal_is_the_real_step(model, base, precision, recompute, accumulation):
    """Within 1 % of the peak and of every phase."""
    plan = plan_on(
        base, model, precision=precision, recompute=recompute, chunked=True, accumulation=accumulation
    )
    test_rehearsal_real_step.check(plan)


STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("base", [Nf4(), pytest.param(Hqq(bits=4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("family", "precision", "recompute", "adapted"),
    [
        pytest.param("qwen3_moe", "bf16", 2, (), marks=pytest.mark.slow),
        pytest.param("mixtral", "fp32", 0, (), marks=pytest.mark.slow),
        ("qwen3_moe", "bf16", 2, STACKS),
        pytest.param("mixtral", "bf16", 2, (), marks=pytest.mark.slow),
        pytest.param("mixtral", "fp32", 4, STACKS, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "fp32", 0, STACKS[1:], marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_packed_experts_are_predicted_and_rehearsed(family, base, precision, recompute, adapted):
    """One stack whole at a time, forward and backward; 3 % of the peak, as for other architectures."""
    config, spec = tiny(family)
    plan = bench.plan_of(spec, tuning="lora", precision=precision, recompute=recompute, chunked=True)
    targets = (*plan.tuning.targets, *adapted)
    plan = replace(plan, tuning=replace(plan.tuning, base=base, targets=targets))
    rows = bench.random_rows(ROWS, vocab_size=spec.vocab_size)
    predicted = max(bench.predicted_peaks(plan, rows).values())
    assert predicted == pytest.approx(measured_peak(config, plan, rows), rel=0.03)
    trace = record_step(plan, config, rows=ROWS, labels=rows.supervised_tokens)
    rehearsed = tensor_peak(trace)
    assert predicted == pytest.approx(rehearsed, rel=0.03)


@pytest.mark.parametrize("base", [Nf4(), Hqq(bits=4)], ids=str)
def test_a_packed_weight_is_whole_when_its_block_runs_again(base):
    """Within a twentieth of a hidden state in every phase: the base's product was counted beside an adapter's gradient
    that is gone by then (+ 0.8), and HQQ's halves of a byte nowhere (− 1.0)."""
    config, spec = tiny(
        "llama", hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, intermediate_size=5632,
        num_hidden_layers=3,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), seq_len=1024, rows=1, precision="bf16", chunk=256, tuning="lora", recompute=3,
        attention="flash",
    )  # fmt: skip
    off = hidden_states_off(replace(plan, tuning=replace(plan.tuning, base=base)), config)
    assert max(map(abs, off.values())) < 0.05, off


@pytest.mark.parametrize("base", [Nf4(), Hqq(bits=4)], ids=str)
@pytest.mark.parametrize("recompute", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_packed_stack_is_made_whole_beside_what_it_is_made_of(base, recompute):
    """HQQ makes a stack's matrices one at a time, each with its halves of bytes: more than what the product gives
    (− 6.2). And in forward the block's input waits while the first stack is whole (− 1.0)."""
    config, spec = tiny(
        "mixtral", hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, intermediate_size=2816,
        num_hidden_layers=3, num_local_experts=8,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), seq_len=1024, rows=1, precision="bf16", chunk=256, tuning="lora",
        recompute=recompute, attention="flash",
    )  # fmt: skip
    off = hidden_states_off(replace(plan, tuning=replace(plan.tuning, base=base)), config)
    assert max(map(abs, off.values())) < 0.05, off


@pytest.mark.parametrize(("family", "targets"), [("llama", ("q_proj", "v_proj")), ("phi3", ("qkv_proj",))])
def test_a_gradient_waits_while_a_block_runs_again_for_the_gate(family, targets):
    """A packed product without an adapter keeps nothing, so that Liger's gate is the first that needs the block. The
    gradient of its product waits beside all: 1.8 hidden states too low."""
    config, spec = tiny(
        family, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2816,
        num_hidden_layers=3, vocab_size=600,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), tuning="lora", precision="bf16", kernels="liger", seq_len=512, rows=2, chunk=64,
        attention="flash", recompute=3, targets=targets,
    )  # fmt: skip
    off = hidden_states_off(replace(plan, tuning=replace(plan.tuning, base=Nf4())), config)
    assert abs(off[Phase.BACKWARD]) < 0.05, off
