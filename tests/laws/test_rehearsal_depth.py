"""A few blocks traced and repeated say the same as all blocks traced: every phase, every kind, every byte."""

from dataclasses import replace

import pytest

from fitune.rehearse.layer_extrapolation import ROW, Depth
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import Reached, peaks_by_kind, reserved_peak
from fitune.values.plan import ClipByNorm, Full, InBackward
from fitune.values.predictions import Phase
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import tiny

GPT2 = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}


def planned(family, *, layers, **choice):
    """GPT-2 with dropout, whose masks a block that runs again makes anew."""
    config, spec = tiny(family, num_hidden_layers=layers, **(GPT2 if family == "gpt2" else {}))
    return plan_for(spec, chunk=100, seq_len=32, rows=2, **choice), config


@pytest.mark.parametrize(
    ("family", "tuning", "precision", "recompute", "layers", "accumulation", "hardware"),
    [
        ("llama", "full", "bf16-master", 0, 6, 2, CPU),
        ("gpt2", "lora", "bf16", 6, 6, 1, gpu("h100")),
        pytest.param("mistral", "lora", "bf16", 6, 6, 1, gpu("h100"), marks=pytest.mark.slow),
        pytest.param("llama", "lora", "bf16", 6, 12, 1, gpu("h100"), marks=pytest.mark.slow),
        pytest.param("qwen3", "lora", "bf16-master", 6, 6, 2, CPU, marks=pytest.mark.slow),
        pytest.param("mixtral", "full", "fp32", 6, 12, 1, CPU, marks=pytest.mark.slow),
        pytest.param("mistral", "lora", "fp32", 1, 8, 1, CPU, marks=pytest.mark.slow),
    ],
)
def test_repeated_blocks_are_the_traced_ones(
    family, tuning, precision, recompute, layers, accumulation, hardware
):
    plan, config = planned(
        family, layers=layers, tuning=tuning, recompute=recompute, precision=precision,
        accumulation=accumulation, hardware=hardware,
    )  # fmt: skip
    (short, few), (exact, all_of_them) = (trace_plan(plan, config, exact=exact) for exact in (False, True))
    assert few < all_of_them == layers
    for on_cuda in (False, True):
        assert peaks_by_kind(short, on_cuda=on_cuda) == peaks_by_kind(exact, on_cuda=on_cuda)
    assert reserved_peak(short) == reserved_peak(exact)
    assert len(short.events) == sum(not isinstance(event, Reached) for event in exact.events)


@pytest.mark.parametrize(("max_norm", "recompute"), [(0, 6), (1.0, 0)])
def test_repeated_blocks_are_the_traced_ones_where_weights_are_stepped_in_backward(max_norm, recompute):
    """Their states, too, which are there before the step begins; of the update, a number of its last moment is
    missing."""
    plan, config = planned("llama", layers=6, precision="bf16-master", recompute=recompute)
    plan = replace(plan, tuning=Full(update=InBackward(clip=ClipByNorm(max_norm=max_norm))))
    (short, few), (exact, all_of_them) = (trace_plan(plan, config, exact=exact) for exact in (False, True))
    assert few < all_of_them == 6
    repeated, traced = (peaks_by_kind(trace, on_cuda=True) for trace in (short, exact))
    assert all(repeated[phase] == traced[phase] for phase in Phase if phase is not Phase.UPDATE)


def test_blocks_that_take_turns_are_traced_whole():
    _, traced = trace_plan(*planned("gemma3_text", layers=6, tuning="full"), exact=False)
    assert traced == 6


@pytest.mark.parametrize(("recomputed", "kept"), [(0, 3), (5, 5), (0, 40), (17, 15), (80, 0), (2, 6)])
def test_every_block_is_stood_for_once(recomputed, kept):
    depth = Depth(recomputed=recomputed, kept=kept)
    small = depth.shallow()
    assert small.layers <= 2 * ROW
    assert [b for block in range(small.layers) for b in depth.copies(block)] == list(range(depth.layers))
