"""Dropout of the model's own config: estimate, rehearsal and real step within 1 %, on a CPU and as on a GPU."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory, predict_step_time
from fitune.rehearse.step import trace_plan
from fitune.values.model.model_spec import NO_DROPOUT
from laws.test_config_traits_memory import ROWS, TOLERANCE, by_rows, check, check_real
from laws.test_rehearsal_estimate import check as check_packed
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import tiny

GPT2 = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
PHI = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
ATTENTION = {"attention_dropout": 0.1}
CASES = [
    ("llama", ATTENTION),
    ("gpt2", GPT2),
    ("gpt2", {"embd_pdrop": 0.1}),
    ("phi", {**PHI, **ATTENTION}),
    ("phi3", {"resid_pdrop": 0.1, **ATTENTION}),
    ("falcon", {"hidden_dropout": 0.1}),
    ("falcon", {"parallel_attn": False, "hidden_dropout": 0.1, **ATTENTION}),
    ("gemma2", ATTENTION),
    ("mistral", {"sliding_window": 64, **ATTENTION}),
    ("qwen3_moe", ATTENTION),
]
CHOICES = [
    {"tuning": "full", "precision": "fp32", "recompute": 0},
    {"tuning": "lora", "precision": "bf16", "recompute": 2},
    {"tuning": "lora", "precision": "bf16-master", "recompute": 4},
    {"tuning": "full", "precision": "bf16", "recompute": 0, "attention": "eager"},
]


def grid():
    """Every case with one choice on each device by turns; all of them where time is long."""
    for number, (family, different) in enumerate(CASES):
        for turn, choice in enumerate(CHOICES):
            for hardware in (CPU, gpu("h100")):
                name = "-".join([family, *map(str, different), *map(str, choice.values()), hardware.gpu.name])
                now = (number + (hardware is CPU)) % len(CHOICES)
                marks = [] if turn == now else [pytest.mark.slow]
                yield pytest.param(family, different, choice, hardware, id=name, marks=marks)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("family", "different", "choice", "hardware"), list(grid()))
def test_estimate_and_rehearsal_agree(family, different, choice, hardware):
    config, spec = tiny(family, **different)
    check(by_rows(spec, ROWS, hardware=hardware, **choice), config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "different", "precision", "tuning"),
    [
        ("llama", ATTENTION, "fp32", "full"),
        ("llama", ATTENTION, "bf16", "lora"),
        ("gpt2", GPT2, "fp32", "full"),
        ("phi", PHI, "fp32", "full"),
        ("falcon", {"hidden_dropout": 0.1}, "fp32", "full"),
    ],
)
def test_estimate_and_a_real_step_agree(family, different, precision, tuning):
    config, spec = tiny(family, **different)
    plan = by_rows(spec, ROWS, tuning=tuning, precision=precision, recompute=2)
    check_real(plan, config)


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_full_packs_on_either_device(attention):
    """A CPU writes scores out, so one long row takes the most; a GPU's kernels keep nothing for dropout."""
    config, spec = tiny("llama", **ATTENTION)
    hardware = CPU if attention == "sdpa" else gpu("h100")
    plan = plan_for(
        spec, hardware=hardware, tuning="lora", precision="bf16", seq_len=128, rows=2, attention=attention
    )
    check_packed(plan, config, TOLERANCE)


def test_a_recomputed_block_drops_the_same_again():
    """A rehearsed step of few blocks stands for many with dropout, too."""
    config, spec = tiny("gpt2", **GPT2, n_layer=14)
    plan = plan_for(spec, hardware=gpu("h100"), precision="bf16", recompute=14, seq_len=64, rows=2)
    trace, layers = trace_plan(plan, config, exact=False)
    assert layers < 14
    assert trace.events


def test_by_hand_what_residual_dropout_keeps():
    """On a GPU a byte for each element that attention and MLP add; time grows, and no scores are kept."""
    _, spec = tiny("phi", **PHI, **ATTENTION)
    plan = plan_for(spec, hardware=gpu("rtx-4090"), tuning="lora", precision="bf16")
    without = replace(plan, model=replace(spec, dropout=NO_DROPOUT))
    kept = [predict_memory(each).phases["loss"]["activations"] for each in (plan, without)]
    assert kept[0] - kept[1] == plan.batch.micro_batch_tokens * spec.num_layers * 2 * spec.hidden_size
    assert predict_step_time(plan).step_seconds > predict_step_time(without).step_seconds
