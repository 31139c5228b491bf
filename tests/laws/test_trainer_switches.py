"""The switches of estimate/trainer.py against the real thing on a CPU: every live tensor counted."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.estimate.buffers import block_weight_bytes
from fitune.estimate.memory import memory_of
from fitune.estimate.parameters import root_weight_bytes
from fitune.estimate.predict import largest_batch, predict_memory
from fitune.estimate.trainer import Trainer, describe_step_of
from fitune.measure.memory import LiveTensors
from fitune.models import liger
from fitune.rehearse.step import trace_plan
from fitune.values.plan import ChunkedLoss, Dense, Nf4, PlainLoss, Zero
from fitune.values.predictions import Phase
from plans import gpu, plan_for, small_llama
from rehearse.tiny_configs import tensor_peak, tiny

TOKENS, SIZES = (2, 64), {"hidden_size": 256, "intermediate_size": 640}


@pytest.mark.parametrize(("caller_holds", "each"), [(True, 14), (False, 12)])
def test_losses_of_transformers_hold_so_many_bytes_for_each_logit(caller_holds, each):
    """16-bit logits, held by the caller (4.46 to 4.48, ForCausalLMLoss) or not (4.45, LlamaForCausalLM.forward); their
    fp32 copy, its shifted copy, log-softmax."""
    hidden_BTH = torch.randn(2, 129, 4, dtype=torch.bfloat16, requires_grad=True)
    head_VH = torch.randn(1000, 4, dtype=torch.bfloat16)
    labels_T = torch.randint(0, 1000, (2 * 128,))
    with LiveTensors([hidden_BTH, head_VH, labels_T]) as live:
        logits_BTV = hidden_BTH @ head_VH.T
        held = logits_BTV if caller_holds else None
        logits_BTV = logits_BTV.float()
        shifted_BTV = logits_BTV[:, :-1].contiguous()
        cross_entropy(shifted_BTV.view(-1, 1000), labels_T)
    assert (held is None) != caller_holds
    assert max(live.peaks.values()) == pytest.approx(each * 2 * 129 * 1000, rel=0.02)


def test_a_chunk_of_logits_cast_to_fp32_and_back_by_hand():
    """Liger's loss in fms-acceleration: 2 + 4 for each logit of 64 tokens; V 600; beside them 2 hidden states of 64
    for each of the 252 tokens that have a next one."""
    plan = plan_for(
        small_llama(), tuning="lora", precision="bf16", kernels="liger", loss=ChunkedLoss(chunk_tokens=64)
    )
    loss = memory_by(Trainer(bytes_per_logit=6), plan).phases[Phase.LOSS]
    assert loss["loss"] == 6 * 64 * 600 + 2 * 2 * 252 * 64


def test_adamw_of_many_tensors_holds_one_more_set():
    weights = [torch.randn(64, 1000, requires_grad=True) for _ in range(8)]
    optimizer = torch.optim.AdamW(weights, foreach=True)
    for step in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        alive = [*weights, *(weight.grad for weight in weights)]
        states = [value for state in optimizer.state.values() for value in state.values()]
        with LiveTensors([*alive, *states]) as live:
            optimizer.step()
        if step == 1:  # states exist
            more = max(live.peaks.values()) - 4 * 4 * 64_000 * 8
            assert more == pytest.approx(4 * 64_000 * 8, rel=0.01)
    plan = plan_for(small_llama(), precision="bf16")
    extra = _update_bytes(plan, Trainer(foreach=True)) - _update_bytes(plan, Trainer())
    assert extra == predict_memory(plan).phases[Phase.UPDATE]["weights"]


def test_switches_by_hand():
    """small_llama: h 64, V 600; 4 rows of 64 tokens."""
    plan = plan_for(small_llama(), tuning="lora", precision="bf16", recompute=4)
    loss = memory_by(Trainer(bytes_per_logit=14), plan).phases[Phase.LOSS]
    assert loss["loss"] == 14 * 256 * 600
    packed = replace(plan, tuning=replace(plan.tuning, base=Nf4()))
    assert isinstance(packed.loss, PlainLoss)
    narrow = predict_memory(packed).phases[Phase.LOSS]
    wide = memory_by(Trainer(fp32_root=True, fp32_stream=True), packed).phases[Phase.LOSS]
    assert wide["weights"] - narrow["weights"] == 2 * (2 * 600 * 64 + 64)
    assert wide["recompute inputs"] == 2 * narrow["recompute inputs"]


def test_fsdp1_over_frozen_blocks_by_hand():
    """At block 1: two inputs, and input and gradient of each block behind it; root and one block gathered.

    With reentrant checkpoints at block 0, whose norm keeps its input, too. The output made again stands in place of the
    gradient that reaches the block: it is that of the next one's input.
    """
    plan = plan_for(small_llama(), tuning="lora", precision="bf16", recompute=4)
    plan = replace(plan, hardware=gpu("a100-80gb", gpus=2), sharding=Zero(stage=3, backend="fsdp"))
    shape = replace(largest_batch(plan), rows=1)
    once, again = (
        memory_by(
            Trainer(fsdp1=True, holds_inputs=True, bytes_per_logit=1, reentrant=reentrant), plan, shape
        ).phases[Phase.BACKWARD]
        for reentrant in (False, True)
    )
    assert once["recompute inputs"] == (2 + 2 * 2) * 256 * 64 * 2
    assert once["gathered weights"] == root_weight_bytes(plan) + block_weight_bytes(plan)
    assert again["recompute inputs"] == (1 + 3 * 2) * 256 * 64 * 2
    assert again["temporaries"] == once["temporaries"]


def test_deepspeeds_bucket_stands_however_little_is_trained():
    plan = plan_for(small_llama(), tuning="lora", precision="bf16")
    plan = replace(plan, hardware=gpu("a100-80gb", gpus=2), sharding=Zero(stage=2, backend="deepspeed"))
    loss = memory_by(Trainer(default_buckets=True), plan).phases[Phase.LOSS]
    assert loss["reduce buffers"] == 2 * 500_000_000


def memory_by(trainer, plan, shape=None):
    return memory_of(describe_step_of(trainer, plan, shape or largest_batch(plan)))


def _update_bytes(plan, trainer):
    return sum(memory_by(trainer, plan).phases[Phase.UPDATE].values())


def kept_by_a_block(*, fp32_adapters, autocast, fp32_model=False):
    """Bytes that one more block keeps from forward to backward."""
    return _kept(4, fp32_adapters, autocast, fp32_model) - _kept(3, fp32_adapters, autocast, fp32_model)


def _kept(layers, fp32_adapters, autocast, fp32_model):
    config = LlamaConfig(
        **SIZES, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32 if fp32_model else torch.bfloat16)
    if not fp32_model:
        lora = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=fp32_adapters).get_base_model()
    model.train()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        LiveTensors(list(model.parameters())) as live,
    ):
        before = live.current_bytes
        output = model.model(torch.randint(0, 100, TOKENS), use_cache=False)
        kept = live.current_bytes - before
    del output
    return kept


@pytest.mark.parametrize("autocast", [False, True])
def test_fp32_adapters_keep_a_cast_input_for_every_linear(autocast):
    measured = kept_by_a_block(fp32_adapters=True, autocast=autocast)
    plan = plan_for(
        small_llama(**SIZES), tuning="lora", precision="bf16", rank=4, rows=TOKENS[0], seq_len=TOKENS[1]
    )
    shape = replace(largest_batch(plan), rows=1)
    step = describe_step_of(Trainer(fp32_trained=True, autocast=autocast), plan, shape)
    assert step.blocks[-1].kept == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_reentrant_checkpoint_holds_the_output_that_it_made_again(dropout):
    """One hidden state more than one that is not; a wide MLP, so that a block's middle is the worst moment."""
    sizes = {"hidden_size": 256, "intermediate_size": 896, "vocab_size": 100}
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    plan = plan_for(
        small_llama(**sizes), tuning="lora", precision="bf16", rank=4, rows=2, seq_len=128, recompute=4
    )
    plan = replace(plan, tuning=replace(plan.tuning, dropout=dropout, targets=targets))
    once, again = (_backward_bytes(sizes, plan.tuning, reentrant=reentrant) for reentrant in (False, True))
    assert again - once == 2 * 256 * 256
    shape = replace(largest_batch(plan), rows=1)
    predicted = memory_by(Trainer(fp32_trained=True, reentrant=True), plan, shape).phases[Phase.BACKWARD]
    assert sum(predicted.values()) - predicted["optimizer"] == pytest.approx(again, rel=0.02)


