"""Sharding, offload, quantisation and LOMO on the timeline: counts by hand."""

from dataclasses import replace

import pytest

from fitune.estimate.buffers import (
    block_gradients,
    block_weight_bytes,
    buffers_of,
    deepspeed_default_buffers,
)
from fitune.estimate.parameters import root_weight_bytes
from fitune.estimate.predict import predict_memory
from fitune.estimate.transfers import communication_of
from fitune.values.counts import count_parameters
from fitune.values.deepspeed import BUCKET_ELEMENTS
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Full,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Sgd,
    Zero,
)
from fitune.values.predictions import Phase
from laws.test_estimate_monotone import cluster, peak
from plans import gpu, known, plan_for

BLOCK_LINEARS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Of Llama-3.1-8B."""


def eight_b(**choice):
    base = {"hardware": cluster(), "precision": "bf16-master", "rows": 1, "seq_len": 1024, "chunk": 256}
    return plan_for(known("llama-3.1-8b"), **{**base, **choice})


def test_fsdp_gathers_three_blocks_in_forward_and_two_in_backward():
    plan = eight_b(sharding=Zero(stage=3, backend="fsdp"))
    block, root = 2 * (BLOCK_LINEARS + 2 * 4096), 2 * (2 * 128256 * 4096 + 4096)
    assert (block_weight_bytes(plan), root_weight_bytes(plan)) == (block, root)
    buffers = buffers_of(plan)
    assert (buffers.gathering, buffers.forward) == (root + 3 * block, root + 2 * block)
    assert buffers.backward == root + 2 * block
    assert buffers.reduce == 4 * (BLOCK_LINEARS + 2 * 4096) == max(block_gradients(plan, width=4))
    assert buffers.root_end == 4 * (2 * 128256 * 4096 + 4096)


def test_fsdp_below_stage_3_holds_all_weights_from_forward_to_backward():
    whole = 2 * count_parameters(known("llama-3.1-8b")).total
    stages = [predict_memory(eight_b(sharding=Zero(stage=stage, backend="fsdp"))) for stage in (2, 3)]
    gathered = [memory.phases[Phase.LOSS]["gathered weights"] for memory in stages]
    assert gathered[0] == whole > gathered[1]
    assert [memory.phases[Phase.IDLE]["weights"] for memory in stages] == [whole // 8, whole // 8]


@pytest.mark.parametrize(
    "name", ["qwen/qwen3-next-80b-a3b-instruct", "ibm-granite/granite-4.0-h-350m", "google/gemma-3n-e2b-it"]
)
def test_no_more_is_gathered_than_there_is_where_blocks_are_unlike(name):
    """Below stage 3 all blocks stay, and each lets its own weights go as it goes back."""
    model = known(name)
    plan = plan_for(model, hardware=cluster(), precision="bf16", sharding=Zero(stage=2, backend="fsdp"))
    whole, buffers = 2 * count_parameters(model).total, buffers_of(plan)
    assert buffers.loss == buffers.root + sum(buffers.backward_blocks) == whole
    assert communication_of(plan).forward.bytes == whole * 7 / 8
    assert len(set(buffers.backward_blocks)) > 1


def test_deepspeed_buffers_are_those_of_the_configuration():
    two, three = (buffers_of(eight_b(sharding=Zero(stage=s, backend="deepspeed"))) for s in (2, 3))
    assert (two.buckets, two.standing, two.update, two.forward) == (2 * BUCKET_ELEMENTS, 0, 0, 0)
    block, head = BLOCK_LINEARS + 2 * 4096, 128256 * 4096
    most, beyond = 2 * head + 4096 + 2 * block, 2 * 14336 * 4096 + BUCKET_ELEMENTS
    assert three.forward == 2 * (most + beyond)
    assert (three.loss, three.backward) == (three.forward + 2 * head, 2 * (most + head) + 2 * head)
    norms = 2 * (2 * 32 + 1) * 4096 * 7 // 8
    assert three.resident == 2 * BUCKET_ELEMENTS + norms
    named = Zero(
        stage=2, backend="deepspeed", settings=(("overlap_comm", True), ("reduce_bucket_size", 10**8))
    )
    assert buffers_of(eight_b(sharding=named)).buckets == 2 * 2 * 10**8


def test_deepspeed_gathers_beyond_its_limit_what_it_fetches_at_once_and_a_weight_that_passes_it():
    """Over 8 GPUs LoRA on 70 B: 28672 · 8192 elements pass the limit, and fill a bucket, whose copies stand beside."""
    zero = Zero(stage=3, backend="deepspeed")
    plan = plan_for(known("llama-2-70b"), hardware=cluster(), tuning="lora", precision="bf16", sharding=zero)
    block, table = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672 + 2), 32000 * 8192
    buffers = buffers_of(plan)
    assert buffers.forward == 2 * (2 * table + 8192 + 2 * block + 2 * 28672 * 8192 + BUCKET_ELEMENTS)
    assert buffers.backward == buffers.forward == buffers.loss - 2 * table
    assert predict_memory(plan).reclaimable == 0  # it gathers on the stream that computes
    alone = replace(zero, settings=(("stage3_prefetch_bucket_size", 0),))
    assert buffers_of(replace(plan, sharding=alone)).forward == 2 * (2 * table + 8192 + 2 * block)


def test_the_sum_over_several_micro_batches_keeps_deepspeeds_bucket_at_stage_1():
    one, two = (
        buffers_of(eight_b(sharding=Zero(stage=1, backend="deepspeed"), accumulation=n)) for n in (1, 2)
    )
    assert (one.standing, two.standing) == (0, 2 * BUCKET_ELEMENTS)


def test_other_trainers_have_deepspeeds_defaults_capped_by_the_model():
    two, three = (
        deepspeed_default_buffers(eight_b(sharding=Zero(stage=s, backend="deepspeed"))) for s in (2, 3)
    )
    assert (two.buckets, two.update, two.forward) == (2 * 5 * 10**8, 2 * 5 * 10**8, 0)
    assert (three.buckets, three.forward) == (2 * 2 * 5 * 10**8, 2 * 10**9)
    lomo = Lomo(adaptive=False, clip=ClipByValue(value=1.0))
    without_optimizer = replace(eight_b(sharding=Zero(stage=3, backend="deepspeed")), tuning=lomo)
    assert deepspeed_default_buffers(without_optimizer).buckets == 0


def test_ddp_keeps_its_gradients_between_steps():
    plan = eight_b(sharding=Ddp())
    gradients = 2 * count_parameters(plan.model).total
    phases = predict_memory(plan).phases
    assert [phases[phase]["gradients"] for phase in (Phase.IDLE, Phase.FORWARD, Phase.UPDATE)] == [
        gradients
    ] * 3


@pytest.mark.parametrize("adaptive", [False, True])
def test_lomo_holds_one_gradient(adaptive):
    """The largest parameter, head or embedding, 1.05 GB of 16; AdaLomo also its step in fp32."""
    lomo = Lomo(adaptive=adaptive, clip=ClipByValue(value=1.0))
    plan = eight_b(hardware=gpu("h100"), precision="bf16", tuning="full", optimizer=Sgd(), recompute=32)
    phases = predict_memory(replace(plan, tuning=lomo)).phases
    table = 128256 * 4096
    assert phases[Phase.BACKWARD].get("gradients", 0) <= 2 * table
    assert "gradients" not in phases[Phase.UPDATE]
    assert "masters" not in phases[Phase.IDLE]
    used = phases[Phase.BACKWARD]
    assert used.get("temporaries", 0) + used.get("gradients", 0) >= (2 + 4 * adaptive) * table
    assert peak(replace(plan, tuning=lomo)) < peak(plan)


def test_what_adamw_in_backward_leaves_of_an_8b_model_is_the_loss():
    """Gradients are 15.0 GiB of its backward, then 1.0; the loss, which holds the head's alone, is the peak."""
    plan = eight_b(hardware=gpu("h100"), precision="bf16", seq_len=2048, recompute=32, chunk=1024)
    plan = replace(plan, optimizer=AdamW8bit())
    in_backward = replace(plan, tuning=Full(update=InBackward(clip=ClipByNorm(max_norm=0))))
    before, now = predict_memory(plan), predict_memory(in_backward)
    assert before.phases[Phase.BACKWARD]["gradients"] == 2 * count_parameters(plan.model).total
    assert now.phases[Phase.BACKWARD].get("gradients", 0) <= 2 * 128_256 * 4096
    assert now.phases[Phase.LOSS] == before.phases[Phase.LOSS]
    assert (before.peak_phase, now.peak_phase) == (Phase.BACKWARD, Phase.LOSS)


