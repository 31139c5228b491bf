"""What a row says is what its plan does; what no plan can say is given back with the reason."""

from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest

from fitune.errors import FituneError
from fitune.records.plans import Unrepresented, plan_of
from fitune.records.row import Row
from fitune.records.score import profile_of, profiles, trainer_of
from fitune.values.plan import (
    AdamW8bit,
    ChunkedLoss,
    ClipByValue,
    Ddp,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Precision,
    Single,
    Zero,
)
from jsonl import read_lines

RUNS = {facts["id"]: facts for facts in read_lines(Path(__file__).with_name("runs.jsonl"))}


def row(name, **changed):
    facts = {**RUNS[name], **changed}
    return Row(id=name, line=1, source=str(facts["source"]), facts=facts)


def plan(name, **changed):
    return plan_of(row(name, **changed))


def why_not(name, **changed):
    with pytest.raises((Unrepresented, FituneError)) as reason:
        plan(name, **changed)
    return str(reason.value)


FSDP, DEEPSPEED = (partial(Zero, backend=backend) for backend in ("fsdp", "deepspeed"))
CLIP = ClipByValue(value=1.0)
PACKED = Lora(
    rank=16, alpha=16, dropout=0.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"), base=Nf4(double_quant=True)
)  # fmt: skip
IN_BACKWARD = Full(update=InBackward(clip=CLIP))
SAID = [  # row, what is changed of it, where its plan says it, words -> value
    (
        "full-one-device", "optimizer", "tuning",
        {
            "AdamW": Full(), "LOMO": Lomo(adaptive=False, clip=CLIP), "AdamW optimizer-in-backward": IN_BACKWARD,
            "AdamW, optimizer_in_bwd": IN_BACKWARD, "AdamW optimizer step in backward": IN_BACKWARD,
        },
    ),
    (
        "full-fsdp-two", "sharding", "sharding",
        {
            "FSDP2": FSDP(stage=3), "FSDP SHARD_GRAD_OP": FSDP(stage=2), "FSDP NO_SHARD (ddp)": Ddp(), "DDP": Ddp(),
            "distributed data parallel": Ddp(), "Fully Sharded Data Parallel": FSDP(stage=3),
            "HSDP": FSDP(stage=3, hybrid=True), "ZeRO-3 data parallel": DEEPSPEED(stage=3),
            "DeepSpeed ZeRO-2": DEEPSPEED(stage=2), "deepspeed zero3": DEEPSPEED(stage=3),
        },
    ),
    (
        "qlora-fsdp-frozen", "quant", "tuning.base",
        {
            "bnb nf4": Nf4(double_quant=True), "bnb fp4": Nf4(double_quant=True), "GPTQ int4": Nf4(double_quant=True),
            "LLM.int8": Hqq(bits=8, group_size=4096), "HQQ 2 bit": Hqq(bits=2),
            "HQQ 4-bit, group size none": Hqq(bits=4, group_size=4096),
            "hqq 4bit group_size=128": Hqq(bits=4, group_size=128),
            "hqq 4bit group_size=0": Hqq(bits=4, group_size=4096),
        },
    ),
    (
        "qlora-fsdp-frozen", "method", "tuning",
        {"QLoRA": PACKED, "SFT with QLoRA": PACKED, "DoRA (not full)": replace(PACKED, dora=True)},
    ),
    ("lora-logits-decide", "method", "tuning.modules_to_save", {"lora+emb": ("embed_tokens", "lm_head")}),
    ("lora-logits-decide", "notes", "tuning.dropout", {"lora_dropout=0.05": 0.05}),
    (
        "lora-logits-decide", "lora_targets", "tuning.targets",
        {
            "c_attn,c_proj,w1": (*PACKED.targets, "gate_proj", "down_proj"), "wq,wv": ("q_proj", "v_proj"),
            "q_proj, v_proj, lm_head": ("q_proj", "v_proj"),
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "place", "said"), SAID, ids=lambda value: str(value)[:20])
def test_words_of_a_row_are_what_its_plan_does(name, key, place, said):
    for words, value in said.items():
        assert attrgetter(place)(plan(name, **{key: words})) == value, words


def test_a_full_training_in_pure_bf16():
    told = plan("full-one-device")
    assert (told.precision, told.sharding, told.recompute.blocks) == (Precision.BF16, Single(), 32)
    assert told.batch.micro_batch_tokens == 4 * 4096
    assert plan("full-one-device", optimizer="AdamW 8bit").optimizer == AdamW8bit()


def test_a_fused_linear_loss_is_chunked_as_liger_does_it():
    """65,536 tokens, V 32,000, h 4,096: 8 parts of 8,192."""
    said = {"seq_len": 4096, "micro_batch": 16, "vocab": 32000, "params_b": None}
    assert plan("lora-block-decides", **said).loss == ChunkedLoss(chunk_tokens=8192)


def test_tied_embeddings_as_the_row_says_or_as_its_parameters_do():
    small = {"model": "someone/small", "vocab": 128256, "params_b": 7.51}  # 8.03 B with tables of their own
    for tied, said in ((True, {"params_b": None}), (False, {}), (True, small)):
        assert plan("full-one-device", tied_embeddings=tied, **said).model.tied_embeddings == tied


def test_matrices_of_experts_were_linears_that_quantisers_pack():
    """Before transformers 5."""
    shapes = dict.fromkeys(
        ("params_b", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    )
    model = plan("qlora-fsdp-frozen", **shapes, model="Qwen/Qwen3-30B-A3B").model
    assert {linear.adaptable for linear in model.linears if linear.part == "experts"} == {True}


def test_nodes_and_network_in_words():
    for gpus, said, nodes in (
        (4, {"sharding": "DeepSpeed ZeRO-2, 2 nodes x 2 GPUs"}, 2), (2, {"sharding": "ZeRO-2, 0 nodes x 8 GPUs"}, 1),
        (96, {"gpu": "H100-80GB (800 Gbps)"}, 12),
    ):  # fmt: skip
        hardware = plan("full-fsdp-two", n_gpus=gpus, **said).hardware
        assert (hardware.nodes, hardware.gpus_per_node) == (nodes, gpus // nodes)
    assert hardware.internode_bandwidth == 100e9


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tp": 8}, "tp = 8"),
        ({"pp": 2}, "pp = 2"),
        ({"cp": 2}, "cp = 2"),
        ({"seq_len": None}, "seq_len"),
        ({"gpu": "RTX 4091"}, "did you mean 'rtx-4090'"),
        ({"optimizer": "Muon"}, "optimizer 'muon'"),
        ({"method": "prompt tuning"}, "method 'prompt tuning'"),
        ({"act_ckpt": None}, "recomputed"),
        ({"optimizer": "GaLoreAdamW"}, "optimizer 'galoreadamw'"),
        ({"precision_mode": "fp8"}, "8 bit"),
        ({"sharding": "device_map=auto", "n_gpus": 2}, "splits a model"),
        ({"method": "lora", "lora_targets": "q_proj,router"}, "'router' is no linear of this model"),
        ({"model": "new/model", "hidden": None}, "hidden not stated"),
        ({"model": "new/mixture", "params_b": 30.0}, "7.24 B parameters, the row says 30.00 B"),
    ],
)
def test_what_no_plan_can_say_is_given_back(changed, why):
    assert why in why_not("full-one-device", **changed)


def test_trainers_are_known_by_name_and_take_over_what_they_are_built_on():
    known = profiles()
    assert known["trl"].switches["bytes_per_logit"] == known["transformers"].switches["bytes_per_logit"]
    assert profile_of(row("full-one-device", source="someone", must_assume="TRL SFTTrainer")).name == "trl"
    assert profile_of(row("full-one-device", source="someone", must_assume=None)).name == "defaults"
    assert profile_of(row("full-one-device", source="fms_accel", must_assume=None)).name == "fms-acceleration"
    assert profile_of(row("full-one-device", source="fms_accel"), left_out=True).name == "transformers"
    assert profile_of(row("full-one-device", source="mosaicml"), left_out=True).name == "defaults"


def test_what_a_row_says_wins_over_its_trainer():
    def switches(**changed):
        told = row("lora-logits-decide", source="trl", **changed)
        return trainer_of(told, profile_of(told))

    assert switches().fp32_trained
    assert [switches(notes=words).eager_mlp for words in ("", "FOAK kernels")] == [False, True]
    assert not switches(optimizer_dtype="bf16").fp32_trained
    assert not switches(optimizer="AdamW (fused)").foreach
    assert switches(notes="").reentrant
    assert not switches(notes="use_reentrant=False").holds_inputs
    assert not switches(notes="use_reentrant=False").reentrant


@pytest.mark.parametrize(
    ("source", "plain", "fast", "linear"),
    [
        ("trl", 14, 10, 2),
        ("fms-acceleration:scripts/benchmarks/refs/a100_80gb_liger.csv", 12, 8, 6),
        ("fms-acceleration:scripts/benchmarks/refs/a100_80gb.csv", 14, 10, 6),
        ("fsdp_qlora", 12, 12, 12),  # it has no other loss
        ("unsloth", 2, 2, 2),
    ],
)
def test_bytes_of_a_logit_by_trainer_and_loss(source, plain, fast, linear):
    for words, each in ((False, plain), ("fast cross-entropy", fast), ("liger FusedLinearCE", linear)):
        told = row("lora-logits-decide", source=source, must_assume=None, fused_ce=words)
        assert trainer_of(told, profile_of(told)).bytes_per_logit == each
    assert profile_of(told, left_out=True).name in ("trl", "transformers", "unsloth")
