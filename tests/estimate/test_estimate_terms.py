"""Terms against hand counts: each number here was worked out on paper from the formula's source."""

from dataclasses import replace

import pytest

from fitune.errors import torch_release
from fitune.estimate.blocks.block import block_stages
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.predict import largest_batch, predict_memory
from fitune.estimate.states import update_temporaries_bytes
from fitune.units import MIB
from fitune.values.counts import count_parameters
from fitune.values.machines.hardware import Measured
from fitune.values.model.block_profile import BatchShape
from fitune.values.plan import AdamW, AdamW8bit, Nf4, Sgd
from fitune.values.predictions import Phase
from plans import CPU, gpu, known, plan_for, small_llama


def kept_per_token(plan, *, rows=1, **where):
    shape = BatchShape(tokens=1024, supervised_tokens=1024, rows=rows)
    return sum(stage.kept for stage in block_stages(plan, shape, **where)) / 1024


@pytest.mark.parametrize(
    ("torch", "release"),
    [({"torch": "2.16.0.dev20261101+cu132"}, (2, 16)), ({}, (99, 0))],
)
def test_the_release_of_torch_is_read_without_loading_it(monkeypatch, torch, release):
    monkeypatch.setattr("fitune.errors.installed_versions", lambda libraries: torch)
    assert torch_release.__wrapped__() == release


def test_fused_kernels_take_one_key_head_from_torch_2_14(monkeypatch):
    """Falcon-7B's: 71 fp32 scores for each pair of tokens of the stream before, output and fp32 log-sum-exp since."""
    plan = plan_for(known("falcon-7b"), precision="bf16", hardware=gpu("h100"))
    monkeypatch.setattr("fitune.values.model.traits.torch_release", lambda: (2, 13))
    written = kept_per_token(plan)
    monkeypatch.setattr("fitune.values.model.traits.torch_release", lambda: (2, 14))
    q, k, n = 71 * 64, 64, 71
    in_fp32, fused = 4 * (q + 2 * k), 2 * (q + 2 * k) + 2 * q + 4 * n
    assert written - kept_per_token(plan) == 4 * n * 1024 + in_fp32 + 2 * q - fused


def test_llama_block_in_bf16_keeps_the_published_sum():
    """t·(16h + 4q + 4k + 8f + 4n + 8) for Llama-3-8B with one row: no joined copy of the attention output."""
    h, q, k, f, n = 4096, 4096, 1024, 14336, 32
    plan = plan_for(known("llama-3-8b"), precision="bf16")
    assert kept_per_token(plan) == 16 * h + 4 * q + 4 * k + 8 * f + 4 * n + 8


def test_query_and_key_norms_add_their_share():
    """+ 6(q + k) + 4(n + kv heads) for Qwen3."""
    plan = plan_for(known("qwen3-4b"), precision="bf16")
    h, q, k, f, n, kv = 2560, 4096, 1024, 9728, 32, 8
    assert kept_per_token(plan) == 16 * h + 4 * q + 4 * k + 8 * f + 4 * n + 8 + 6 * (q + k) + 4 * (n + kv)


def test_lora_on_all_linears_saves_the_frozen_norms_and_adds_the_low_rank_outputs():
    """full − 4h + 14r."""
    model = known("llama-3-8b")
    full = kept_per_token(plan_for(model, precision="bf16"))
    lora = kept_per_token(plan_for(model, precision="bf16", tuning="lora", rank=16))
    assert lora == full - 4 * 4096 + 14 * 16


def test_lora_on_queries_and_values_alone_drops_the_inputs_nobody_needs():
    """No input of the MLP norm, of the down and of the output projection: 2h + 2f + 2q less than all linears."""
    model = known("llama-3-8b")
    every = kept_per_token(plan_for(model, precision="bf16", tuning="lora", rank=16), rows=2)
    two = kept_per_token(
        plan_for(model, precision="bf16", tuning="lora", rank=16, targets=("q_proj", "v_proj")), rows=2
    )
    assert every - two == 2 * 4096 + 2 * 14336 + 2 * 4096 + 2 * 16 * 5


