"""Plans of scoring: hand counts of keys and values, what fits, how many devices, and what is refused."""

from dataclasses import replace

import pytest

from fitune.errors import NothingFits
from fitune.estimate.answering import kv_bytes, memory_of_answering, pooled_bytes
from fitune.estimate.blocks.key_values import elements_per_token
from fitune.planner.answering import plan_answering
from fitune.values.answering import NO_ADAPTER, Adapter, Answering, Questions
from fitune.values.plan import Precision
from plans import CPU, gpu, known, small_llama

QUESTIONS = Questions(rows=1_000, prompt_tokens=200_000, longest_prompt=600, new_tokens=256)


def plan(model, hardware, *engines, batch_size=16, **more):
    return plan_answering(
        known(model), replace(QUESTIONS, **more), hardware, engines=engines, batch_size=batch_size,
        adapter=NO_ADAPTER, price=0.0,
    )  # fmt: skip


def on_h100(model, engine, *, devices=1):
    """The answering of one row at a time."""
    return Answering(
        engine=engine, model=known(model), hardware=gpu("h100", gpus=8), precision=Precision.BF16,
        batch_size=1, devices=devices,
    )  # fmt: skip


def counts(report):
    return {each.answering.devices for each in (report.chosen, *report.others)}


def test_keys_and_values_of_one_token():
    """Llama-3.1-8B: 32 blocks · 8 heads · 128 · (key, value). DeepSeek-V3: 61 · 128 heads · (128 + 64 + 128)."""
    assert elements_per_token(known("llama-3.1-8b")) == 32 * 8 * 128 * 2
    assert elements_per_token(known("deepseek-ai/DeepSeek-V3")) == 61 * 128 * (128 + 64 + 128)
    one = on_h100("llama-3.1-8b", "transformers")
    assert kv_bytes(one, rows=4, width=1_000) == 4 * 1_000 * 131_072


@pytest.mark.parametrize(
    ("name", "devices", "elements"),
    [
        ("openai/gpt-oss-20b", 1, 2 * 8 * 64 * (12 * 10_000 + 12 * 128)),
        ("openai/gpt-oss-20b", 4, 2 * 2 * 64 * (12 * 10_000 + 12 * 128)),
        ("google/gemma-4-31B", 1, 2 * 50 * 16 * 256 * 1_024 + 2 * 10 * 4 * 512 * 10_000),
        ("deepseek-ai/DeepSeek-V3", 8, 61 * (512 + 64) * 10_000),
        ("llama-3.1-8b", 8, 32 * 2 * 128 * 10_000),
    ],
)
def test_vllm_keeps_windows_and_latent_vectors(name, devices, elements):
    """Of one row of 10,000 tokens: heads are divided over devices; the latent vector of all heads (MLA) is not."""
    assert pooled_bytes(on_h100(name, "vllm", devices=devices), 10_000) == 2 * elements


def test_the_largest_batch_fits_and_one_row_more_does_not():
    report = plan("llama-3.1-8b", gpu("rtx-4090"), "transformers")
    rows = report.largest_batch
    for count, fits in ((rows, True), (rows + 1, False)):
        answering = replace(report.chosen.answering, batch_size=count)
        assert memory_of_answering(answering, replace(QUESTIONS, rows=100_000)).fits is fits
    assert 16 < rows < 200


@pytest.mark.parametrize(("longest", "rows"), [(600, 32), (9_000, None), (20_000, 1)])
def test_a_batch_that_nobody_said_is_32_or_what_fits(longest, rows):
    report = plan("llama-3.1-8b", gpu("rtx-4090"), "transformers", batch_size=0, longest_prompt=longest)
    assert report.chosen.answering.batch_size == rows or (rows is None and report.largest_batch < 32)
    assert report.chosen.answering.batch_size == min(32, report.largest_batch)


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(
        NothingFits, match=r"weights 14\.96 \+ keys and values .* 21\.81 usable, .* short"
    ) as caught:
        plan("llama-3.1-8b", gpu("rtx-4090"), "transformers", batch_size=4_000)
    rows = int(str(caught.value.hint).split()[-1])
    assert plan("llama-3.1-8b", gpu("rtx-4090"), "transformers", batch_size=rows).largest_batch == rows


def test_a_processor_that_is_too_small_is_not_told_to_divide_the_model():
    with pytest.raises(NothingFits) as caught:
        plan("llama-3.1-70b", CPU, "transformers", "vllm")
    assert caught.value.hint == "a machine with more memory; --gpu plans for a card that is elsewhere"


def test_weights_that_no_device_holds_are_divided_over_the_node():
    """Llama-3.1-70B in bf16 is 131 GiB: two devices of 80 GB at least, and eight write fastest."""
    report = plan("llama-3.1-70b", gpu("a100-80gb", gpus=8), "transformers", "vllm")
    assert report.chosen.answering.engine == "vllm"
    assert counts(report) == {2, 4, 8}
    seconds = [each.time.seconds for each in (report.chosen, *report.others)]
    assert seconds == sorted(seconds)
    assert [name for name, _ in report.rejected] == ["transformers", "vllm"]
    assert "vllm over 8 devices" in report.text()


def test_heads_divide_evenly():
    """Qwen2.5-0.5B has 14 heads and 2 of keys: two devices share it, four and eight cannot."""
    assert counts(plan("qwen2.5-0.5b", gpu("h100", gpus=8), "vllm")) == {1, 2}


def test_writing_is_bound_by_memory_and_reading_by_products():
    """vLLM on one H100: a step of 1 row reads the weights once, 16.06 GB at 80 % of 3.35 TB/s,
    starts 225 products of 4 µs, and takes 2 ms of its own."""
    report = plan("llama-3.1-8b", gpu("h100"), "vllm", rows=1, prompt_tokens=2_000, longest_prompt=2_000)
    time = report.chosen.time
    read = (8_030_261_248 - 128_256 * 4_096) * 2 / (3.35e12 * 0.8) + 225 * 4e-6 + 2e-3
    assert 1 / time.writing_rate == pytest.approx(read, rel=0.03)
    assert (time.reading_limit, time.writing_limit) == ("compute", "memory bandwidth")


def test_more_of_anything_takes_more():
    answering = plan("llama-3.1-8b", gpu("h100"), "transformers").chosen.answering
    peak = memory_of_answering(answering, QUESTIONS).peak_bytes
    for more, questions in (
        ({"batch_size": 32}, {}),
        ({}, {"new_tokens": 2_000}),
        ({}, {"longest_prompt": 4_000}),
        ({"adapter": Adapter(elements=10**8)}, {}),
    ):
        larger = memory_of_answering(replace(answering, **more), replace(QUESTIONS, **questions))
        assert larger.peak_bytes > peak


def test_a_processor_answers_in_fp32_and_the_numbers_are_in_the_data():
    report = plan_answering(
        small_llama(), QUESTIONS, CPU, engines=("transformers",), batch_size=4, adapter=NO_ADAPTER, price=0.0
    )
    chosen = report.data()["chosen"]
    assert (chosen["precision"], chosen["batch_size"]) == ("fp32", 4)
    assert chosen["peak_bytes"] == report.chosen.memory.peak_bytes
    assert report.data()["cost"] is None
    assert "an upper bound" in report.text()
