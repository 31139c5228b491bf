"""What leaves the device: predicted, rehearsed and measured on the CPU, every tensor that the host does not own."""

from dataclasses import replace

import pytest

from estimate.tiny_plans import CPU, gpu, plan_for
from fitune.estimate.memory import predict_memory
from fitune.spec.plan import Offload
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import ROWS, bench
from laws.test_rehearsal_estimate import TOLERANCE, rehearsed_peak
from rehearse.tiny_configs import tiny

ALL = bench.LAYERS
ACTIVATIONS = Offload(activations="cpu")


@pytest.fixture(scope="module")
def model():
    return bench.small_model()


def plan_of(model, offload, *, tuning, precision, recompute, accumulation=1):
    plan = bench.plan_of(
        model, tuning=tuning, precision=precision, recompute=recompute, chunked=True, accumulation=accumulation
    )  # fmt: skip
    return replace(plan, offload=offload)


def measured_peak(plan) -> int:
    return max(bench.measured_peaks(plan, bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)).values())


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize(
    ("precision", "recompute", "accumulation"), [("fp32", 0, 1), ("bf16", ALL // 2, 2), ("bf16", ALL, 1)]
)
def test_activations_on_the_host_are_the_real_step(model, tuning, precision, recompute, accumulation):
    """Within 1 % of the peak and 2 % of the phases, as for a plan that keeps them."""
    plan = plan_of(
        model, ACTIVATIONS, tuning=tuning, precision=precision, recompute=recompute, accumulation=accumulation
    )  # fmt: skip
    test_memory_prediction.check(plan)


@pytest.mark.parametrize(("tuning", "recompute"), [("full", 0), ("lora", ALL // 2), ("lora", ALL)])
def test_their_rehearsal_is_the_real_step(model, tuning, recompute):
    """Within 1 % of the peak and of every phase."""
    test_rehearsal_real_step.check(
        plan_of(model, ACTIVATIONS, tuning=tuning, precision="bf16", recompute=recompute)
    )


@pytest.mark.parametrize("recompute", [0, ALL // 2])
def test_activations_on_the_host_are_gone_from_the_device(model, recompute):
    """Six blocks keep what they keep; on the device are those of two."""
    kept = plan_of(model, Offload(), tuning="lora", precision="fp32", recompute=recompute)
    gone = replace(kept, offload=ACTIVATIONS)
    block = (
        112 * 4 * (2 * 129 + 2 * 128 + 3 * 352)
    )  # t · e · (norms, attention's ends, gate, its activation, up)
    assert measured_peak(kept) - measured_peak(gone) > (ALL - recompute - 2) * block


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("hardware", [CPU, gpu("h100")], ids=["cpu", "h100"])
def test_estimate_and_rehearsal_agree(family, hardware):
    config, spec = tiny(family)
    plan = plan_for(
        spec, hardware=hardware, tuning="lora", precision="bf16", recompute=1, seq_len=128, rows=2, chunk=64,
        offload=ACTIVATIONS,
    )  # fmt: skip
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(
        rehearsed_peak(plan, config), rel=TOLERANCE
    )
