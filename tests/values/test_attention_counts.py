"""Attention of each kind of block: its width and window for every public name, and the FLOPs counted from them."""

import pytest

from fitune.values.counts import model_flops
from fitune.values.model import tracing
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.known_models import configs_to_trace, known_model_names
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.model_spec import BlockAttention
from fitune.values.model.tracing import NOT_SHIPPED, shipped_profile
from fitune.values.plan import Full
from plans import gpu, plan_for


@pytest.mark.parametrize("window", [0, 1, 3, 8, 9])
def test_pairs_are_counted_one_by_one(window):
    seen = [min(position + 1, window or position + 1) for position in range(8)]
    assert BlockAttention(width=1, window=window).pairs(8) == sum(seen)
    chunked = [position % (window or 8) + 1 for position in range(8)]
    assert BlockAttention(width=1, window=window, in_chunks=True).pairs(8) == sum(chunked)


def test_half_of_the_square_is_what_kernels_compute_less_what_lies_before_a_window():
    rows = BatchShape.of_rows((100, 40, 7), supervised_tokens=147)
    assert rows.seen_pairs(BlockAttention(width=1)) == (100**2 + 40**2 + 7**2) / 2
    windowed = (100 * 40 - 40**2 / 2 - (100 - 40) / 2) + 40**2 / 2 + 7**2 / 2
    assert rows.seen_pairs(BlockAttention(width=1, window=40)) == windowed
    chunked = BlockAttention(width=1, window=40, in_chunks=True)
    assert rows.seen_pairs(chunked) == (40**2 + 40**2 + 20**2) / 2 + 40**2 / 2 + 7**2 / 2
    full = BatchShape(tokens=64, supervised_tokens=62, rows=2)
    assert full.seen_pairs(BlockAttention(width=1, window=16)) == 2 * (32 * 16 - 16**2 / 2 - (32 - 16) / 2)


def test_the_attention_of_each_kind_of_block_is_what_was_traced():
    """12 FLOPs for each element and pair, in fused kernels or written out as products; mixers have hardly any."""
    for name in [name for name in configs_to_trace() if name not in NOT_SHIPPED]:
        model = load_model_spec(name, offline=True)
        assert len(model.attentions) == len(model.kinds), name
        for attention, block in zip(model.attentions, shipped(model).blocks, strict=True):
            written = 3 * block.there.flops.per_square
            if attention.width:
                most = max(block.flops_per_pair, written)
                assert 12 * attention.width == pytest.approx(most, rel=1e-6), name
            else:
                assert block.heads == 0, name
                assert written < 0.02 * 12 * model.hidden_size, name


def shipped(model):
    length = model.sliding_window or 2048
    shape = BatchShape(tokens=length, supervised_tokens=length, rows=1)
    plans = (
        plan_for(
            model, hardware=gpu("rtx-4090"), rank=16, precision="bf16-master", attention=attention, rows=1,
            accumulation=2, seq_len=length,
        )
        for attention in ("flash", "sdpa", "eager")
    )  # fmt: skip
    found = (shipped_profile(model.config_digest, tracing.way_of(plan, shape).digest) for plan in plans)
    return next(step for step in found if step is not None)


def test_flops_are_those_of_products_and_of_the_pairs_of_each_block():
    """Of rows of 8 and 32 thousand tokens, for every public name."""
    rows = (8192, 32768)
    for model in (load_model_spec(name, offline=True) for name in known_model_names()):
        attended = sum(
            12 * each.width * each.pairs(row)
            for each in map(model.attention_of, range(model.num_layers))
            for row in rows
        )
        products = sum(
            count * m.in_features * m.out_features * m.active_copies for m, count in model.counted_linears()
        )
        counted = model_flops(model, Full(), row_lengths=rows, supervised_tokens=0)
        assert counted == pytest.approx(6 * products * sum(rows) + attended, rel=1e-9), model.name


@pytest.mark.parametrize(
    ("name", "attending", "windows"),
    [
        ("mistralai/Mistral-7B-v0.1", 32, {4096: 32}),
        ("openai/gpt-oss-20b", 24, {128: 12, 0: 12}),
        ("meta-llama/Llama-4-Scout-17B-16E", 48, {8192: 36, 0: 12}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 12, {0: 12}),
        ("state-spaces/mamba-130m-hf", 0, {}),
    ],
)
def test_blocks_that_attend_and_their_windows(name, attending, windows):
    model = load_model_spec(name, offline=True)
    found = [each for each in map(model.attention_of, range(model.num_layers)) if each.width]
    assert len(found) == attending
    assert {window: sum(each.window == window for each in found) for window in windows} == windows
