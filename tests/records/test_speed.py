"""Speed of published runs: what kernels spare and casts add, by hand, and that each only goes its own way."""

import json
from pathlib import Path
from typing import Any

import pytest

from fitune.estimate.time import predict_step_time
from fitune.records.mapping import Case, case_of
from fitune.records.row import row_from
from fitune.records.speed import (
    cast_bytes,
    fused_bytes,
    small_units,
    tokens_per_second,
    unpacking_bytes,
)

RUNS = {
    facts["id"]: facts
    for facts in map(json.loads, Path(__file__).with_name("runs.jsonl").read_text().splitlines())
}


def case(name: str, **changed: Any) -> Case:
    return case_of(row_from({**RUNS[name], **changed}, line=1, where="test", fallback_source="test"))


def test_eager_runs_in_one_type_take_the_estimates_seconds() -> None:
    told = case("full-one-device")
    assert fused_bytes(told) == cast_bytes(told) == (0.0, 0.0)
    assert tokens_per_second(told) == pytest.approx(
        16384 / predict_step_time(told.plan, told.shape).step_seconds
    )


def test_fused_norms_and_rotation_by_hand() -> None:
    """Mistral: two norms of 4096 spare 36 − 4 and 94 − 6 bytes an element, 5120 turned elements 16 and 30."""
    forward, backward = fused_bytes(case("full-one-device", must_assume="kernels: foak"))
    assert forward == -(2 * 4096 * 32 + 5120 * 16)
    assert backward == -(2 * 4096 * 88 + 5120 * 30)


def test_casts_of_fp32_adapters_by_hand() -> None:
    """Mistral's q, k, v, o read 4 · 4096 and write 4096 + 1024 + 1024 + 4096 elements."""
    read, written = 4 * 4096, 2 * 4096 + 2 * 1024
    assert cast_bytes(case("lora-logits-decide")) == (16 * written + 8 * read, 20 * written + 10 * read)
    autocast = cast_bytes(case("lora-logits-decide", precision_mode="bf16 autocast"))
    assert autocast == (12 * read, 12 * read)
    assert cast_bytes(case("lora-logits-decide", optimizer_dtype="bf16")) == (0, 0)


def test_words_unpacked_in_torch_by_hand() -> None:
    """20 bytes for each of 32 · 218,103,808 packed weights, forward, again and back."""
    slow = case("gptq-counts-as-4-bit", quant="GPTQ int4 (exllama off)")
    assert unpacking_bytes(slow) == 3 * 20 * 32 * 218_103_808
    assert unpacking_bytes(case("gptq-counts-as-4-bit")) == 0
    assert tokens_per_second(slow) < tokens_per_second(case("gptq-counts-as-4-bit"))


def test_small_units_by_hand() -> None:
    """32 blocks, four adapted linears, two matrices each, gathered 3 times and summed."""
    lora = {"n_gpus": 2, "sharding": "FSDP FULL_SHARD"}
    assert small_units(case("lora-logits-decide", **lora)) == 32 * 2 * 4 * 4
    assert small_units(case("full-fsdp-two")) == 0
    assert small_units(case("full-fsdp-two", sharding="DeepSpeed ZeRO-3")) == 0  # the estimate has its hooks
    assert small_units(case("qlora-fsdp-frozen")) == 0  # its fused adapters are left to DDP


@pytest.mark.parametrize(
    "name", ["full-one-device", "lora-logits-decide", "lora-block-decides", "tied-logits-decide"]
)
def test_speeds_of_one_device_are_within_a_fifth(name: str) -> None:
    told = case(name)
    assert told.row.tok_s_per_gpu is not None
    assert tokens_per_second(told) == pytest.approx(told.row.tok_s_per_gpu, rel=0.2)