def test_dora_keeps_two_outputs_for_each_adapted_linear():
    plan = eight_b(
        hardware=gpu("rtx-4090"), precision="bf16", tuning="lora", rank=16, targets=("q_proj", "v_proj")
    )
    dora = replace(plan, tuning=replace(plan.tuning, dora=True))
    kept = [predict_memory(p).phases[Phase.LOSS]["activations"] for p in (dora, plan)]
    assert kept[0] - kept[1] == 32 * 1024 * 2 * 2 * (4096 + 1024)
    adapters = [predict_memory(p).phases[Phase.IDLE]["adapters"] for p in (dora, plan)]
    assert adapters[0] - adapters[1] == 2 * 32 * (4096 + 1024)


def test_qlora_of_70_b_fits_two_cards_of_24_gib():
    """The case of "train a 70b at home": 34.2 GB of words and 1.1 GB of scales in halves, recompute everywhere."""
    lora = Lora(rank=16, alpha=16, dropout=0.0, targets=("q_proj", "v_proj"), base=Nf4())
    plan = plan_for(
        known("llama-2-70b"), hardware=hardware_for(gpu=find_gpu("rtx-4090"), gpus=2), precision="bf16",
        tuning="lora", rows=1, seq_len=512, chunk=256, recompute=80, sharding=Zero(stage=3, backend="fsdp"),
    )  # fmt: skip
    memory = predict_memory(replace(plan, tuning=lora))
    words, scales = 68_451_041_280 // 2, 68_451_041_280 // 64 * (1 + 4 / 256)
    tables = 560 * 1028
    dense = 2 * (2 * 32000 * 8192 + 161 * 8192)
    assert memory.phases[Phase.IDLE]["weights"] == (words + scales + dense) // 2 + tables
    assert memory.tensor_peak_bytes < 22 * 2**30
