"""Adapters on a packed base: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.rehearse.step import record_step
from fitune.spec.plan import Hqq, Nf4
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench
from laws.test_memory_prediction_families import ROWS, measured_peak
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
