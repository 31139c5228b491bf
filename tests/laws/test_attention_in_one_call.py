"""FlashAttention over a whole stream: the estimate is what the rehearsal traces, and less than row by row."""

from dataclasses import replace

import pytest

from fitune.values.predictions import Phase
from laws.test_rehearsal_estimate import check, hidden_states_off, rehearsed_peak
from plans import gpu, plan_for
from rehearse.tiny_configs import tiny


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
    found = check(plan, config)
    by_rows = replace(plan, attention="sdpa")
    assert found < rehearsed_peak(by_rows, config)


def test_the_fp32_gradient_of_queries_is_padded_in_every_row():
    """Six rows of 64 tokens, each with 128 tokens more: 7.5 hidden states where heads are wider than the stream."""
    config, spec = tiny(
        "gemma3_text", hidden_size=1024, num_attention_heads=16, head_dim=128, intermediate_size=2816
    )
    plan = plan_for(
        spec, hardware=gpu("h100"), tuning="full", precision="bf16", attention="flash", seq_len=128, rows=3,
        recompute=1, chunk=96,
    )  # fmt: skip
    assert abs(hidden_states_off(plan, config)[Phase.BACKWARD]) < 0.2
