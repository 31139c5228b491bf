"""Mamba, Mamba 2, delta rules, hybrids of them with attention: rows in chunks, loops over tokens, what kernels read."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.estimate.predict import predict_memory
from fitune.models.language_model import language_model
from fitune.models.low_bit.packing import places_in
from fitune.models.readers import model_config, with_layers
from fitune.rehearse.block_accounts import work_of
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.model import tracing
from fitune.values.model.block_profile import BatchShape, Extent, Size
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Batch, Nf4, PlainLoss, Precision
from fitune.values.predictions import Phase
from laws.test_rehearsal_estimate import check
from models.streams import assert_same_step, loss_and_gradients, make_rows, reference, stream_of
from plans import plan_for
from rehearse.tiny_configs import tensor_peak

CHUNK = 24
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 200, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GRANITE = {
    **COMMON, "layer_types": ["attention", "mamba", "mamba"], "shared_intermediate_size": 48, "num_local_experts": 0,
    "num_experts_per_tok": 0, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": CHUNK,
    "mamba_n_groups": 1,
}  # fmt: skip
MAMBA = {**COMMON, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}
MAMBA_2 = {
    **COMMON, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
    "chunk_size": CHUNK,
}  # fmt: skip
DELTA = {
    **COMMON, "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MODELS = {"granitemoehybrid": GRANITE, "mamba": MAMBA, "mamba2": MAMBA_2, "qwen3_5_text": DELTA}
CHUNKS = {"mamba": 1, "qwen3_5_text": 64}


@pytest.fixture
def folder(tmp_path, traces):
    return tmp_path / "model"


def spec_of(folder, model_type):
    AutoConfig.for_model(model_type, **MODELS[model_type]).save_pretrained(folder)
    return load_model_spec(str(folder))


def one_row(spec, *, tokens, **choice):
    batch = Batch(micro_batch_size=1, accumulation=1, seq_len=tokens, packing=False)
    return replace(plan_for(spec, **choice), model_path=spec.name, batch=batch)


@pytest.mark.parametrize(
    "model_type",
    ["granitemoehybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba2", *CHUNKS))],
)
def test_the_estimate_is_the_rehearsed_step(folder, model_type):
    """At rows that are no whole number of chunks, and longer than those that were traced."""
    spec = spec_of(folder, model_type)
    assert not spec.separates_rows
    assert spec.chunk == CHUNKS.get(model_type, CHUNK)
    assert spec.fp32_stream == model_type.startswith("mamba")
    chunk = max(CHUNK, spec.chunk)
    cases = [(3 * chunk + 5, 0, Precision.FP32), (9 * chunk - 1, 2, Precision.FP32)]
    if spec.fp32_stream:
        cases += [(tokens, recompute, Precision.BF16_MASTER) for tokens, recompute, _ in cases]
    for tokens, recompute, precision in cases:
        plan = one_row(spec, tokens=tokens, tuning="lora", recompute=recompute)
        plan = replace(plan, precision=precision)
        trace, _ = trace_plan(plan, model_config(spec.name), exact=True)
        rehearsed = peaks_by_kind(trace, on_cuda=False)
        predicted = predict_memory(plan)
        assert predicted.tensor_peak_bytes == pytest.approx(
            tensor_peak(trace),
            rel=0.005 if precision is Precision.FP32 else 0.01,
        )
        forward = sum(predicted.phases[Phase.FORWARD].values())
        assert forward == pytest.approx(sum(rehearsed[Phase.FORWARD].values()), rel=0.03)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_config_of_fewer_blocks_has_their_kinds(model_type):
    few = with_layers(AutoConfig.for_model(model_type, **MODELS[model_type]), 2)
    assert few.num_hidden_layers == len(getattr(few, "layer_types", "ab")) == 2


@pytest.mark.parametrize(
    ("groups", "wanted", "expected"),
    [
        (1, (True, True, True), 2 * 2 * (2 * 10) * 8 * (6 * 3)),
        (2, (False, True, False), 2 * (2 * 10) * 8 * (3 * 3)),
        (2, (True, True, False), 2 * 2 * (2 * 10) * 8 * (3 * 3)),
    ],
)
def test_a_convolution_s_backward_takes_its_forward_for_each_gradient(groups, wanted, expected):
    """2 FLOPs for each output and what it reads: inputs of its group times the filter."""
    signal, weight = torch.randn(2, 6, 12), torch.randn(8, 6 // groups, 3)
    gradient = torch.randn(2, 8, 10)
    operation = torch.ops.aten.convolution_backward.default
    args = (gradient, signal, weight, [8], [1], [0], [1], False, [0], groups, list(wanted))
    assert work_of(operation, args, {}, operation(*args), event=0).flops == expected


def test_rows_of_one_chunk_are_another_way_of_training(folder):
    spec = spec_of(folder, "mamba2")
    firsts = [
        tracing.way_of(
            one_row(spec, tokens=tokens), BatchShape(tokens=tokens, supervised_tokens=tokens, rows=1)
        ).first
        for tokens in (CHUNK, CHUNK + 1)
    ]
    assert firsts[0] * tracing.LENGTHS[-1] <= CHUNK < firsts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("tuning", "recompute"), [("lora", 0), ("full", 2)])
def test_rows_of_one_chunk_are_traced_by_themselves(folder, tuning, recompute):
    """Copies that several chunks need are not made for them."""
    spec = spec_of(folder, "mamba2")
    plan = one_row(spec, tokens=CHUNK, tuning=tuning, recompute=recompute)
    check(plan, model_config(spec.name), 0.01)


ROWS = make_rows((2 * CHUNK + 5,))


def twins(model_type, **named):
    """Two models of the same random weights and one config, whose attention becomes that of the trained one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MODELS[model_type])
    plain, ours = (AutoModelForCausalLM.from_config(config, **named).train() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@pytest.mark.parametrize(
    ("model_type", "blocks"), [("granitemoehybrid", 3), ("mamba", 0), ("mamba2", 1), ("qwen3_5_text", 2)]
)
def test_a_row_is_trained_as_transformers_does(model_type, blocks):
    plain, ours = twins(model_type)
    expected = reference(plain, ROWS)
    assert_same_step(loss_and_gradients(ours, ROWS, blocks=blocks), expected)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_an_fp32_stream_under_bf16_weights_has_the_loss_of_transformers(model_type):
    plain, ours = twins(model_type, dtype=torch.bfloat16)
    (expected, wanted), (found, gradients) = reference(plain, ROWS), loss_and_gradients(ours, ROWS)
    assert language_model(ours, PlainLoss()).hidden_states(stream_of(ROWS)).dtype is torch.float32
    assert found == pytest.approx(expected, abs=2e-6)
    assert gradients.keys() == wanted.keys() == dict(ours.named_parameters()).keys()
    for name, gradient in wanted.items():
        gap = (gradients[name] - gradient).float().norm()
        assert gap <= 0.02 * gradient.float().norm(), name


@pytest.mark.parametrize(("model_type", "called"), [("mamba", {"in_proj"}), ("mamba2", {"in_proj"})])
def test_weights_that_kernels_read_are_neither_packed_nor_adapted(folder, model_type, called):
    spec = spec_of(folder, model_type)
    assert set(spec.adaptable_names) == called
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(spec.name))
    packed = {name.split(".")[-2] for name, _ in places_in(language_model(model, PlainLoss()).blocks, Nf4())}
    assert packed == called


def test_short_rows_stand_for_long_ones_where_a_mixer_loops_over_tokens(folder):
    plan = one_row(spec_of(folder, "mamba"), tokens=4096)
    assert tracing.way_of(plan, BatchShape(tokens=4096, supervised_tokens=4095, rows=1)).first == 16


def test_rows_that_are_trained_one_at_a_time_are_traced_so(folder):
    """Also for a draft of many rows, by which a processor's precision is chosen: two padded rows divided by zero."""
    plan = one_row(spec_of(folder, "mamba2"), tokens=4096)
    assert tracing.way_of(plan, BatchShape(tokens=8192, supervised_tokens=8190, rows=2)).rows == 1


def test_padding_counts_by_whole_chunks():
    size = Size(constant=10, per_token=2, per_square=1, per_padding=3, per_padding_square=0.5)
    assert size.at(Extent(tokens=4, square=16)) == 10 + 8 + 16
    assert size.at(Extent(tokens=4, square=16, padding=2, padding_square=20)) == 10 + 8 + 16 + 6 + 10
