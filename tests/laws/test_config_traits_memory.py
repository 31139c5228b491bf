"""What a config may switch in attention, MLP and dropout: estimate and rehearsed step agree within 1 %, rows of any
length, on a CPU and as on a GPU."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory, predict_step_time
from fitune.rehearse.step import record_step
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.model_spec import NO_DROPOUT
from laws.test_memory_prediction import bench, measured_peak
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import tensor_peak, tiny

TOLERANCE = 0.01
ROWS = (40, 200, 88)
WINDOW = {"use_sliding_window": True, "sliding_window": 64}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
GPT2 = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
PHI = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
ATTENTION = {"attention_dropout": 0.1}
CASES = [
    ("llama", {}),
    ("mistral", {"sliding_window": 64}),
    ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 64}),
    ("gemma2", {"sliding_window": 64}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma3_text", {"sliding_window": 64, "num_hidden_layers": 7}),
    ("qwen2", {**WINDOW, "max_window_layers": 2}),
    ("qwen2", {**WINDOW, "max_window_layers": 4}),
    ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", *["full_attention"] * 3]}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    ("falcon", {}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", NEW_FALCON),
    ("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1}),
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"hidden_act": "gelu_new"}),
    ("mistral", {"hidden_act": "gelu_python"}),
    ("phi3", {"hidden_act": "gelu_new"}),
    ("phi3", {"hidden_act": "relu"}),
    ("gemma2", {"hidden_activation": "laplace"}),
    ("mixtral", {"hidden_act": "relu"}),
    ("phi", {"hidden_act": "relu"}),
    ("phi", {"hidden_act": "gelu"}),
    ("gpt2", {"activation_function": "quick_gelu"}),
    ("falcon", {"activation": "relu2"}),
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
    {"tuning": "full", "precision": "bf16", "recompute": 0},
]


def shape_of(rows):
    return BatchShape.of_rows(rows, supervised_tokens=sum(rows) - len(rows))


def by_rows(spec, rows, *, hardware=CPU, **choice):
    plan = plan_for(spec, hardware=hardware, seq_len=max(rows), rows=len(rows), chunk=64, **choice)
    return replace(plan, batch=replace(plan.batch, packing=False))


def check(plan, config, rows=ROWS):
    predicted = predict_memory(plan, shape_of(rows)).tensor_peak_bytes
    trace = record_step(plan, config, rows=rows, labels=shape_of(rows).supervised_tokens)
    assert predicted == pytest.approx(tensor_peak(trace), rel=TOLERANCE)


def grid():
    """Every case with one choice on one device by turns; all of them where time is long."""
    for number, (family, different) in enumerate(CASES):
        for turn, choice in enumerate(CHOICES):
            if family == "falcon" and "attention" in choice:  # its blocks bring an attention of their own
                choice = {**choice, "attention": "sdpa", "recompute": 2}
            hardware = (CPU, gpu("h100"))[(number + turn) // 2 % 2]
            name = "-".join([family, *map(str, different), *map(str, choice.values()), hardware.gpu.name])
            marks = [] if turn == number % len(CHOICES) else [pytest.mark.slow]
            yield pytest.param(family, different, choice, hardware, id=name, marks=marks)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("family", "different", "choice", "hardware"), list(grid()))
def test_estimate_and_rehearsal_agree(family, different, choice, hardware):
    config, spec = tiny(family, **different)
    check(by_rows(spec, ROWS, hardware=hardware, **choice), config)


@pytest.mark.parametrize("rows", [(150, 200, 40), pytest.param((40, 150, 200), marks=pytest.mark.slow)])
def test_scores_of_rows_behind_the_longest_are_gone_when_it_goes_back(rows):
    config, spec = tiny("gemma2")
    check(
        by_rows(spec, rows, hardware=gpu("h100"), tuning="lora", precision="bf16", recompute=4), config, rows
    )


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", ("q_proj", "v_proj")),
        ("gemma3_text", ("q_proj", "v_proj")),
        ("phi", ("q_proj", "v_proj")),
        ("falcon", ("query_key_value",)),
    ],
)
def test_in_the_first_block_what_no_gradient_enters_keeps_nothing(family, targets):
    """The norm of keys, and the MLP of a parallel block, where only attention is adapted."""
    config, spec = tiny(family, **({} if family == "falcon" else {"num_key_value_heads": 4}))
    check(by_rows(spec, ROWS, tuning="lora", precision="bf16", recompute=0, targets=targets), config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "different", "tuning", "precision"),
    [
        ("gemma2", {"sliding_window": 16}, "full", "fp32"),
        ("gemma2", {"attn_logit_softcapping": None}, "full", "fp32"),
        ("qwen2", {**WINDOW, "sliding_window": 16, "max_window_layers": 2}, "full", "fp32"),
        ("phi", {"qk_layernorm": True, **PHI}, "full", "fp32"),
        ("falcon", {"hidden_dropout": 0.1}, "full", "fp32"),
        ("llama", {"hidden_act": "gelu_new", **ATTENTION}, "full", "fp32"),
        ("llama", {"hidden_act": "relu", **ATTENTION}, "lora", "bf16"),
        ("phi3", {"hidden_act": "quick_gelu"}, "full", "fp32"),
        ("gpt2", GPT2, "full", "fp32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_estimate_and_a_real_step_agree(family, different, tuning, precision):
    """Every live tensor of a step on the CPU counted."""
    config, spec = tiny(family, **different)
    plan = by_rows(spec, ROWS, tuning=tuning, precision=precision, recompute=2)
    rows = bench.random_rows(ROWS, vocab_size=spec.vocab_size)
    predicted = predict_memory(plan, shape_of(ROWS)).tensor_peak_bytes
    assert predicted == pytest.approx(measured_peak(config, plan, rows), rel=TOLERANCE)


def test_by_hand_what_residual_dropout_keeps():
    """On a GPU a byte for each element that attention and MLP add; time grows, and no scores are kept."""
    _, spec = tiny("phi", **PHI, **ATTENTION)
    plan = plan_for(spec, hardware=gpu("rtx-4090"), tuning="lora", precision="bf16")
    without = replace(plan, model=replace(spec, dropout=NO_DROPOUT))
    kept = [predict_memory(each).phases["loss"]["activations"] for each in (plan, without)]
    assert kept[0] - kept[1] == plan.batch.micro_batch_tokens * spec.num_layers * 2 * spec.hidden_size
    assert predict_step_time(plan).step_seconds > predict_step_time(without).step_seconds
