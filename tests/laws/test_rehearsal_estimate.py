"""The arithmetic against the rehearsal: at most 2 % of the peak apart.

bench/estimate_vs_rehearsal.py does the same for real shapes.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fitune.estimate.predict import predict_memory
from fitune.rehearse.stand_ins import StandIns, cuda_functions
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.plan import Hqq, Nf4
from fitune.values.predictions import Phase
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import FAMILIES, tensor_peak, tiny

TOLERANCE = 0.02
CHOICES = [
    {"tuning": "full", "precision": "fp32", "recompute": 2, "chunk": 64},
    {"tuning": "full", "precision": "bf16-master", "recompute": 0},
    {"tuning": "full", "precision": "bf16", "recompute": 4, "accumulation": 2},
    {"tuning": "lora", "precision": "bf16", "recompute": 0, "chunk": 64},
    {"tuning": "lora", "precision": "bf16-master", "recompute": 4, "accumulation": 2},
]


def rehearsed_peak(plan, config):
    trace, _ = trace_plan(plan, config, exact=True)
    return tensor_peak(trace)


def check(plan, config, tolerance=TOLERANCE):
    """The estimate's peak is the rehearsed one, which is returned."""
    rehearsed = rehearsed_peak(plan, config)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(rehearsed, rel=tolerance)
    return rehearsed


def hidden_states_off(plan, config):
    """By how many hidden states of a micro-batch the estimate of each phase is more than what was rehearsed."""
    rehearsed = peaks_by_kind(trace_plan(plan, config, exact=True)[0], on_cuda=False)
    hidden_bytes = plan.batch.micro_batch_tokens * plan.model.hidden_size * plan.precision.compute_bytes
    return {
        phase: (sum(terms.values()) - sum(rehearsed[phase].values())) / hidden_bytes
        for phase, terms in predict_memory(plan).phases.items()
    }


QUANTISED = [
    {"base": Nf4(), "precision": "bf16", "recompute": 0, "chunk": 64},
    {"base": Hqq(bits=4), "precision": "bf16-master", "recompute": 4, "accumulation": 2},
]


def some(choices, *, of):
    """Every family with every choice; those whose turn it is where time is short."""
    for row, family in enumerate(FAMILIES):
        for column, choice in enumerate(choices):
            place = row + column
            hardware = gpu("h100") if place % (2 * of) in (0, 5, 6) else CPU
            words = (family, "cpu" if hardware is CPU else "h100", *map(str, choice.values()))
            marks = [] if place % of == 0 else [pytest.mark.slow]
            yield pytest.param(family, choice, hardware, id="-".join(words), marks=marks)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("family", "choice", "hardware"), list(some(CHOICES, of=4)))
def test_estimate_and_rehearsal_agree(family, choice, hardware):
    config, spec = tiny(family)
    plan = plan_for(spec, hardware=hardware, seq_len=128, rows=2, **choice)
    check(plan, config)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("family", "choice", "hardware"), list(some(QUANTISED, of=3)))
def test_on_a_quantised_base(family, choice, hardware):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("hqq.core.quantize")
    config, spec = tiny(family)
    choice = dict(choice)
    base = choice.pop("base")
    plan = plan_for(spec, hardware=hardware, tuning="lora", seq_len=128, rows=2, **choice)
    plan = replace(plan, tuning=replace(plan.tuning, base=base))
    check(plan, config)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("hardware", "precision", "recompute"),
    [
        (CPU, "bf16", 2), (CPU, "bf16", 0), (gpu("h100"), "bf16", 2), (gpu("h100"), "bf16", 0), (gpu("t4"), "fp32", 0),
        (gpu("t4"), "fp32", 2), (gpu("t4"), "fp16", 2), (gpu("t4"), "fp16", 0),
    ],
)  # fmt: skip
def test_scores_that_are_written_out_take_what_the_device_makes_of_them(hardware, precision, recompute):
    """Rows so long that little else counts. For each score, backward: CUDA's softmax multiplies first, + 4 bytes;
    fp16 is not cast before it there, so that is all that waits."""
    config, spec = tiny("gemma2", num_hidden_layers=2)
    plan = plan_for(
        spec, hardware=hardware, precision=precision, tuning="lora", seq_len=1024, rows=1, recompute=recompute
    )
    trace, _ = trace_plan(plan, config, exact=True)
    rehearsed = peaks_by_kind(trace, on_cuda=False)
    predicted = predict_memory(plan).phases
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert sum(predicted[phase].values()) == pytest.approx(sum(rehearsed[phase].values()), rel=0.01), (
            phase
        )