@pytest.mark.parametrize("gradient_enters", [True, False])
def test_dropout_keeps_an_input_and_a_mask_for_each_linear(gradient_enters):
    """Each target keeps its own dropped copy and a mask of one byte on CUDA: + 3·in per target, − 4h − 2f. No gradient
    goes into the first block, through what queries, keys and values dropped: no masks of theirs, − 3h."""
    model, card = known("llama-3-8b"), gpu("h100")
    dropped, undropped = (
        kept_per_token(
            plan_for(model, precision="bf16", hardware=card, attention="flash", tuning="lora", dropout=p),
            gradient_enters=gradient_enters,
        )
        for p in (0.1, 0.0)
    )
    inputs = 6 * 4096 + 14336
    shared = 2 * 4096 + 14336  # the output projection's input is kept by attention in any case
    masks_of_the_first = 0 if gradient_enters else 3 * 4096
    assert dropped - undropped == 3 * inputs - 2 * shared - masks_of_the_first


def test_a_block_of_liger_keeps_two_norms_with_their_outputs_and_no_work_of_the_gate():
    """t·(8h + 8 + 2q + 4k + 2q + 4n + 6f), full in bf16, FlashAttention in one call."""
    h, q, k, f, n = 4096, 4096, 1024, 14336, 32
    plan = plan_for(
        known("llama-3-8b"), hardware=gpu("h100"), precision="bf16", kernels="liger", attention="flash"
    )
    assert kept_per_token(plan) == 8 * h + 8 + 2 * q + 4 * k + 2 * q + 4 * n + 6 * f


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_first_block_keeps_no_norm_under_lora(precision):
    """4h + 4 a token in either precision: the norm's input is squared in fp32."""
    plan = plan_for(known("llama-3-8b"), precision=precision, tuning="lora")
    shape = BatchShape(tokens=1, supervised_tokens=1, rows=1)
    first = block_stages(plan, shape, gradient_enters=False)[0].kept
    other = block_stages(plan, shape)[0].kept
    assert other - first == 4 * 4096 + 4


def test_a_packed_weight_is_made_whole_for_its_product_and_its_gradient():
    """+ e·out·in of the largest packed weight of each product: queries, output, gate and down of Llama-3-8B; of down
    an adapter's scaled gradient, t·e·h, is gone by then."""
    model, shape = known("llama-3-8b"), BatchShape(tokens=1024, supervised_tokens=1024, rows=1)
    dense = plan_for(model, precision="bf16", tuning="lora")
    packed = replace(dense, tuning=replace(dense.tuning, base=Nf4()))
    more = {
        stage.name: stage.backward - other.backward
        for stage, other in zip(block_stages(packed, shape), block_stages(dense, shape), strict=True)
    }
    assert {name: size for name, size in more.items() if size} == {
        "queries, keys, values": 2 * 4096 * 4096,
        "attention output": 2 * 4096 * 4096,
        "MLP inputs": 2 * 14336 * 4096,
        "MLP output": 2 * 14336 * 4096 - 2 * 1024 * 4096,
    }
    forward = max(stage.forward for stage in block_stages(packed, shape))
    assert forward == 2 * (14336 * 4096 + 1024 * (2 * 4096 + 14336))  # beside residual, input and output


def test_adapted_experts_keep_their_matrices_in_the_products_order():
    """e·r·(2f + h) for each of Mixtral's eight experts, however many tokens there are."""
    stacks = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    plan = plan_for(known("mixtral-8x7b"), precision="bf16", tuning="lora", rank=16, targets=stacks)

    def kept(tokens):
        shape = BatchShape(tokens=tokens, supervised_tokens=tokens, rows=1)
        return sum(stage.kept for stage in block_stages(plan, shape))

    assert 2 * kept(1024) - kept(2048) == 2 * 16 * (2 * 14336 + 4096) * 8


@pytest.mark.parametrize(
    ("precision", "kernels", "each"), [("fp32", "torch", 4), ("bf16", "torch", 6), ("bf16", "liger", 2)]
)
def test_bytes_of_a_logit(precision, kernels, each):
    """Of each supervised token, beside the hidden states gathered for it and their gradient."""
    model, width = known("llama-3-8b"), 4 if precision == "fp32" else 2
    plan = plan_for(model, precision=precision, tuning="lora", rows=1, seq_len=512, kernels=kernels)
    loss = predict_memory(plan).phases[Phase.LOSS]["loss"]
    tokens = largest_batch(plan).supervised_tokens
    assert loss == tokens * (model.vocab_size * each + 2 * model.hidden_size * width)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("bf16-master", AdamW(), 16),
        ("fp16", AdamW(), 16),
        ("fp32", AdamW(), 16),
        ("bf16", AdamW(), 8),
        ("bf16-master", Sgd(), 8),
        ("bf16-master", Sgd(momentum=0.9), 12),
        ("fp32", Sgd(), 8),
        ("bf16", Sgd(momentum=0.9), 6),
        ("bf16", AdamW8bit(), 4 + 2 * (1 + 4 / 256)),
    ],
)
def test_bytes_per_trained_parameter(precision, optimizer, per_parameter):
    """ZeRO's 2 + 2 + K with K = 12 for Adam, 4 for SGD, 8 with momentum; without masters all in one type."""
    model = known("llama-2-7b")
    plan = plan_for(model, hardware=gpu("h100"), precision=precision, optimizer=optimizer)
    update = predict_memory(plan).phases[Phase.UPDATE]
    expected = per_parameter * count_parameters(model).total
    assert sum(update.values()) - update.get("temporaries", 0) == pytest.approx(expected, rel=1e-6)