def _backward_bytes(sizes, tuning, *, reentrant):
    """Bytes of the worst moment of a real backward, all blocks recomputed."""
    config = LlamaConfig(
        **sizes, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    lora = LoraConfig(r=tuning.rank, lora_dropout=tuning.dropout, target_modules=list(tuning.targets))
    model = get_peft_model(model, lora).get_base_model()
    model.enable_input_require_grads()
    model.train()
    labels_BT = torch.randint(0, 100, (2, 128))
    with LiveTensors(list(model.parameters())) as live:
        logits_BTV = model(labels_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV.float().view(-1, 100), labels_BT.view(-1))
        del logits_BTV
        live.enter(Phase.BACKWARD)
        loss.backward()
    return live.peaks[Phase.BACKWARD]


@pytest.mark.parametrize(
    ("trainer", "base", "each"),
    [
        (Trainer(fp32_trained=True), Dense(), 1 + 4),  # a mask of a byte, and the fp32 input
        (Trainer(fp32_trained=True, autocast=True), Dense(), 1 + 2),
        (Trainer(fp32_trained=True, autocast=True, eager_mlp=True), Nf4(), 2),  # fused: no mask
    ],
)
def test_inputs_that_adapters_drop_out_by_hand(trainer, base, each):
    """q and o of a block, h 64 each, on a GPU; fused adapters keep the norm's output beside them."""
    plan = plan_for(
        small_llama(), tuning="lora", precision="bf16", hardware=gpu("a100-80gb"), kernels="liger"
    )
    plan = replace(plan, tuning=replace(plan.tuning, base=base, dropout=0.1, targets=("q_proj", "o_proj")))
    shape = replace(largest_batch(plan), rows=1)
    told = describe_step_of(trainer, plan, shape).blocks[-1].kept
    plain = replace(plan, tuning=replace(plan.tuning, base=Dense(), dropout=0.0, targets=("o_proj",)))
    outputs = 2 * plan.tuning.rank  # of A, for q
    without = describe_step_of(Trainer(eager_mlp=trainer.eager_mlp), plain, shape).blocks[-1].kept
    assert told - without == 256 * (2 * 64 * each + outputs + 2 * 64 * (base != Dense()))


def test_repeated_keys_and_values_by_hand():
    """Mistral of 4 query heads and 2 of keys, 16 each: 32 more of both; Llama's are not repeated."""
    for family, more in (("mistral", 2 * 32 * 2 * 128), ("llama", 0)):
        plan = plan_for(tiny(family)[1], tuning="lora", precision="bf16", seq_len=128, rows=1)
        shape = largest_batch(plan)
        kept = [
            describe_step_of(Trainer(bytes_per_logit=14, repeats_keys=repeats), plan, shape).blocks[-1].kept
            for repeats in (False, True)
        ]
        assert kept[1] - kept[0] == more


def test_fp32_weights_under_autocast_leave_16_bit_copies():
    """Of every linear and the head. Of what a block keeps a tenth is missing: norms multiply by an fp32 weight, and
    queries and keys are turned in fp32."""
    measured = kept_by_a_block(fp32_adapters=False, autocast=True, fp32_model=True)
    plan = plan_for(small_llama(**SIZES), precision="bf16", rows=TOKENS[0], seq_len=TOKENS[1])
    shape = replace(largest_batch(plan), rows=1)
    trainer = Trainer(fp32_trained=True, autocast=True)
    step = describe_step_of(trainer, plan, shape)
    copies = 2 * sum(m.in_features * m.out_features for m in plan.model.linears)
    assert step.blocks[-1].kept + copies == pytest.approx(measured, rel=0.12)
    assert step.weight_copies == plan.model.num_layers * copies + 2 * 600 * SIZES["hidden_size"]


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_fused_norms_beside_an_mlp_of_small_operations(monkeypatch, tuning):
    """The rehearsal of Liger's norms and rotary positions with the MLP left as transformers has it."""
    monkeypatch.setattr(liger, "_gated_mlp", lambda module, *_: module.forward)
    config, spec = tiny("llama")
    plan = plan_for(
        spec, hardware=gpu("h100"), seq_len=128, rows=2, kernels="liger", attention="flash", tuning=tuning,
        precision="bf16",
    )  # fmt: skip
    trace, _ = trace_plan(plan, config, exact=True)
    traced = tensor_peak(trace)
    predicted = memory_by(Trainer(eager_mlp=True), plan).tensor_peak_bytes
    assert predicted == pytest.approx(traced, rel=0.02)
    assert predict_memory(plan).tensor_peak_bytes < 0.98 * traced