def test_what_stands_for_cudas_functions_is_called_as_torchs():
    row = torch.ones(1, 1, 2, 4)
    with cuda_functions():
        assert F.softmax(torch.zeros(2, 4), -1).sum() == 2
        assert torch.equal(F.scaled_dot_product_attention(row, row, row, None, 0.9), row)


@pytest.mark.parametrize(
    ("hardware", "tokens", "sums"),
    [
        (CPU, 4096, 0),
        (gpu("h100"), 3072, 0),
        (gpu("h100"), 4096, 409 + 4096),
        (gpu("h100"), 9000, 900 + 8000),
    ],
)
def test_a_tables_gradient_is_added_up_in_rows_of_fp32(hardware, tokens, sums):
    """A sum for ten tokens and one for every row that may be met, of 8,000."""
    gradient = torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta")
    places = torch.empty(tokens, dtype=torch.int64, device="meta")
    found = StandIns(gpu=hardware.gpu, supervised_tokens=1).workspace_bytes(
        torch.ops.aten.embedding_dense_backward.default, (gradient, places, 8000, -1, False)
    )
    indices = 3 * tokens + 2 * min(tokens, 8000) + sums
    assert found == (4 * 64 * sums + 8 * indices if sums else 0)


@pytest.mark.parametrize(("hardware", "precision"), [(CPU, "fp32"), (gpu("h100"), "bf16")])
def test_a_window_that_cuts_takes_a_mask_and_no_scores(hardware, precision):
    """On a GPU its key heads are repeated too: the kernel that takes masks takes no groups."""
    config, spec = tiny("mistral", sliding_window=64)
    plan = plan_for(spec, tuning="lora", hardware=hardware, precision=precision, seq_len=256, rows=1)
    check(plan, config)


