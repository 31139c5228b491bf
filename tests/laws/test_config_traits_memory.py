"""What a config may switch in attention and MLP: estimate and rehearsed step agree within 1 %, rows of any length."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory
from fitune.rehearse.step import record_step
from fitune.values.model.block_profile import BatchShape
from laws.test_memory_prediction import bench
from laws.test_memory_prediction_families import measured_peak
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import tensor_peak, tiny

TOLERANCE = 0.01
ROWS = (40, 200, 88)
WINDOW = {"use_sliding_window": True, "sliding_window": 64}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
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
]
ACTIVATIONS = [
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
]
CHOICES = [
    {"tuning": "full", "precision": "fp32", "recompute": 0},
    {"tuning": "lora", "precision": "bf16", "recompute": 2},
    {"tuning": "lora", "precision": "bf16-master", "recompute": 4},
    {"tuning": "full", "precision": "bf16", "recompute": 0},
]


def shape_of(rows):
    return BatchShape.of_rows(rows, supervised_tokens=sum(rows) - len(rows))


def by_rows(spec, rows, *, hardware=CPU, **choice):
    plan = plan_for(spec, hardware=hardware, seq_len=max(rows), rows=len(rows), chunk=64, **choice)
    return replace(plan, batch=replace(plan.batch, packing=False))


def rehearsed_peak(plan, config, rows):
    trace = record_step(plan, config, rows=rows, labels=shape_of(rows).supervised_tokens)
    return tensor_peak(trace)


def check(plan, config, rows=ROWS):
    predicted = predict_memory(plan, shape_of(rows)).tensor_peak_bytes
    assert predicted == pytest.approx(rehearsed_peak(plan, config, rows), rel=TOLERANCE)


def check_real(plan, config):
    """Every live tensor of a step on the CPU counted."""
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    predicted = predict_memory(plan, shape_of(ROWS)).tensor_peak_bytes
    assert predicted == pytest.approx(measured_peak(config, plan, rows), rel=TOLERANCE)


def grid():
    """Every case with one choice on one device by turns; all of them where time is long."""
    for number, (family, different) in enumerate(CASES + ACTIVATIONS):
        for turn, choice in enumerate(CHOICES):
            hardware = (CPU, gpu("h100"))[(number + turn) // 2 % 2]
            name = "-".join([family, *map(str, different), *map(str, choice.values()), hardware.gpu.name])
            marks = [] if turn == number % len(CHOICES) else [pytest.mark.slow]
            yield pytest.param(family, different, choice, hardware, id=name, marks=marks)


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("family", "different", "choice", "hardware"), list(grid()))
def test_estimate_and_rehearsal_agree(family, different, choice, hardware):
    config, spec = tiny(family, **different)
    check(by_rows(spec, ROWS, hardware=hardware, **choice), config)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rows", [(150, 200, 40), (200, 150, 40), (40, 150, 200)])
def test_scores_of_rows_behind_the_longest_are_gone_when_it_goes_back(rows):
    config, spec = tiny("gemma2")
    check(
        by_rows(spec, rows, hardware=gpu("h100"), tuning="lora", precision="bf16", recompute=4), config, rows
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_the_norm_of_keys_keeps_nothing_in_the_first_block_when_only_queries_and_values_are_adapted(family):
    config, spec = tiny(family, num_key_value_heads=4)
    check(
        by_rows(spec, ROWS, tuning="lora", precision="bf16", recompute=0, targets=("q_proj", "v_proj")),
        config,
    )


@pytest.mark.parametrize("family", ["phi", "falcon"])
def test_no_gradient_enters_the_mlp_of_the_first_parallel_block_when_only_attention_is_adapted(family):
    config, spec = tiny(family)
    targets = {"phi": ("q_proj", "v_proj"), "falcon": ("query_key_value",)}[family]
    check(by_rows(spec, ROWS, tuning="lora", precision="bf16", recompute=0, targets=targets), config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "different"),
    [("gemma2", {"sliding_window": 16}), ("qwen2", {**WINDOW, "sliding_window": 16, "max_window_layers": 2}),
     ("gemma2", {"attn_logit_softcapping": None}), ("phi", {"qk_layernorm": True}), ("falcon", {}),
     ("llama", {"hidden_act": "relu"}), ("llama", {"hidden_act": "gelu_new"}), ("phi3", {"hidden_act": "quick_gelu"})],
    ids=["gemma2", "qwen2 half windowed", "gemma2 uncapped", "phi q/k norm", "falcon multi-query",
         "llama relu", "llama gelu_new", "phi3 quick_gelu"],
)  # fmt: skip
def test_estimate_and_a_real_step_agree(family, different):
    config, spec = tiny(family, **different)
    plan = by_rows(spec, ROWS, tuning="full", precision="fp32", recompute=2)
    check_real(plan, config)
