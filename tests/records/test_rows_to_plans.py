"""What a row says is what its plan does; what no plan can say is given back with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from fitune.records.beyond import counted_bytes, on_device_bytes, peak_bytes
from fitune.records.mapping import Case, case_of
from fitune.records.read import read_records
from fitune.records.resident import resident_terms
from fitune.records.row import Row, row_from
from fitune.records.timeline import allocated_terms
from fitune.records.unrepresented import Unrepresented
from fitune.spec.plan import AdamW8bit, ChunkedLoss, Ddp, Full, Hqq, Lomo, Lora, Nf4, Precision, Single, Zero
from fitune.spec.reports import Phase

RUNS = {
    facts["id"]: facts
    for facts in map(json.loads, Path(__file__).with_name("runs.jsonl").read_text().splitlines())
}


def row(name: str, **changed: Any) -> Row:
    return row_from({**RUNS[name], **changed}, line=1, where="test", fallback_source="test")


def case(name: str, **changed: Any) -> Case:
    return case_of(row(name, **changed))


def why_not(name: str, **changed: Any) -> str:
    with pytest.raises(Unrepresented) as reason:
        case(name, **changed)
    return str(reason.value)


def test_full_training_in_pure_bf16() -> None:
    plan = case("full-one-device").plan
    assert isinstance(plan.tuning, Full)
    assert plan.precision is Precision.BF16
    assert isinstance(plan.sharding, Single)
    assert plan.recompute.blocks == 32
    assert plan.batch.micro_batch_tokens == 4 * 4096


def test_lora_on_a_packed_base() -> None:
    tuning = case("qlora-fsdp-frozen").plan.tuning
    assert tuning == Lora(
        rank=16,
        alpha=16,
        dropout=0.0,
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        base=Nf4(double_quant=True),
    )


@pytest.mark.parametrize(
    ("words", "sharding"),
    [
        ("FSDP FULL_SHARD", Zero(stage=3, backend="fsdp")),
        ("FSDP2", Zero(stage=3, backend="fsdp")),
        ("FSDP SHARD_GRAD_OP", Zero(stage=2, backend="fsdp")),
        ("FSDP NO_SHARD (ddp)", Ddp()),
        ("DDP", Ddp()),
        ("HSDP", Zero(stage=3, backend="fsdp", hybrid=True)),
        ("DeepSpeed ZeRO-2", Zero(stage=2, backend="deepspeed")),
        ("deepspeed zero3", Zero(stage=3, backend="deepspeed")),
    ],
)
def test_sharding_by_its_words(words: str, sharding: object) -> None:
    assert case("full-fsdp-two", sharding=words).plan.sharding == sharding


@pytest.mark.parametrize(
    ("quant", "base"),
    [
        ("bnb nf4", Nf4(double_quant=True)),
        ("bnb fp4", Nf4(double_quant=True)),
        ("GPTQ int4", Nf4(double_quant=True)),
        ("LLM.int8", Hqq(bits=8, group_size=4096)),
        ("HQQ 2 bit", Hqq(bits=2)),
    ],
)
def test_quantisers_by_their_words(quant: str, base: object) -> None:
    tuning = case("qlora-fsdp-frozen", quant=quant).plan.tuning
    assert isinstance(tuning, Lora)
    assert tuning.base == base


def test_lomo_and_eight_bit_states() -> None:
    assert isinstance(case("full-one-device", optimizer="LOMO").plan.tuning, Lomo)
    assert isinstance(case("full-one-device", optimizer="AdamW 8bit").plan.optimizer, AdamW8bit)


def test_a_fused_linear_loss_is_a_chunked_one() -> None:
    assert isinstance(case("lora-block-decides").plan.loss, ChunkedLoss)


def test_targets_under_other_names() -> None:
    tuning = case("lora-logits-decide", lora_targets="c_attn,c_proj,w1,w2 (all linear)").plan.tuning
    assert isinstance(tuning, Lora)
    assert len(tuning.targets) == 7
    tuning = case("lora-logits-decide", lora_targets="wq,wv").plan.tuning
    assert isinstance(tuning, Lora)
    assert tuning.targets == ("q_proj", "v_proj")


def test_nodes_and_network_in_words() -> None:
    hardware = case("full-fsdp-two", n_gpus=4, sharding="DeepSpeed ZeRO-2, 2 nodes x 2 GPUs").plan.hardware
    assert (hardware.nodes, hardware.gpus_per_node) == (2, 2)
    hardware = case("full-fsdp-two", n_gpus=96, gpu="H100-80GB (800 Gbps)").plan.hardware
    assert hardware.nodes == 12
    assert hardware.internode_bandwidth == 100e9


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tp": 8}, "tp = 8: no plan has tensor parallelism"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"cp": 2}, "context parallelism"),
        ({"seq_len": None}, "seq_len or micro_batch not stated"),
        ({"gpu": "RTX 4091"}, "did you mean 'rtx-4090'"),
        ({"optimizer": "Muon"}, "optimizer 'muon'"),
        ({"method": "prompt tuning"}, "method 'prompt tuning'"),
        ({"act_ckpt": None}, "whether blocks are recomputed is not stated"),
        ({"optimizer": "GaLoreAdamW"}, "optimizer 'galoreadamw'"),
        ({"precision_mode": "fp8"}, "8 bit"),
        ({"model": "new/model", "hidden": None}, "hidden not stated"),
        (
            {"model": "new/mixture", "params_b": 30.0},
            "its shapes make 7.24 B parameters, the row says 30.00 B",
        ),
    ],
)
def test_what_no_plan_can_say_is_given_back(changed: dict[str, Any], why: str) -> None:
    assert why in why_not("full-one-device", **changed)


def test_pure_bf16_adamw_of_many_tensors_is_five_times_the_weights() -> None:
    """Weights, gradients, two moments, and one set of temporaries: 5 · 2 · P, by hand for Mistral-7B."""
    parameters = 7_241_732_096
    update = allocated_terms(case("full-one-device"))[Phase.UPDATE]
    workspace = update.pop("cuBLAS workspace")
    assert sum(update.values()) == 5 * 2 * parameters
    assert workspace < 2**25


def test_fp32_shards_are_divided_by_the_devices() -> None:
    """4 weights + 8 moments of 8.03 B parameters, a quarter each."""
    terms = resident_terms(case("full-fsdp-four-fp32-shards"))
    assert terms["trained weights"] == 4 * 8_030_261_248 // 4
    assert terms["optimizer"] == 8 * 8_030_261_248 // 4


def test_logits_of_transformers_trainer_by_hand() -> None:
    """14 bytes per logit and three copies of the hidden states, 16384 tokens, Mistral: V = 32000, h = 4096."""
    loss = allocated_terms(case("lora-logits-decide"))[Phase.LOSS]
    assert loss["loss"] == 16384 * (14 * 32000 + 6 * 4096)
    assert loss["recompute inputs"] == 32 * 2 * 4096 * 16384


def test_adapters_follow_peft_unless_the_row_says_otherwise() -> None:
    """r · (in + out) of q, k, v, o over 32 blocks: 13,631,488 parameters, fp32."""
    assert resident_terms(case("lora-logits-decide"))["trained weights"] == 4 * 13_631_488
    assert (
        resident_terms(case("lora-logits-decide", optimizer_dtype="bf16"))["trained weights"]
        == 2 * 13_631_488
    )


def test_fsdp1_over_frozen_blocks_holds_inputs_and_their_gradients() -> None:
    stream = 16 * 4096 * 4096 * 2
    held = allocated_terms(case("qlora-fsdp-frozen"))[Phase.BACKWARD]
    assert held["held gradients of inputs"] + held["recompute inputs"] == (2 * 32 - 1) * stream


@pytest.mark.parametrize(
    "name",
    [r.id for r in read_records(Path(__file__).with_name("runs.jsonl")) if r.source.startswith("published")],
)
def test_runs_with_all_facts_stated_are_within_two_percent(name: str) -> None:
    told = case(name)
    if told.row.outcome == "oom" or told.row.peak_mem_gib is None:
        return
    predicted = max(sum(terms.values()) for terms in allocated_terms(told).values())
    assert predicted / 2**30 == pytest.approx(told.row.peak_mem_gib, rel=0.02)


def test_copies_in_ddp_buckets_by_hand() -> None:
    """DistributedDataParallel holds each fp32 gradient of the 13,631,488 adapter weights twice, NO_SHARD does not."""
    copies = resident_terms(case("lora-logits-decide", n_gpus=2, sharding="DDP"))["bucket copies"]
    assert copies == 4 * 13_631_488
    none = resident_terms(case("lora-logits-decide", n_gpus=2, sharding="FSDP NO_SHARD"))["bucket copies"]
    assert none == 0


def test_fp32_weights_under_autocast_have_16_bit_copies_by_hand() -> None:
    """2 bytes for each weight of a linear and of the head: 7,241,732,096 less embedding and norms."""
    changed = {"precision_mode": "bf16 autocast, fp32 weights", "optimizer_dtype": "fp32"}
    loss = allocated_terms(case("full-one-device", **changed))[Phase.LOSS]
    assert loss["trained weights"] == 4 * 7_241_732_096
    assert loss["16-bit copies"] == 2 * (7_241_732_096 - 32000 * 4096 - 65 * 4096)


def test_recompute_by_operation_keeps_every_second_product_by_hand() -> None:
    """Llama-3-8B per token and block: input 8192, attention 8192 + 128, q 8192, v 2048, gate 28672, down 8192."""
    told = case("full-fsdp-four-fp32-shards", act_ckpt="selective op", micro_batch=1)
    loss = allocated_terms(told)[Phase.LOSS]
    assert loss["activations"] == 32 * 4096 * (8192 + 8192 + 128 + 8192 + 2048 + 28672 + 8192)
    assert loss["recompute inputs"] == 0


def test_deepspeed_steps_fp32_copies_of_16_bit_adapters() -> None:
    terms = resident_terms(case("lora-logits-decide", n_gpus=4, sharding="DeepSpeed ZeRO-2"))
    assert terms["trained weights"] == 2 * 13_631_488
    assert terms["masters"] == 4 * 13_631_488 // 4
    assert terms["optimizer"] == 8 * 13_631_488 // 4


def test_paged_states_are_outside_torch() -> None:
    assert resident_terms(case("full-one-device", optimizer="PagedAdamW8bit"))["optimizer"] == 0


def test_grouped_keys_are_repeated_where_the_trainer_does() -> None:
    """Mistral's flash attention of transformers 4: 2 · 2 · (4096 − 1024) bytes per token more than Llama's."""
    changed = {"precision_mode": "bf16 autocast", "fused_ce": "liger", "must_assume": "kernels: foak liger"}
    mistral = allocated_terms(case("lora-logits-decide", **changed))[Phase.BACKWARD]
    llama = allocated_terms(case("lora-block-decides", micro_batch=4, **changed))[Phase.BACKWARD]
    assert mistral["activations"] - llama["activations"] == 16384 * 4 * 3072


def test_a_mixture_is_known_by_its_shapes_and_its_experts_are_packed() -> None:
    shapes = {"layers": 32, "hidden": 4096, "vocab": 32000, "params_b": 46.7, "model": "someone/Mixtral-GPTQ"}
    told = case("gptq-counts-as-4-bit", **shapes)
    assert told.plan.model.num_experts == 8
    assert 22 * 2**30 < resident_terms(told)["weights"] < 25 * 2**30


def test_an_old_board_is_slower_for_the_host_and_between_its_cards() -> None:
    gpu = case("reserved-two-cards").plan.hardware.gpu
    old = case("reserved-two-cards", gpu="RTX3090-24GB (old motherboard PCIe)").plan.hardware.gpu
    assert gpu.link_bandwidth == gpu.host_bandwidth > 8e9
    assert old.link_bandwidth == old.host_bandwidth == 8e9


def test_a_rows_own_remarks_win_over_its_trainers_habits() -> None:
    tuning = case("lora-logits-decide", notes="lora_dropout=0.05, expandable_segments:True").plan.tuning
    assert isinstance(tuning, Lora)
    assert tuning.dropout == 0.05
    assert case("lora-logits-decide", notes="expandable_segments:True").habits.expandable_segments
    held = allocated_terms(case("qlora-fsdp-frozen", notes="use_reentrant=False"))[Phase.BACKWARD]
    assert held["held gradients of inputs"] == 0


def test_models_split_by_layers_are_given_back() -> None:
    assert "splits a model" in why_not("full-fsdp-two", sharding="device_map=auto")


def test_what_an_instrument_counts() -> None:
    """Allocated, then torch's cache on top, then context and NCCL on top of that; unsaid, what the trainer prints."""
    told = {
        kind: counted_bytes(one, allocated_terms(one))
        for kind in ("allocated", "reserved", "nvml")
        for one in [case("lora-logits-decide", mem_kind=kind, micro_batch=2)]
    }
    assert told["allocated"] < told["reserved"] < told["nvml"]
    assert told["nvml"] - told["reserved"] == 500 * 2**20  # the context of an Ampere card
    unsaid = case("lora-logits-decide", mem_kind=None, micro_batch=2)
    assert counted_bytes(unsaid, allocated_terms(unsaid)) == told["nvml"]
    printed = case("lora-logits-decide", mem_kind=None, micro_batch=2, source="torchtune")
    assert counted_bytes(printed, allocated_terms(printed)) == peak_bytes(allocated_terms(printed))


