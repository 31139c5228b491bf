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
from fitune.values.plan import (
    AdamW,
    ClipByNorm,
    ClipByValue,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Nf4,
    Offload,
    Sgd,
)
from fitune.values.predictions import Phase
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import FAMILIES, tensor_peak, tiny

TOLERANCE = 0.02


def check(plan, config, tolerance=TOLERANCE):
    """The estimate's peak is the rehearsed one."""
    trace, _ = trace_plan(plan, config, exact=True)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(tensor_peak(trace), rel=tolerance)


H100 = {"hardware": gpu("h100")}
V100 = {"hardware": gpu("v100-32gb"), "precision": "fp16"}
FLASH = {**H100, "attention": "flash"}
LIGER = {**FLASH, "kernels": "liger"}
BY_VALUE, BY_NORM = ClipByValue(value=1.0), ClipByNorm(max_norm=1.0)
LOMO, LOMO_BY_NORM, ADALOMO, ADALOMO_BY_NORM = (
    Lomo(adaptive=adaptive, clip=clip) for adaptive in (False, True) for clip in (BY_VALUE, BY_NORM)
)
IN_BACKWARD, IN_BACKWARD_BY_NORM = (
    Full(update=InBackward(clip=ClipByNorm(max_norm=norm))) for norm in (0, 1.0)
)
CHOICES = {
    "full, fp32": {"precision": "fp32", "recompute": 2},
    "full, masters": {"precision": "bf16-master", "chunk": 0},
    "full, run again": {**H100, "precision": "bf16", "recompute": 3, "chunk": 0, "accumulation": 2},
    "LoRA": {"tuning": "lora"},
    "LoRA, masters": {"tuning": "lora", "precision": "bf16-master", "recompute": 3, "accumulation": 2},
    "NF4": {**H100, "base": Nf4()},
    "HQQ": {"base": Hqq(bits=4), "precision": "bf16-master", "recompute": 3, "accumulation": 2},
    "LOMO": {**H100, "method": LOMO},
    "LOMO by norm": {"method": LOMO_BY_NORM, "precision": "fp32", "recompute": 2},
    "AdaLomo": {"method": ADALOMO, "recompute": 3},
    "AdaLomo by norm": {**V100, "method": ADALOMO_BY_NORM, "recompute": 2},
    "AdamW in backward": {**H100, "method": IN_BACKWARD, "precision": "bf16-master", "recompute": 2},
    "AdamW in backward, fp32": {"method": IN_BACKWARD_BY_NORM, "precision": "fp32", "recompute": 3},
    "AdamW in backward, fp16": {**V100, "method": IN_BACKWARD_BY_NORM},
    "Liger": {**LIGER, "precision": "bf16-master", "chunk": 0},
    "Liger, LoRA": {**LIGER, "tuning": "lora", "recompute": 2},
    "Liger, fp32": {**LIGER, "precision": "fp32", "recompute": 3},
    "Flash": FLASH,
    "Flash, LoRA": {**FLASH, "tuning": "lora"},
    "activations away": {**H100, "tuning": "lora", "recompute": 1, "offload": Offload(activations="cpu")},
    "weights away": {**H100, "tuning": "lora", "recompute": 1, "offload": Offload(parameters="cpu")},
    "states away": {**H100, "recompute": 1, "offload": Offload(parameters="cpu", optimizer="cpu")},
}


def planned(spec, *, method=None, base=None, **choice):
    """``method``: how all weights are trained; ``base``: what adapters are on."""
    choice = {"precision": "bf16", "seq_len": 128, "rows": 2, "chunk": 64, **choice}
    if base is not None:
        plan = plan_for(spec, **{**choice, "tuning": "lora"})
        return replace(plan, tuning=replace(plan.tuning, base=base))
    plan = plan_for(spec, **choice)
    if method is None:
        return plan
    return replace(plan, tuning=method, optimizer=Sgd() if isinstance(method, Lomo) else AdamW())


def grid():
    """Every family with every choice; each choice once where time is short."""
    for row, family in enumerate(FAMILIES):
        for column, (name, choice) in enumerate(CHOICES.items()):
            if "kernels" not in choice or tiny(family)[1].has_liger_kernels:
                marks = [] if row == column % len(FAMILIES) else [pytest.mark.slow]
                yield pytest.param(family, choice, id=f"{family}, {name}", marks=marks)


@pytest.mark.parametrize(("family", "choice"), list(grid()))
def test_estimate_and_rehearsal_agree(family, choice):
    if "base" in choice:
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("hqq.core.quantize")
    config, spec = tiny(family, num_hidden_layers=3)
    check(planned(spec, **choice), config)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip
OF_CONFIGS = {
    # for windows no mask is made where the kernel takes them
    "flash in windows": ("mistral", {"sliding_window": 64}, {**FLASH, "tuning": "lora"}),
    # a pack is rehearsed as two rows, here on both sides of the boundary
    "longrope": (
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, {"seq_len": 129, "chunk": 0}
    ),
    # a table that outweighs all else: a second gradient of it beside its step was a fifth of the peak
    "a tied table": (
        "gemma2", {"vocab_size": 20_000, "tie_word_embeddings": True},
        {"method": ADALOMO, "seq_len": 64, "rows": 1, "chunk": 0, "recompute": 1},
    ),
    # a CPU writes scores out for it, so one long row takes the most
    "dropout of attention in packs": ("llama", {"attention_dropout": 0.1}, {"tuning": "lora", "chunk": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "different", "choice"), OF_CONFIGS.values(), ids=OF_CONFIGS)
def test_what_a_config_asks_for_is_rehearsed_to_half_a_percent(family, different, choice):
    config, spec = tiny(family, num_hidden_layers=3, **different)
    check(planned(spec, **choice), config, 0.005)


@pytest.mark.parametrize(
    ("hardware", "precision", "recompute"),
    [(CPU, "bf16", 2), (gpu("h100"), "bf16", 0), (gpu("t4"), "fp16", 2),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in ((gpu("t4"), "fp32", 0), (gpu("h100"), "bf16", 2), (gpu("t4"), "fp16", 0)))],
)  # fmt: skip
def test_scores_that_are_written_out_take_what_the_device_makes_of_them(hardware, precision, recompute):
    """Rows so long that little else counts. For each score, backward: CUDA's softmax multiplies first, + 4 bytes;
    fp16 is not cast before it there, so that is all that waits."""
    config, spec = tiny("gemma2", num_hidden_layers=2)
    plan = plan_for(
        spec, hardware=hardware, precision=precision, tuning="lora", seq_len=1024, rows=1, recompute=recompute
    )
    assert_phases(plan, config, Phase.FORWARD, Phase.BACKWARD, within=0.01)


def test_the_update_makes_a_stacks_gradient_fp32_while_few_are_gone():
    """The first block's stack of experts is larger than all before it. The embedding alone was thought the worst."""
    config, spec = tiny(
        "mixtral", hidden_size=512, intermediate_size=704, num_local_experts=8, num_hidden_layers=3
    )
    plan = plan_for(spec, hardware=gpu("h100"), precision="bf16-master", seq_len=128, rows=1)
    assert_phases(plan, config, Phase.UPDATE, within=0.001)


def assert_phases(plan, config, *phases, within):
    rehearsed = peaks_by_kind(trace_plan(plan, config, exact=True)[0], on_cuda=False)
    predicted = predict_memory(plan).phases
    for phase in phases:
        expected = pytest.approx(sum(rehearsed[phase].values()), rel=within)
        assert sum(predicted[phase].values()) == expected, phase


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
