"""What Liger's kernels keep: the estimate is what the rehearsal traces with stand-ins, and less than without them."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import largest_batch
from fitune.estimate.step import describe_step
from laws.test_rehearsal_estimate import check, rehearsed_peak
from plans import gpu, known, plan_for
from rehearse.tiny_configs import FAMILIES, tiny

CHOICES = [
    {"tuning": "full", "precision": "bf16-master", "recompute": 0},
    {"tuning": "lora", "precision": "bf16", "recompute": 2, "chunk": 64},
    {"tuning": "full", "precision": "fp32", "recompute": 4, "chunk": 64},
    {"tuning": "lora", "precision": "fp32", "recompute": 4, "chunk": 64},
]
AS_LLAMA = {"mistral", "qwen2"}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in AS_LLAMA and tiny(f)[1].has_liger_kernels]
)
def test_estimate_and_rehearsal_agree(family, choice):
    config, spec = tiny(family)
    plan = plan_for(
        spec, hardware=gpu("h100"), seq_len=128, rows=2, kernels="liger", attention="flash", **choice
    )
    found = check(plan, config)
    if choice["recompute"] == 0:
        assert found < rehearsed_peak(replace(plan, kernels="torch"), config)


def test_a_block_of_llama_keeps_by_hand():
    """Llama-3.1-8B, one token, full in bf16, nothing recomputed: two norms with their outputs (2 · (2·4096 + 4) and
    2 · 2·4096), queries, keys and values (2 · 6144), attention's output and log-sum-exp (2·4096 + 4·32), gate, up and
    their product (3 · 2·14336)."""
    model = known("llama-3.1-8b")
    plan = plan_for(
        model,
        hardware=gpu("h100"),
        precision="bf16",
        kernels="liger",
        attention="flash",
        rows=1,
        seq_len=4096,
    )
    by_hand = 2 * (2 * 4096 + 4) + 2 * 2 * 4096 + 2 * 6144 + 2 * 4096 + 4 * 32 + 3 * 2 * 14336
    step = describe_step(plan, largest_batch(plan))
    assert step.blocks[1].kept == 4096 * by_hand
    assert describe_step(replace(plan, kernels="torch"), largest_batch(plan)).blocks[1].kept > 4096 * by_hand
