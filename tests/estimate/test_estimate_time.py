"""FLOPs by hand and the shape of the roofline."""

from dataclasses import replace

import pytest

from fitune.estimate.blocks.eager import block_passes
from fitune.estimate.predict import largest_batch, predict, predict_step_time
from fitune.estimate.rates import PRODUCT_EFFICIENCY, rates_of
from fitune.estimate.step import describe_step
from fitune.estimate.transfers import Exchange, cpu_adam_seconds, exchange_seconds
from fitune.estimate.work import attention_seconds
from fitune.values.counts import count_parameters, model_flops
from fitune.values.machines.hardware import (
    AttentionRate,
    Calibration,
    Collectives,
    HeadTime,
    LogitTime,
    Rate,
    Traffic,
)
from fitune.values.plan import Offload, Precision, Zero
from fitune.values.predictions import Phase
from plans import CPU, gpu, known, plan_for, small_llama


def flops_per_token(plan):
    """FLOPs that the mathematics needs per token of full rows."""
    shape = largest_batch(plan)
    lengths = [shape.row_tokens] * (shape.tokens // shape.row_tokens)
    whole = model_flops(
        plan.model, plan.tuning, row_lengths=lengths, supervised_tokens=shape.supervised_tokens
    )
    return whole / shape.tokens


def test_full_fine_tuning_takes_six_flops_per_weight_and_token():
    """6 × (matrices of the blocks + head), + 6·L·q·(T + 1) for causal attention."""
    model = known("llama-3.1-8b")
    plan = plan_for(model, precision="bf16", rows=1, seq_len=2048)
    counts = count_parameters(model)
    supervised = 2047 / 2048
    expected = 6 * (counts.attention + counts.mlp) + 6 * counts.head * supervised + 6 * 32 * 4096 * 2049
    assert flops_per_token(plan) == pytest.approx(expected, rel=1e-9)


def test_lora_takes_four_flops_per_frozen_weight_and_six_per_adapter():
    model = known("llama-3.1-8b")
    counts = count_parameters(model)
    plan = plan_for(model, precision="bf16", rows=1, seq_len=2048, tuning="lora", rank=16)
    supervised = 2047 / 2048
    adapters = 41_943_040
    expected = (
        4 * (counts.attention + counts.mlp + counts.head * supervised) + 6 * adapters + 6 * 32 * 4096 * 2049
    )
    assert flops_per_token(plan) == pytest.approx(expected, rel=1e-9)


def test_a_mask_over_the_stream_is_computed_whole():
    """Falcon-40B's attention goes through all pairs of the stream, however many rows it holds."""

    def seconds(rows):
        plan = plan_for(known("falcon-40b"), hardware=gpu("h100"), rows=rows, seq_len=2048 // rows)
        step = describe_step(plan, largest_batch(plan))
        return attention_seconds(step.attentions[0][0], step.shape, rates_of(plan.hardware, plan.precision))

    assert seconds(4) == seconds(1)


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-v0.1", "google/gemma-3-12b-pt"])
def test_flash_attention_takes_no_time_before_a_window(name):
    """Seconds of attention are those of the pairs in the window; a kernel with a mask goes through all of a row."""
    model = known(name)

    def seconds(model, row, attention):
        plan = plan_for(
            model, hardware=gpu("h100"), precision="bf16", attention=attention, rows=1, seq_len=row
        )
        step = describe_step(plan, largest_batch(plan))
        rates = rates_of(plan.hardware, plan.precision)
        return tuple(
            sum(count * attention_seconds(each, step.shape, rates)[way] for each, count, _ in step.attentions)
            for way in (0, 1)
        )

    whole = replace(model, sliding_window=0, full_attention_layers=())
    assert seconds(model, 1024, "flash") == pytest.approx(seconds(whole, 1024, "flash"))
    assert seconds(model, 32768, "sdpa") == pytest.approx(seconds(whole, 32768, "sdpa"))
    n, w = 32768, model.sliding_window
    windowed = sum(model.has_window(block) for block in range(model.num_layers)) / model.num_layers
    seen = windowed * (n * w - w * w / 2 - (n - w) / 2) + (1 - windowed) * n * n / 2
    ratio = seconds(model, n, "flash")[1] / seconds(whole, n, "flash")[1]
    row_tokens = rates_of(gpu("h100"), Precision.BF16).attention_row_tokens
    assert ratio == pytest.approx((seen + n * row_tokens / 2) / (n * n / 2 + n * row_tokens / 2), rel=1e-6)


def test_phases_add_up_to_the_step_and_every_limit_is_named():
    time = predict(plan_for(known("llama-3.1-8b"), hardware=gpu("h100"), precision="bf16", seq_len=2048)).time
    assert set(time.phases) == {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE}
    assert time.step_seconds == pytest.approx(sum(time.phases.values()))
    assert set(time.limits.values()) <= {"compute", "memory bandwidth", "launch"}
    assert time.limits[Phase.UPDATE] == "memory bandwidth"


def test_a_step_is_never_faster_than_its_products_at_the_assumed_efficiency():
    for tuning in ("full", "lora"):
        plan = plan_for(
            known("llama-3.1-8b"), hardware=gpu("a100-80gb"), precision="bf16", seq_len=2048, tuning=tuning
        )
        flops = flops_per_token(plan) * plan.batch.micro_batch_tokens
        attention = 6 * 32 * 4096 * 2049 * plan.batch.micro_batch_tokens
        bound = (flops - attention) / (312e12 * PRODUCT_EFFICIENCY[8, 0])
        assert bound < predict_step_time(plan).step_seconds < 2 * bound


def test_a_tiny_model_is_bound_by_launches():
    time = predict_step_time(plan_for(small_llama(), hardware=gpu("h100"), precision="bf16", rows=1))
    assert time.limits[Phase.FORWARD] == "launch"


def measured(**different):
    made = Calibration(
        device="h100",
        date="2026-11-21",
        threads=8,
        products=(Rate(numbers="bf16", flops=500e12),),
        attention=(AttentionRate(numbers="bf16", flops=300e12),),
        traffic=(Traffic(tensor_bytes=2**24, bandwidth=2e12),),
        forward_launch_seconds=0.0,
        backward_launch_seconds=0.0,
        host_bandwidth=40e9,
        cpu_adam=1e9,
    )
    return replace(made, **different)


def eight_b_measured(**different):
    hardware = replace(gpu("h100"), calibration=measured(**different))
    return predict_step_time(
        plan_for(known("llama-3.1-8b"), hardware=hardware, precision="bf16", seq_len=2048)
    ).phases


def test_what_was_measured_counts_instead_of_the_datasheet():
    slow, fast = (
        eight_b_measured(products=(Rate(numbers="bf16", flops=flops),)) for flops in (250e12, 500e12)
    )
    products = 2 * 6_979_321_856 * 8192  # the blocks' matrices, two FLOPs each
    assert slow[Phase.FORWARD] - fast[Phase.FORWARD] == pytest.approx(products / 500e12)


def test_each_product_has_a_start():
    without, with_start = (
        eight_b_measured(products=(Rate(numbers="bf16", flops=500e12, start_seconds=start),))
        for start in (0.0, 1e-3)
    )
    assert with_start[Phase.FORWARD] - without[Phase.FORWARD] == pytest.approx(32 * 7 * 1e-3)
    assert with_start[Phase.BACKWARD] - without[Phase.BACKWARD] == pytest.approx(2 * 32 * 7 * 1e-3)


def test_short_rows_fill_attention_badly():
    """With row_tokens as long as the rows, attention's pairs double."""
    full, short = (
        eight_b_measured(attention=(AttentionRate(numbers="bf16", flops=300e12, row_tokens=tokens),))
        for tokens in (0, 2048)
    )
    pairs = 4 * 2048 * 2048 / 2
    assert short[Phase.FORWARD] - full[Phase.FORWARD] == pytest.approx(32 * 4 * 4096 * pairs / 300e12)


def head_times(*, tokens_and_forward, head_size=128):
    return tuple(
        HeadTime(numbers="bf16", head_size=head_size, tokens=n, forward_seconds=s, backward_seconds=2 * s)
        for n, s in tokens_and_forward
    )


def test_heads_that_were_measured_count_instead_of_a_rate():
    """32 heads of 8 rows of 2,048 tokens in each of 32 blocks; the length lies between two measured ones."""
    without = eight_b_measured(heads=head_times(tokens_and_forward=[(2048, 1e-12)]))
    phases = eight_b_measured(heads=head_times(tokens_and_forward=[(1024, 1e-4), (4096, 4e-4)]))
    assert phases[Phase.FORWARD] - without[Phase.FORWARD] == pytest.approx(32 * 4 * 32 * 2e-4)
    assert phases[Phase.BACKWARD] - without[Phase.BACKWARD] == pytest.approx(32 * 4 * 32 * 4e-4)


def test_a_head_between_two_measured_sizes_and_beside_them():
    both = (
        *head_times(tokens_and_forward=[(64, 1e-5), (256, 1.6e-4)], head_size=64),
        *head_times(tokens_and_forward=[(64, 2e-5), (256, 3.2e-4)]),
    )
    found = measured(heads=both)
    assert found.head_seconds("bf16", head_size=96, tokens=64)[0] == pytest.approx(1.5e-5)
    assert found.head_seconds("bf16", head_size=64, tokens=128)[0] == pytest.approx(4e-5)
    assert found.head_seconds("bf16", head_size=64, tokens=512)[1] == pytest.approx(2 * 6.4e-4)
    assert found.head_seconds("bf16", head_size=1, tokens=64)[0] > 0
    assert found.head_seconds("fp32", head_size=64, tokens=64) is None


def test_softmax_and_new_pages_count_in_the_loss():
    """8,188 tokens by 128,256 logits; a chunk's logits, their fp32 work and gradient are new memory each."""
    plain, logits, pages = (
        eight_b_measured(logits=(LogitTime(numbers="bf16", seconds=seconds),), new_page_bandwidth=bandwidth)
        for seconds, bandwidth in ((1e-12, 0.0), (1e-9, 0.0), (1e-12, 1e9))
    )
    assert logits[Phase.LOSS] - plain[Phase.LOSS] == pytest.approx(
        4 * 2047 * 128_256 * (1e-9 - 1e-12), rel=1e-3
    )
    assert pages[Phase.LOSS] - plain[Phase.LOSS] > 4 * 2047 * 128_256 * 8 / 1e9
    assert pages[Phase.FORWARD] == plain[Phase.FORWARD]


def test_precisions_that_were_not_measured_fall_back_to_the_datasheet():
    hardware = replace(gpu("h100"), calibration=measured())
    assert rates_of(hardware, Precision.BF16_MASTER).flops == 500e12
    assert rates_of(hardware, Precision.FP16).flops == rates_of(gpu("h100"), Precision.FP16).flops


def test_a_processor_launches_and_computes_in_turn_a_gpu_at_once():
    plan = plan_for(small_llama(), hardware=CPU, rows=1)
    quick, slow = (
        predict_step_time(
            replace(
                plan,
                hardware=replace(
                    CPU,
                    calibration=measured(
                        products=(Rate(numbers="fp32", flops=40e9),),
                        attention=(AttentionRate(numbers="fp32", flops=20e9),),
                        forward_launch_seconds=launch,
                    ),
                ),
            )
        ).phases[Phase.FORWARD]
        for launch in (1e-5, 2e-5)
    )
    operations = 4 * (7 + 15 + 2 * 6 + 2)  # products, others, two norms; a pack counts as two rows
    assert slow - quick == pytest.approx(operations * 1e-5)


def test_links_and_adam_that_were_measured():
    hardware = replace(
        gpu("h100", gpus=2),
        cpu_cores=96,
        host_memory_bytes=2**40,
        calibration=measured(collectives=Collectives(ranks=2, start_seconds=1e-4, bandwidth=100e9)),
    )
    exchange = Exchange(bytes=1e9, calls=10, ranks=2)
    assert exchange_seconds(hardware, exchange) == pytest.approx(0.01 + 10 * 1e-4)
    other_ranks = replace(exchange, ranks=8)
    assert exchange_seconds(hardware, other_ranks) == exchange_seconds(gpu("h100", gpus=2), other_ranks)
    plan = plan_for(
        known("llama-3.1-8b"), hardware=hardware, precision="bf16", sharding=Zero(stage=2, backend="deepspeed"),
        offload=Offload(optimizer="cpu"),
    )  # fmt: skip
    assert cpu_adam_seconds(plan) == pytest.approx(8_030_261_248 / 1e9)


def test_products_of_experts_leave_half_a_tile_idle_each():
    """Mixtral, 8 × 4096 tokens, 2 of 8 experts: 8192 rows each; with 64 tokens 16, and five times the work."""
    plan = plan_for(known("mixtral-8x7b"), hardware=gpu("h100"), precision="bf16", rows=8, seq_len=4096)
    experts = sum(
        m.in_features * m.out_features * m.active_copies for m in plan.model.linears if m.copies > 1
    )
    more = block_passes(plan)[0].flops - block_passes(replace(plan, hardware=CPU))[0].flops
    assert more == pytest.approx(2 * experts * 64 / 8192)
    few = replace(plan, batch=replace(plan.batch, micro_batch_size=1, seq_len=64))
    more = block_passes(few)[0].flops - block_passes(replace(few, hardware=CPU))[0].flops
    assert more == pytest.approx(2 * experts * 64 / 16)