def test_a_full_device_gives_its_cache_back_but_not_its_fragments() -> None:
    """A fifth of a 24 GiB card would be cached; a run that needs the card keeps an eighth of what moves."""
    tight = case("lora-logits-decide", gpu="RTX4090-24GB", mem_kind="reserved", micro_batch=2)
    phases = allocated_terms(tight)
    assert counted_bytes(tight, phases) <= 24564 * 2**20 - 500 * 2**20
    assert on_device_bytes(tight, phases) < 24564 * 2**20


def test_fused_attention_writes_no_scores_for_windows_nor_for_falcon() -> None:
    """At 16k tokens Mistral's window of 4096 cuts; flash attention takes the window without a mask."""
    long = allocated_terms(case("lora-logits-decide", seq_len=16384, micro_batch=1))[Phase.BACKWARD]
    short = allocated_terms(case("lora-logits-decide", seq_len=4096, micro_batch=4))[Phase.BACKWARD]
    assert long["activations"] == short["activations"]
    falcon = {"model": "tiiuae/falcon-7b", "params_b": 7.22, "layers": 32, "hidden": 4544, "vocab": 65024}
    several = case("full-one-device", **falcon, seq_len=2048, micro_batch=8)
    assert max(sum(terms.values()) for terms in allocated_terms(several).values()) < 120 * 2**30


def test_a_prefetched_block_is_a_second_one_by_hand() -> None:
    """Llama-2-7B: 404,766,720 bytes of bf16 weights in a block, its adapters of rank 64 on all but o_proj beside."""
    once = allocated_terms(case("reserved-two-cards"))[Phase.BACKWARD]["gathered weights"]
    twice = allocated_terms(case("reserved-two-cards", notes="backward prefetch on"))[Phase.BACKWARD]
    adapters = 64 * (3 * 8192 + 3 * 15104)
    assert twice["gathered weights"] - once == 404_766_720 + 2 * adapters
