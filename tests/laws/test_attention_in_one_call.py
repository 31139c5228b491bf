"""FlashAttention over a whole stream: the estimate is what the rehearsal traces, and less than row by row."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import peaks_by_kind
from plans import gpu, plan_for
from rehearse.tiny_configs import tiny


def rehearsed_peak(plan, config):
    trace, _ = trace_plan(plan, config, exact=True)
    return max(sum(kinds.values()) for kinds in peaks_by_kind(trace, on_cuda=False).values())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("family", "different"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 64}),
        ("gemma3_text", {"sliding_window": 64}),
        ("phi3", {}),
    ],
)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_estimate_and_rehearsal_agree(family, different, tuning):
    """Several rows, of which none is copied to join them, and windows, for which no mask is made."""
    config, spec = tiny(family, **different)
    plan = plan_for(
        spec,
        hardware=gpu("h100"),
        tuning=tuning,
        precision="bf16",
        attention="flash",
        seq_len=128,
        rows=2,
        chunk=64,
    )
    found = rehearsed_peak(plan, config)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(found, rel=0.02)
    by_rows = replace(plan, attention="sdpa")
    assert found < rehearsed_peak(by_rows, config)
