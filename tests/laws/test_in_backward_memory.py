"""AdamW in backward: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.estimate.parameters import gradients_bytes
from fitune.estimate.predict import predict_memory
from fitune.values.plan import AdamW, AdamW8bit, ClipByNorm, Full, InBackward
from fitune.values.predictions import Phase
from laws.test_memory_prediction import bench
from laws.test_rehearsal_depth import check_repeated
from laws.test_rehearsal_estimate import TOLERANCE, check
from laws.test_rehearsal_real_step import check_all
from optional_libraries import NEEDS_BITSANDBYTES
from plans import CPU, gpu, known, plan_for
from rehearse.tiny_configs import FAMILIES, tiny

NEVER, BY_NORM = (Full(update=InBackward(clip=ClipByNorm(max_norm=norm))) for norm in (0, 1.0))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("optimizer", "tuning", "precision", "recompute", "chunked"),
    [
        (AdamW(), NEVER, "fp32", 0, True),
        (AdamW(), BY_NORM, "bf16", 3, False),
        (AdamW(), NEVER, "bf16-master", bench.LAYERS, True),
        (AdamW(), BY_NORM, "fp16", 3, True),
        pytest.param(AdamW8bit(), NEVER, "bf16", 3, True, marks=NEEDS_BITSANDBYTES),
        pytest.param(AdamW8bit(), BY_NORM, "fp32", 0, True, marks=[NEEDS_BITSANDBYTES, pytest.mark.slow]),
        pytest.param(
            AdamW8bit(), NEVER, "bf16-master", 0, False, marks=[NEEDS_BITSANDBYTES, pytest.mark.slow]
        ),
    ],
)
def test_estimate_rehearsal_and_real_step_agree(model, optimizer, tuning, precision, recompute, chunked):
    plan = bench.plan_of(model, tuning="full", precision=precision, recompute=recompute, chunked=chunked)
    plan = replace(plan, tuning=tuning, optimizer=optimizer)
    check_all(plan)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tuning", "precision", "recompute", "hardware"),
    [
        (NEVER, "bf16-master", 2, gpu("h100")),
        pytest.param(BY_NORM, "fp32", 4, CPU, marks=pytest.mark.slow),
        pytest.param(BY_NORM, "fp16", 0, gpu("v100-32gb"), marks=pytest.mark.slow),
    ],
)
def test_estimate_and_rehearsal_agree(family, tuning, precision, recompute, hardware):
    config, spec = tiny(family, num_hidden_layers=4)
    plan = plan_for(
        spec, precision=precision, recompute=recompute, hardware=hardware, seq_len=128, rows=2, chunk=64
    )
    plan = replace(plan, tuning=tuning)
    check(plan, config, TOLERANCE)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recompute", [6, 0])
@pytest.mark.parametrize("tuning", [NEVER, BY_NORM], ids=["never clipped", "by norm"])
def test_repeated_blocks_are_the_traced_ones(tuning, recompute):
    """Their states, too, which are there before the step begins."""
    config, spec = tiny("llama", num_hidden_layers=6)
    plan = plan_for(spec, precision="bf16-master", recompute=recompute, rows=2, chunk=100)
    plan = replace(plan, tuning=tuning)
    check_repeated(plan, config)


def test_what_is_left_of_an_8b_model_is_the_loss():
    """Gradients are 15.0 GiB of its backward, then 1.0; the loss, which holds the head's alone, is the peak."""
    after = plan_for(
        known("llama-3.1-8b"), hardware=gpu("h100"), precision="bf16", rows=1, seq_len=2048, recompute=32,
        chunk=1024, optimizer=AdamW8bit(),
    )  # fmt: skip
    before, now = (predict_memory(replace(after, tuning=tuning)) for tuning in (Full(), NEVER))
    assert before.phases[Phase.BACKWARD]["gradients"] == gradients_bytes(after)
    assert now.phases[Phase.BACKWARD].get("gradients", 0) <= 2 * 128_256 * 4096
    assert now.phases[Phase.LOSS] == before.phases[Phase.LOSS]
    assert (before.peak_phase, now.peak_phase) == (Phase.BACKWARD, Phase.LOSS)