def test_masters_are_stepped_bucket_by_bucket():
    tiny = plan_for(small_llama(), precision="bf16-master")
    trained = count_parameters(tiny.model).total
    assert update_temporaries_bytes(tiny) == max(2 * trained + 2 * 600 * 64, 4 * 600 * 64)
    adapters = plan_for(known("llama-3-8b"), precision="bf16-master", tuning="lora", rank=16)
    assert update_temporaries_bytes(adapters) == 32 * MIB
    whole = plan_for(known("llama-3-8b"), precision="bf16-master")
    assert update_temporaries_bytes(whole) == 4 * 128256 * 4096
    assert update_temporaries_bytes(plan_for(small_llama(), precision="bf16")) == 0


def test_ready_holds_weights_and_states_alone():
    plan = plan_for(known("llama-3-8b"), precision="bf16-master", tuning="lora", rank=16)
    adapters = 41_943_040
    assert predict_memory(plan).phases[Phase.IDLE] == {
        "weights": 8_030_261_248 * 2,
        "adapters": adapters * 2,
        "masters": adapters * 4,
        "optimizer": adapters * 8,
    }


def test_a_24_gib_card_lets_22_and_a_half_be_used_once_one_was_measured():
    card = gpu("rtx-3090")
    assert card.gpu.memory_bytes == 24 * 1024 * MIB
    measured = replace(card, measured=Measured(cards=1, memory_error=0.004, speed_error=-0.06))
    assert usable_bytes(measured) == 22.5 * 1024 * MIB
    assert usable_bytes(card) == pytest.approx(0.97 * 22.5 * 1024 * MIB, abs=1)
    assert usable_bytes(CPU) == usable_bytes(replace(CPU, measured=measured.measured))


@pytest.mark.parametrize(
    ("growing", "recompute", "percent"), [(True, 0, 5), (True, 2, 10), (False, 0, 30), (False, 2, 50)]
)
def test_the_allocator_loses_a_part_of_what_comes_and_goes(growing, recompute, percent):
    """As measured on the null GPU (results/null_gpu.json)."""
    hardware = replace(gpu("rtx-3090"), growing_segments=growing)
    memory = predict_memory(plan_for(small_llama(), hardware=hardware, recompute=recompute))
    moving = memory.tensor_peak_bytes - sum(memory.phases[Phase.IDLE].values())
    assert memory.outside["allocator slack"] == pytest.approx(percent / 100 * moving, abs=1)


def test_on_a_cpu_nothing_is_beside_the_tensors():
    assert predict_memory(plan_for(small_llama())).outside == {}
    assert set(predict_memory(plan_for(small_llama(), hardware=gpu("t4"))).outside) == {
        "CUDA context",
        "cuBLAS workspace",
        "allocator slack",
    }


def test_the_largest_batch_supervises_all_but_the_first_token_of_each_row():
    plan = plan_for(small_llama(), rows=4, seq_len=64)
    unpacked = largest_batch(replace(plan, batch=replace(plan.batch, packing=False)))
    assert (unpacked.tokens, unpacked.supervised_tokens, unpacked.rows, unpacked.row_tokens) == (
        256,
        252,
        4,
        64,
    )
    packed = largest_batch(plan)
    assert (packed.tokens, packed.supervised_tokens, packed.row_tokens) == (256, 252, 64)


def test_one_pack_may_hold_several_rows_whose_outputs_are_joined():
    plan = plan_for(known("llama-3.1-8b"), precision="bf16", rows=1, seq_len=1024)
    unpacked = replace(plan, batch=replace(plan.batch, packing=False))
    more = [sum(predict_memory(p).phases[Phase.FORWARD].values()) for p in (plan, unpacked)]
    assert more[0] - more[1] == 32 * 2 * 4096 * 1024
