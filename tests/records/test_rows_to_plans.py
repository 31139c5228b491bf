"""What a row says is what its plan does; what no plan can say is given back with the reason."""

from functools import partial
from pathlib import Path

import pytest

from fitune.errors import FituneError
from fitune.records.plans import Unrepresented, plan_of
from fitune.records.row import Row
from fitune.records.score import profile_of, profiles, trainer_of
from fitune.values.plan import (
    AdamW8bit,
    ChunkedLoss,
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


def lora(name, **changed):
    tuning = plan(name, **changed).tuning
    assert isinstance(tuning, Lora)
    return tuning


def test_full_training_in_pure_bf16():
    told = plan("full-one-device")
    assert isinstance(told.tuning, Full)
    assert told.precision is Precision.BF16
    assert isinstance(told.sharding, Single)
    assert told.recompute.blocks == 32
    assert told.batch.micro_batch_tokens == 4 * 4096


def test_lora_on_a_packed_base():
    assert lora("qlora-fsdp-frozen") == Lora(
        rank=16, alpha=16, dropout=0.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"), base=Nf4(double_quant=True)
    )  # fmt: skip


@pytest.mark.parametrize("words", ["LoRA SFT", "SFT with QLoRA", "DoRA (not full)"])
def test_adapters_are_no_full_training_whatever_they_are_trained_for(words):
    assert isinstance(plan("qlora-fsdp-frozen", method=words).tuning, Lora)


FSDP, DEEPSPEED = (partial(Zero, backend=backend) for backend in ("fsdp", "deepspeed"))


@pytest.mark.parametrize(
    ("words", "sharding"),
    [
        ("FSDP FULL_SHARD", FSDP(stage=3)),
        ("FSDP2", FSDP(stage=3)),
        ("FSDP SHARD_GRAD_OP", FSDP(stage=2)),
        ("FSDP NO_SHARD (ddp)", Ddp()),
        ("DDP", Ddp()),
        ("distributed data parallel", Ddp()),
        ("Fully Sharded Data Parallel", FSDP(stage=3)),
        ("ZeRO-3 data parallel", DEEPSPEED(stage=3)),
        ("HSDP", FSDP(stage=3, hybrid=True)),
        ("DeepSpeed ZeRO-2", DEEPSPEED(stage=2)),
        ("deepspeed zero3", DEEPSPEED(stage=3)),
    ],
)
def test_sharding_by_its_words(words, sharding):
    assert plan("full-fsdp-two", sharding=words).sharding == sharding


@pytest.mark.parametrize(
    ("quant", "base"),
    [
        ("bnb nf4", Nf4(double_quant=True)),
        ("bnb fp4", Nf4(double_quant=True)),
        ("GPTQ int4", Nf4(double_quant=True)),
        ("LLM.int8", Hqq(bits=8, group_size=4096)),
        ("HQQ 2 bit", Hqq(bits=2)),
        ("HQQ 4-bit, group size none", Hqq(bits=4, group_size=4096)),
        ("hqq 4bit group_size=128", Hqq(bits=4, group_size=128)),
        ("hqq 4bit group_size=0", Hqq(bits=4, group_size=4096)),
    ],
)
def test_quantisers_by_their_words(quant, base):
    assert lora("qlora-fsdp-frozen", quant=quant).base == base


def test_optimizers_by_their_words():
    assert isinstance(plan("full-one-device", optimizer="LOMO").tuning, Lomo)
    assert isinstance(plan("full-one-device", optimizer="AdamW 8bit").optimizer, AdamW8bit)
    for words in (" optimizer-in-backward", ", optimizer_in_bwd", " optimizer step in backward"):
        tuning = plan("full-one-device", optimizer=f"AdamW{words}").tuning
        assert isinstance(tuning, Full)
        assert isinstance(tuning.update, InBackward)


def test_a_fused_linear_loss_is_chunked_as_liger_does_it():
    """65,536 tokens, V 32,000, h 4,096: 8 parts of 8,192."""
    assert plan(
        "lora-block-decides", seq_len=4096, micro_batch=16, vocab=32000, params_b=None
    ).loss == ChunkedLoss(chunk_tokens=8192)


def test_targets_under_other_names():
    assert len(lora("lora-logits-decide", lora_targets="c_attn,c_proj,w1,w2 (all linear)").targets) == 7
    assert lora("lora-logits-decide", lora_targets="wq,wv").targets == ("q_proj", "v_proj")
    assert lora("lora-logits-decide", lora_targets="q_proj, v_proj, lm_head").targets == ("q_proj", "v_proj")


def test_whole_tables_beside_adapters():
    assert lora("lora-logits-decide", method="lora+emb").modules_to_save == ("embed_tokens", "lm_head")


def test_tied_embeddings_as_the_row_says():
    assert plan("full-one-device", tied_embeddings=True, params_b=None).model.tied_embeddings
    assert not plan("full-one-device", tied_embeddings=False).model.tied_embeddings
    small = {"model": "someone/small", "vocab": 128256, "params_b": 7.51}  # 8.03 B with tables of their own
    assert plan("full-one-device", tied_embeddings=True, **small).model.tied_embeddings


def test_the_dropout_that_a_row_remarks():
    assert lora("lora-logits-decide", notes="lora_dropout=0.05").dropout == 0.05


def test_nodes_network_and_board_in_words():
    hardware = plan("full-fsdp-two", n_gpus=4, sharding="DeepSpeed ZeRO-2, 2 nodes x 2 GPUs").hardware
    assert (hardware.nodes, hardware.gpus_per_node) == (2, 2)
    hardware = plan("full-fsdp-two", n_gpus=96, gpu="H100-80GB (800 Gbps)").hardware
    assert hardware.nodes == 12
    assert hardware.internode_bandwidth == 100e9
    assert plan("full-fsdp-two", n_gpus=2, sharding="ZeRO-2, 0 nodes x 8 GPUs").hardware.nodes == 1


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
