"""More of anything never takes less memory; less of anything never more; and the timeline is a timeline."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fitune.estimate.overhead import allocator_slack_bytes
from fitune.estimate.predict import predict, predict_memory
from fitune.values.plan import AdamW, Sgd
from fitune.values.predictions import Phase
from plans import gpu, known, plan_for, small_llama

MODELS = ("llama-3.1-8b", "qwen3-4b", "gemma-3-4b", "phi-3-mini", "mixtral-8x7b", "falcon-7b", "gpt2")


def peaks(plans):
    return [predict_memory(plan).peak_bytes for plan in plans]


def increasing(values):
    return all(a < b for a, b in pairwise(values))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_more_tokens_take_more_bytes(name, tuning):
    """In every phase that sees tokens; the update of a full fine-tune may still be the peak."""
    base = {"tuning": tuning, "precision": "bf16-master", "hardware": gpu("h100")}
    longer = [plan_for(known(name), seq_len=n, rows=2, chunk=4096, **base) for n in (256, 512, 1024)]
    more = [plan_for(known(name), seq_len=256, rows=n, chunk=4096, **base) for n in (1, 2, 4)]
    for plans in (longer, more):
        assert peaks(plans) == sorted(peaks(plans))
        for phase in (Phase.FORWARD, Phase.LOSS):
            assert increasing([sum(predict_memory(plan).phases[phase].values()) for plan in plans])


@pytest.mark.parametrize("name", MODELS)
def test_recompute_takes_bytes_from_forward_and_loss(name):
    """Of all blocks but the last: recomputing that one only adds its input."""
    model = known(name)
    plans = [
        plan_for(model, tuning="lora", precision="bf16", recompute=n, chunk=256, seq_len=512)
        for n in range(model.num_layers)
    ]
    for phase in (Phase.FORWARD, Phase.LOSS):
        sizes = [sum(predict_memory(plan).phases[phase].values()) for plan in plans]
        assert all(a >= b for a, b in pairwise(sizes))
    assert predict_memory(plans[-1]).peak_bytes < predict_memory(plans[0]).peak_bytes


def test_smaller_chunks_of_the_loss_never_take_more():
    plans = [
        plan_for(known("llama-3.1-8b"), precision="bf16", chunk=n, seq_len=2048) for n in (4096, 1024, 256)
    ]
    sizes = [sum(predict_memory(plan).phases[Phase.LOSS].values()) for plan in plans]
    assert sizes == sorted(sizes, reverse=True)


def test_full_takes_more_than_lora_and_adamw_more_than_sgd():
    model = known("llama-3.1-8b")
    full, lora = (plan_for(model, tuning=t, precision="bf16-master") for t in ("full", "lora"))
    assert predict_memory(full).peak_bytes > predict_memory(lora).peak_bytes
    optimizers = (Sgd(), Sgd(momentum=0.9), AdamW())
    assert increasing(peaks(replace(full, optimizer=optimizer) for optimizer in optimizers))


def test_written_out_scores_take_more_than_a_fused_kernel():
    plans = [
        plan_for(known("llama-3.1-8b"), precision="bf16", attention=kind, seq_len=1024)
        for kind in ("sdpa", "eager")
    ]
    assert increasing(peaks(plans))


def test_accumulation_adds_the_gradients_to_forward():
    model = small_llama()
    once, twice = (predict_memory(plan_for(model, accumulation=n)) for n in (1, 2))
    assert "gradients" not in once.phases[Phase.FORWARD]
    assert twice.phases[Phase.FORWARD]["gradients"] == once.phases[Phase.UPDATE]["gradients"]
    assert twice.tensor_peak_bytes > once.tensor_peak_bytes


def test_the_peak_is_one_moment_and_not_a_sum_of_maxima():
    memory = predict_memory(plan_for(known("llama-3.1-8b"), precision="bf16-master", seq_len=2048))
    terms = {name for phase in memory.phases.values() for name in phase}
    maxima = sum(max(phase.get(name, 0) for phase in memory.phases.values()) for name in terms)
    assert memory.tensor_peak_bytes == sum(memory.phases[memory.peak_phase].values()) < maxima


def test_slack_is_that_of_the_phase_that_needs_most_with_it():
    """A backward whose blocks run again has twice the slack of an update with more tensors, and needs more in all. The
    peak's slack alone would jump by 5 % of what moves where one token more makes backward the peak."""
    plan = plan_for(
        known("llama-3.2-1b"), hardware=gpu("h100"), precision="bf16-master", recompute=16, chunk=256, rows=1
    )
    most = []
    for tokens in range(2048, 8192, 512):
        memory = predict_memory(replace(plan, batch=replace(plan.batch, seq_len=tokens)))
        stays = sum(memory.phases[Phase.IDLE].values())
        with_slack = {
            phase: size + allocator_slack_bytes(plan.hardware, moving_bytes=size - stays, recomputes=again)
            for phase, terms in memory.phases.items()
            for size, again in [(sum(terms.values()), "recompute inputs" in terms)]
        }
        assert memory.tensor_peak_bytes + memory.outside["allocator slack"] == max(with_slack.values())
        most.append(max(with_slack, key=lambda phase: with_slack[phase]) is not memory.peak_phase)
    assert set(most) == {True, False}


def test_every_term_of_every_phase_is_positive():
    for name in MODELS:
        for tuning in ("full", "lora"):
            for recompute in (0, 1, known(name).num_layers):
                plan = plan_for(
                    known(name), tuning=tuning, precision="bf16", recompute=recompute, hardware=gpu("h100")
                )
                for terms in predict_memory(plan).phases.values():
                    assert all(size > 0 for size in terms.values()), (name, tuning, recompute, terms)


def test_memory_is_affine_in_depth():
    """Two depths tell all others, as a rehearsal of two depths assumes."""
    peak = {
        layers: predict_memory(
            plan_for(small_llama(num_hidden_layers=layers), precision="bf16")
        ).tensor_peak_bytes
        for layers in (8, 16, 24)
    }
    assert peak[24] - peak[16] == peak[16] - peak[8]


def test_recompute_and_smaller_devices_take_longer():
    model = known("llama-3.1-8b")

    def seconds(name="h100", **choice):
        plan = plan_for(model, hardware=gpu(name), tuning="lora", precision="bf16", seq_len=2048, **choice)
        return predict(plan).step_seconds

    assert seconds(recompute=0) < seconds(recompute=16) < seconds(recompute=32)
    assert seconds("h100") < seconds("a100-80gb") < seconds("rtx-4090")
    assert seconds(accumulation=2) > 1.9 * seconds(accumulation=1)
