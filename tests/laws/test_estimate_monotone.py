"""More of anything never takes less memory; less of anything never more; and the timeline is a timeline."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from fitune.estimate.overhead import allocator_slack_bytes
from fitune.estimate.predict import predict, predict_memory
from fitune.estimate.states import resting_gradient_bytes
from fitune.estimate.step import resident_terms
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Ddp, Offload, Single, Zero
from fitune.values.predictions import Phase
from plans import gpu, known, plan_for, small_llama

MODELS = ("llama-3.1-8b", "qwen3-4b", "gemma-3-4b", "phi-3-mini", "mixtral-8x7b", "falcon-7b", "gpt2")
SHARDINGS = (
    Ddp(),
    *(Zero(stage=stage, backend=backend) for stage in (1, 2, 3) for backend in ("fsdp", "deepspeed")),
    Zero(stage=3, backend="fsdp", hybrid=True),
)
PLACES = [
    Offload(parameters=p, optimizer=o, activations=a) for p, o, a in product(("device", "cpu"), repeat=3)
]


def cluster(nodes=1, *, gpus=8, card="h100", **different):
    return replace(hardware_for(gpu=find_gpu(card), gpus=gpus, nodes=nodes), **different)


def peak(plan):
    return predict_memory(plan).tensor_peak_bytes


def total(plan, phase):
    return sum(predict_memory(plan).phases[phase].values())


def state_bytes(plan):
    """Weights, gradients, masters and optimizer states that one rank holds between backward and update."""
    return sum(resident_terms(plan).values()) + resting_gradient_bytes(plan)


def increasing(values):
    return all(a < b for a, b in pairwise(values))


def not_increasing(values):
    return all(a >= b for a, b in pairwise(values))


@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_take_more_bytes(name):
    """In every phase that sees tokens; the update of a full fine-tune may still be the peak."""
    for tuning in ("full", "lora"):
        base = {"tuning": tuning, "precision": "bf16-master", "hardware": gpu("h100"), "chunk": 4096}
        longer = [plan_for(known(name), seq_len=n, rows=2, **base) for n in (256, 512, 1024)]
        more = [plan_for(known(name), seq_len=256, rows=n, **base) for n in (1, 2, 4)]
        for plans in (longer, more):
            assert not_increasing(map(peak, reversed(plans)))
            for phase in (Phase.FORWARD, Phase.LOSS):
                assert increasing([total(plan, phase) for plan in plans])


@pytest.mark.parametrize("name", MODELS)
def test_recompute_takes_bytes_from_forward_and_loss(name):
    """Of all blocks but the last: recomputing that one only adds its input."""
    model = known(name)
    plans = [
        plan_for(model, tuning="lora", precision="bf16", recompute=n, chunk=256, seq_len=512)
        for n in range(model.num_layers)
    ]
    for phase in (Phase.FORWARD, Phase.LOSS):
        assert not_increasing([total(plan, phase) for plan in plans])
    assert peak(plans[-1]) < peak(plans[0])


def test_smaller_chunks_of_the_loss_never_take_more():
    plans = [
        plan_for(known("llama-3.1-8b"), precision="bf16", chunk=n, seq_len=2048) for n in (4096, 1024, 256)
    ]
    assert not_increasing([total(plan, Phase.LOSS) for plan in plans])


def test_the_more_is_fused_the_less_is_kept():
    """Scores that are written out, a kernel by rows, one for the whole stream, and fused norms and MLP."""
    choices = (
        {"attention": "eager"}, {"attention": "sdpa"}, {"attention": "flash"},
        {"attention": "flash", "kernels": "liger"},
    )  # fmt: skip
    for tuning in ("full", "lora"):
        base = {"tuning": tuning, "precision": "bf16", "hardware": gpu("h100"), "seq_len": 1024}
        plans = [plan_for(known("llama-3.1-8b"), **base, **choice) for choice in choices]
        kept = [predict_memory(plan).phases[Phase.LOSS]["activations"] for plan in plans]
        assert increasing(reversed(kept))


def test_the_fewer_of_the_last_blocks_are_adapted_the_less_memory():
    plan = plan_for(small_llama(), tuning="lora")
    peaks = [
        peak(replace(plan, tuning=replace(plan.tuning, layers=tuple(range(first, 4))))) for first in range(4)
    ]
    assert increasing(reversed(peaks))
    assert peaks[0] == peak(plan)  # all blocks by number are all blocks


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


def test_memory_is_affine_in_depth():
    """Two depths tell all others, as a rehearsal of two depths assumes."""
    plans = [plan_for(small_llama(num_hidden_layers=n), precision="bf16") for n in (8, 16, 24)]
    low, middle, high = map(peak, plans)
    assert high - middle == middle - low


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharding", [Single(), *SHARDINGS], ids=str)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_every_term_is_positive_and_offload_never_takes_more_of_the_device(name, sharding, tuning):
    for accumulation, recompute in product((1, 4), (0, 3)):
        plan = plan_for(
            known(name), hardware=cluster(), tuning=tuning, precision="bf16-master", sharding=sharding,
            accumulation=accumulation, recompute=recompute, seq_len=512,
        )  # fmt: skip
        kept = peak(plan)
        for offload in PLACES:
            memory = predict_memory(replace(plan, offload=offload))
            assert memory.tensor_peak_bytes <= kept, offload
            for phase, terms in memory.phases.items():
                assert all(size > 0 for size in terms.values()), (phase, terms)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_more_nodes_never_take_more_of_a_device(name, sharding):
    plans = [
        plan_for(known(name), hardware=cluster(n), precision="bf16-master", sharding=sharding)
        for n in (1, 2, 4)
    ]
    assert all(a >= b * 0.999 for a, b in pairwise(map(peak, plans)))  # row padding may add a little


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_higher_stage_and_more_ranks_never_need_more_state_bytes(backend, tuning):
    def size(stage, nodes):
        sharding = Zero(stage=stage, backend=backend) if stage else Single()
        return state_bytes(
            plan_for(
                known("llama-3.1-8b"), hardware=cluster(nodes), tuning=tuning, precision="bf16-master",
                sharding=sharding,
            )
        )  # fmt: skip

    for nodes in (1, 2, 8):
        assert not_increasing([size(stage, nodes) for stage in (0, 1, 2, 3)])
    for stage in (1, 2, 3):
        assert not_increasing([size(stage, nodes) for nodes in (1, 2, 4, 8, 16)])


def test_recompute_and_smaller_devices_take_longer():
    model = known("llama-3.1-8b")

    def seconds(name="h100", **choice):
        plan = plan_for(model, hardware=gpu(name), tuning="lora", precision="bf16", seq_len=2048, **choice)
        return predict(plan).step_seconds

    assert seconds(recompute=0) < seconds(recompute=16) < seconds(recompute=32)
    assert seconds("h100") < seconds("a100-80gb") < seconds("rtx-4090")
    assert seconds(accumulation=2) > 1.9 * seconds(accumulation=1)