def test_rows_turned_by_their_own_length_take_no_more():
    """A pack is rehearsed as two rows, here on both sides of longrope's boundary."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    config, spec = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    plan = plan_for(spec, tuning="full", precision="bf16", seq_len=129, rows=2)
    check(plan, config)


def test_dropout_keeps_masks_of_one_byte_on_cuda():
    config, spec = tiny("llama")
    peaks = {}
    for hardware in (CPU, gpu("h100")):
        plan = plan_for(
            spec,
            tuning="lora",
            dropout=0.1,
            hardware=hardware,
            precision="bf16",
            seq_len=128,
            rows=2,
            chunk=32,
        )
        peaks[hardware.gpu.is_cpu] = check(plan, config)
    assert peaks[True] > peaks[False]


def test_the_gradient_of_a_norm_behind_the_mlp_is_a_tensor_of_its_own():
    """Gemma-3-1b at a quarter of its widths and tokens: the worst moment is at the MLP's output, beside the gradient
    that is added to an earlier one."""
    widths = {
        "hidden_size": 288,
        "intermediate_size": 1728,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    config, spec = tiny("gemma3_text", head_dim=64, **widths)
    plan = plan_for(spec, precision="bf16", recompute=4, accumulation=2, seq_len=256, rows=1, chunk=64)
    assert abs(hidden_states_off(plan, config)[Phase.BACKWARD]) < 0.1


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_what_a_norms_weight_multiplied_is_gone_when_its_input_has_a_gradient(family):
    """In fp32 where the weight comes before the cast (Gemma): two hidden states of 16 bit, at the final norm, which is
    the worst moment while half of the blocks keep theirs."""
    config, spec = tiny(family)
    plan = plan_for(
        spec,
        hardware=gpu("h100"),
        attention="flash",
        precision="bf16",
        recompute=2,
        seq_len=128,
        rows=2,
        chunk=64,
    )
    assert abs(hidden_states_off(plan, config)[Phase.BACKWARD]) < 0.1


STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        ("qwen3_moe", {"precision": "bf16", "recompute": 2, "kernels": "liger"}),
        ("qwen3_moe", {"precision": "bf16", "recompute": 4, "accumulation": 2}),
        ("qwen3_moe", {"tuning": "lora", "precision": "bf16", "recompute": 3, "kernels": "liger"}),
        ("qwen3_moe", {"tuning": "lora", "targets": STACKS, "precision": "bf16"}),
        ("mixtral", {"precision": "bf16"}),
        ("mixtral", {"tuning": "lora", "targets": STACKS[1:], "precision": "bf16", "recompute": 4}),
        ("mixtral", {"tuning": "lora", "precision": "fp32", "recompute": 3}),
    ],
)
def test_every_moment_of_a_mixture(family, choice):
    """Three of eight experts for each token of Qwen3's: forward, loss and backward are each a third of a hidden state
    apart at most, whatever the number of experts that a token goes to."""
    config, spec = tiny(family, **({"num_experts_per_tok": 3} if family == "qwen3_moe" else {}))
    plan = plan_for(spec, hardware=gpu("h100"), attention="flash", seq_len=128, rows=2, chunk=64, **choice)
    off = hidden_states_off(plan, config)
    assert {phase: hidden for phase, hidden in off.items() if abs(hidden) > 0.35} == {}


@pytest.mark.parametrize("tuning", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_queries_of_one_projection_are_read_where_they_are(tuning):
    """GPT-2 turns no positions: its queries are a view, which FlashAttention in one call takes as it is. A copy was one
    hidden state for every block."""
    config, spec = tiny("gpt2", hidden_size=512, num_attention_heads=8, num_hidden_layers=3)
    plan = plan_for(
        spec, hardware=gpu("h100"), attention="flash", precision="bf16", tuning=tuning, seq_len=512, rows=2,
        chunk=128,
    )  # fmt: skip
    off = hidden_states_off(plan, config)
    assert all(abs(off[phase]) < 0.05 for phase in (Phase.LOSS, Phase.BACKWARD)), off


@pytest.mark.parametrize(
    "hardware", [gpu("h100"), pytest.param(CPU, marks=pytest.mark.slow)], ids=["h100", "cpu"]
)
def test_the_output_of_one_row_is_not_copied_back(hardware):
    """Phi-3 lays its queries out heads first, and attention its output as the queries are: one copy for every block."""
    config, spec = tiny("phi3", hidden_size=512, num_attention_heads=8, num_hidden_layers=3)
    plan = plan_for(spec, hardware=hardware, precision="bf16", tuning="lora", seq_len=512, rows=1, chunk=128)
    plan = replace(plan, batch=replace(plan.batch, packing=False))
    off = hidden_states_off(plan, config)
    assert all(abs(off[phase]) < 0.05 for phase in (Phase.LOSS, Phase.BACKWARD)), off


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("recompute", [0, 3])
def test_the_output_of_written_attention_is_gone_when_its_scores_go_back(rows, recompute):
    """With several rows its gradient waits in its place. In forward a row's scores are let go before the next row's."""
    config, spec = tiny("llama", hidden_size=512, num_attention_heads=8, num_hidden_layers=3)
    plan = plan_for(
        spec, hardware=gpu("h100"), precision="bf16", tuning="lora", attention="eager", seq_len=256, rows=rows,
        chunk=64, recompute=recompute,
    )  # fmt: skip
    off = hidden_states_off(replace(plan, batch=replace(plan.batch, packing=False)), config)
    assert abs(off[Phase.BACKWARD]) < 0.05, off
    assert off[Phase.FORWARD] > -0.05, off


@pytest.mark.parametrize(("family", "attention"), [("phi", "flash"), ("falcon", "sdpa")])
def test_the_gradient_of_a_parallel_mlp_waits_while_attention_goes_back(family, attention):
    """The MLP goes back first; small as it is here, attention is the worst moment."""
    width = {"phi": "intermediate_size", "falcon": "ffn_hidden_size"}[family]
    config, spec = tiny(family, hidden_size=512, num_attention_heads=8, num_hidden_layers=3, **{width: 256})
    plan = plan_for(
        spec, hardware=gpu("h100"), precision="bf16", tuning="lora", attention=attention, seq_len=256, rows=2,
        chunk=64,
    )  # fmt: skip
    off = hidden_states_off(plan, config)
    assert abs(off[Phase.BACKWARD]) < 0.05, off


def test_the_update_makes_a_stacks_gradient_fp32_while_few_are_gone():
    """The first block's stack of experts is larger than all before it. The embedding alone was thought the worst."""
    config, spec = tiny(
        "mixtral", hidden_size=512, intermediate_size=704, num_local_experts=8, num_hidden_layers=3
    )
    plan = plan_for(spec, hardware=gpu("h100"), precision="bf16-master", seq_len=128, rows=1)
    trace, _ = trace_plan(plan, config, exact=True)
    rehearsed = sum(peaks_by_kind(trace, on_cuda=False)[Phase.UPDATE].values())
    assert sum(predict_memory(plan).phases[Phase.UPDATE].values()) == pytest.approx(rehearsed, rel=0.001)
