"""Bytes between ranks, on the host and on disk, and the seconds they take, by hand."""

from dataclasses import replace

import pytest

from fitune.estimate.overhead import PROCESS_BYTES, checkpoint_bytes
from fitune.estimate.predict import largest_batch, predict, predict_step_time
from fitune.estimate.rates import rates_of
from fitune.estimate.step import describe_step
from fitune.estimate.time import COLLECTIVE_SHARE
from fitune.estimate.transfers import (
    COLLECTIVE_SECONDS,
    HOP_SECONDS,
    HOST_LINK_EFFICIENCY,
    LINK_EFFICIENCY,
    STAGED_BANDWIDTH,
    Exchange,
    communication_of,
    cpu_adam_seconds,
    exchange_seconds,
    transfers_of,
)
from fitune.estimate.work import MODULE_HOOK_SECONDS, backward_work, forward_work
from fitune.units import MIB
from fitune.values.machines.gpus import find_gpu
from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Lomo,
    Offload,
    Precision,
    Sgd,
    Single,
    Zero,
)
from fitune.values.predictions import Phase
from laws.test_estimate_monotone import cluster
from plans import gpu, known, plan_for

P = 8_030_261_248
EMBEDDING = 128256 * 4096
GB = 10**9


def eight_b(**choice):
    base = {"hardware": cluster(), "precision": "bf16", "rows": 1, "seq_len": 1024, "recompute": 32}
    return plan_for(known("llama-3.1-8b"), **{**base, **choice})


@pytest.mark.parametrize(
    ("sharding", "elements"),
    [
        (Ddp(), 2 * P),
        (Zero(stage=1, backend="deepspeed"), 2 * P),
        (Zero(stage=2, backend="deepspeed"), 2 * P),
        (Zero(stage=3, backend="deepspeed"), 3 * P),
        (Zero(stage=1, backend="fsdp"), 2 * P),
        (Zero(stage=2, backend="fsdp"), 2 * P),
        # embedding, head and final norm stay gathered until backward is through
        (Zero(stage=3, backend="fsdp"), 3 * P - 2 * EMBEDDING - 4096),
    ],
    ids=str,
)
def test_a_full_step_sends_the_classic_2p_or_3p_elements(sharding, elements):
    """Times (n−1)/n for a ring of n, times 2 bytes."""
    assert communication_of(eight_b(sharding=sharding)).total_bytes == 2 * elements * 7 / 8


def test_accumulation_repeats_gathers_and_sums_but_not_ddps():
    once, thrice = (
        [
            communication_of(eight_b(sharding=sharding, accumulation=n)).total_bytes
            for sharding in (Ddp(), Zero(stage=1, backend="fsdp"), Zero(stage=3, backend="fsdp"))
        ]
        for n in (1, 3)
    )
    assert [b / a for a, b in zip(once, thrice, strict=True)] == [1, 1, 3]


def test_lora_sends_its_adapters_alone_unless_weights_are_divided():
    choice = {"tuning": "lora", "rank": 16}
    adapters = 41_943_040
    ddp = communication_of(eight_b(sharding=Ddp(), **choice))
    zero = communication_of(eight_b(sharding=Zero(stage=3, backend="deepspeed"), **choice))
    assert ddp.total_bytes == 2 * 2 * adapters * 7 / 8
    blocks = P - 2 * EMBEDDING - 4096 + adapters
    assert zero.total_bytes == pytest.approx(2 * (2 * (P + adapters) + blocks + adapters) * 7 / 8)


@pytest.mark.parametrize(("tuning", "thirds"), [("full", 0), ("lora", 1)])
def test_deepspeed_gathers_frozen_weights_once_more_where_blocks_run_again(tuning, thirds):
    choice = {"tuning": tuning, "rank": 16, "sharding": Zero(stage=3, backend="deepspeed")}
    sent = [communication_of(eight_b(**choice, recompute=blocks)).backward.bytes for blocks in (0, 16, 32)]
    half = 2 * (P - 2 * EMBEDDING - 4096 + 41_943_040) / 2 * 7 / 8
    assert [more - sent[0] for more in sent] == pytest.approx([0, thirds * half, thirds * 2 * half])


@pytest.mark.parametrize(
    ("sharding", "forward", "backward"),
    [
        (Zero(stage=1, backend="fsdp"), 1, 1),
        (Zero(stage=3, backend="fsdp"), 3, 3),
        (Zero(stage=3, backend="deepspeed"), 3, 3),
        (Ddp(), 0, 1),
    ],
    ids=str,
)
def test_the_first_collective_of_a_pass_is_waited_for_in_every_pass_that_has_one(sharding, forward, backward):
    step = describe_step(plan := eight_b(sharding=sharding, accumulation=3), largest_batch(plan))
    found, exchanged = transfers_of(step), communication_of(plan)
    for phase, exchange, times in (
        (Phase.FORWARD, exchanged.forward, forward),
        (Phase.BACKWARD, exchanged.backward, backward),
    ):
        one = exchange_seconds(cluster(), exchange) / max(1, exchange.calls)
        assert found[phase].waited["communication"] == pytest.approx(times * one)


def test_weights_that_wait_on_the_host_are_stepped_there_and_do_not_come_back():
    """Of one device embedding, head and final norm stay, and adapters; with ZeRO-3 nothing does."""
    rate = gpu("h100").gpu.host_bandwidth * HOST_LINK_EFFICIENCY
    away, zero = Offload(parameters="cpu", optimizer="cpu"), Zero(stage=3, backend="fsdp")

    def back(**choice):
        plan = eight_b(**{"hardware": gpu("h100"), **choice})
        return transfers_of(describe_step(plan, largest_batch(plan)))[Phase.UPDATE].waited["host link"] * rate

    assert back(offload=Offload(optimizer="cpu")) == pytest.approx(2 * P)
    assert back(offload=away) == pytest.approx(2 * (2 * EMBEDDING + 4096))
    assert back(offload=away, tuning="lora", rank=16) == pytest.approx(2 * 41_943_040)
    assert back(offload=away, hardware=cluster(), sharding=zero) == 0


def test_every_weight_is_read_once_in_each_pass_the_head_in_the_loss():
    """By a recomputed block twice in backward; FSDP2 gathers its weights once for both, read and written."""
    blocks, rates = 2 * (P - 2 * EMBEDDING - 4096), rates_of(cluster(), Precision.BF16)

    def read(**choice):
        step = describe_step(plan := eight_b(**choice), largest_batch(plan))
        there = forward_work(step, rates)
        return [each.bytes_in_place for each in (there, backward_work(step, there, rates))]

    gradients = 2 * 2 * P
    assert read(sharding=Ddp(), recompute=0) == [blocks, blocks + gradients]
    assert read(sharding=Ddp()) == [blocks, 2 * blocks + gradients]
    assert read(sharding=Zero(stage=3, backend="fsdp")) == [3 * blocks, 4 * blocks + gradients]


def test_nccl_has_buffers_beside_torch_wherever_ranks_talk():
    alone, two = (eight_b(hardware=gpu("h100")), eight_b(sharding=Ddp()))
    assert "NCCL" not in predict(alone).memory.outside
    assert predict(two).memory.outside["NCCL"] == 300 * MIB


def test_hybrid_sharding_sends_shares_between_the_nodes():
    plan = eight_b(hardware=cluster(nodes=4), sharding=Zero(stage=3, backend="fsdp", hybrid=True))
    found = communication_of(plan)
    assert (found.forward.between_nodes, found.between_nodes.between_nodes) == (0, 8)
    assert found.between_nodes.bytes == 2 * (2 * P / 8) * 3 / 4


def test_a_ring_is_as_fast_as_its_slowest_link():
    exchange = Exchange(bytes=45e9, calls=10, ranks=8)
    latency = 10 * (COLLECTIVE_SECONDS + 7 * HOP_SECONDS)
    assert exchange_seconds(cluster(), exchange) == pytest.approx(45e9 / (450e9 * LINK_EFFICIENCY) + latency)
    slow = cluster(nodes=2, internode_bandwidth=50e9)
    across = exchange_seconds(slow, replace(exchange, between_nodes=1))
    assert across == pytest.approx(45e9 / (50e9 * LINK_EFFICIENCY) + latency)
    shared = exchange_seconds(slow, replace(exchange, between_nodes=8))
    assert shared == pytest.approx(8 * 45e9 / (50e9 * LINK_EFFICIENCY) + latency)


def test_geforce_cards_reach_one_another_through_the_host():
    exchange = Exchange(bytes=32e9, calls=1, ranks=2)
    seconds = exchange_seconds(gpu("rtx-4090", gpus=2), exchange) - COLLECTIVE_SECONDS - HOP_SECONDS
    assert seconds == pytest.approx(32e9 / STAGED_BANDWIDTH)
    direct = exchange_seconds(gpu("rtx-a6000", gpus=2), exchange) - COLLECTIVE_SECONDS - HOP_SECONDS
    assert direct == pytest.approx(32e9 / (find_gpu("rtx-a6000").link_bandwidth * LINK_EFFICIENCY))


def test_collectives_slow_the_work_they_run_beside():
    alone, among = (
        predict_step_time(eight_b(hardware=cluster(gpus=n), sharding=sharding, seq_len=8192)).phases
        for n, sharding in ((1, Single()), (8, Zero(stage=3, backend="fsdp")))
    )
    sent = communication_of(eight_b(sharding=Zero(stage=3, backend="fsdp"))).forward
    slower = among[Phase.FORWARD] - alone[Phase.FORWARD]
    assert COLLECTIVE_SHARE * exchange_seconds(cluster(), sent) < slower < exchange_seconds(cluster(), sent)


def test_deepspeed_takes_python_time_for_every_module_however_short_the_rows():
    """32 blocks of 7 linears and 2 norms: forward, the same again in recompute, and backward."""
    choice = {"sharding": Zero(stage=3, backend="deepspeed"), "recompute": 32}
    short, half = (predict_step_time(eight_b(**choice, seq_len=tokens)).step_seconds for tokens in (128, 64))
    assert short == pytest.approx(half, rel=0.05)
    assert short > 3 * 32 * 9 * MODULE_HOOK_SECONDS


def test_transfers_run_beside_the_work_or_are_waited_for():
    fast, slow = (
        predict(
            eight_b(
                sharding=Zero(stage=3, backend="fsdp"),
                hardware=cluster(nodes=2, internode_bandwidth=bandwidth),
                seq_len=8192,
            )
        ).time
        for bandwidth in (400e9, 10e9)
    )
    assert fast.limits[Phase.FORWARD] == "compute"
    assert slow.limits[Phase.FORWARD] == "communication"
    sent = 2 * P * 15 / 16 / (10e9 * LINK_EFFICIENCY)
    assert sent < slow.phases[Phase.FORWARD] < 1.1 * sent


def test_the_host_steps_an_offloaded_optimizer_and_holds_16_bytes_a_parameter():
    hardware = cluster(cpu_cores=96, host_memory_bytes=1024 * GB)
    plan = eight_b(
        hardware=hardware, sharding=Zero(stage=2, backend="deepspeed"), offload=Offload(optimizer="cpu")
    )
    estimate = predict(plan)
    assert estimate.host["optimizer"] == pytest.approx(12 * P)
    assert estimate.host["gradients"] == pytest.approx(4 * P)
    assert estimate.host["processes"] == 8 * PROCESS_BYTES
    assert cpu_adam_seconds(plan) == pytest.approx(P / 4e9)
    assert estimate.time.limits[Phase.UPDATE] == "CPU optimizer"
    assert estimate.usable_host_bytes == 1024 * GB - 1024 * GB // 10
    assert estimate.fits
    assert not predict(replace(plan, hardware=replace(hardware, host_memory_bytes=128 * GB))).fits


@pytest.mark.parametrize("precision", ["bf16-master", "fp32"])
def test_fsdp_copies_a_backwards_gradients_to_rooms_of_powers_of_two(precision):
    """GPT-2 over three: torch's pinned allocator takes a power of two for the share of each tensor."""
    sharding, away = Zero(stage=3, backend="fsdp"), Offload(parameters="cpu", optimizer="cpu")
    plan = plan_for(
        known("gpt2"), hardware=cluster(gpus=3), sharding=sharding, offload=away, precision=precision
    )
    e = 4 if precision == "fp32" else 2
    rows = {  # rows, elements of a row, tensors: 12 blocks, tables of tokens and positions, final norm
        "attention": [(768, 2304, 12), (2304, 1, 12), (768, 768, 12), (768, 1, 12)],
        "mlp": [(768, 3072, 12), (3072, 1, 12), (3072, 768, 12), (768, 1, 12)],
        "norms": [(768, 1, 4 * 12 + 2)],
        "tables": [(50257, 768, 1), (1024, 768, 1)],
    }
    shares = [(e * -(-r // 3) * row, n) for kind in rows.values() for r, row, n in kind]
    copies = sum(n * next(2**k for k in range(64) if 2**k >= size) for size, n in shares)
    host = predict(plan).host
    assert host["gradient copies"] == 3 * copies
    assert host["weights"] == 3 * sum(n * size for size, n in shares)  # in rooms of fitune's own
    assert "gradient copies" not in predict(replace(plan, offload=Offload())).host


@pytest.mark.parametrize(
    ("stage", "away", "choice", "elements"),
    [
        # new weights of the shares, and of each rank the table whole
        (2, Offload(optimizer="cpu"), {}, P + 8 * 128_256 * 4096),
        # between micro-batches also every gradient whole
        (2, Offload(optimizer="cpu"), {"accumulation": 2}, 2 * P + 8 * 128_256 * 4096),
        (3, Offload(parameters="cpu", optimizer="cpu"), {"accumulation": 2}, P),  # gradients
        (3, Offload(parameters="cpu"), {}, 0),
        (3, Offload(parameters="cpu"), {"tuning": "lora"}, 2 * 20_971_520),  # adapters, in two places
    ],
)
def test_by_hand_what_deepspeed_has_twice_on_a_host(stage, away, choice, elements):
    """Elements in 16 bit, of eight ranks. What it really pins: tests/null_gpu/test_host.py."""
    host = predict(eight_b(**choice, offload=away, sharding=Zero(stage=stage, backend="deepspeed"))).host
    assert host.get("second copies", 0) == 2 * elements


@pytest.mark.parametrize(
    ("sharding", "on_one_node"),
    [
        (Ddp(), 1.0),
        (Zero(stage=3, backend="fsdp"), 0.5),
        (Zero(stage=2, backend="fsdp", hybrid=True), 1.0),
    ],
)
def test_the_host_holds_a_copy_of_what_its_ranks_write_beside_the_steps(sharding, on_one_node):
    """Two nodes of eight: with DDP and hybrid shares those of the first node write all."""
    plan = eight_b(hardware=cluster(nodes=2, host_memory_bytes=1024 * GB), sharding=sharding)
    beside = replace(plan, run=replace(plan.run, save_every=10, async_save=True))
    assert "checkpoint copy" not in predict(plan).host
    estimate = predict(beside)
    assert estimate.host["checkpoint copy"] == pytest.approx(on_one_node * checkpoint_bytes(plan))
    assert estimate.memory == predict(plan).memory
    assert estimate.usable_host_bytes == 1024 * GB - 1024 * GB // 10


def test_nvme_takes_what_the_host_would_have_held_but_for_staging_and_pinned_copies():
    choice = {"sharding": Zero(stage=3, backend="deepspeed"), "hardware": cluster()}
    cpu, nvme = (
        predict(eight_b(**choice, offload=Offload(parameters=place, optimizer=place)))
        for place in ("cpu", "nvme")
    )
    assert cpu.nvme_bytes == 0
    assert nvme.nvme_bytes == cpu.host_bytes - cpu.host["processes"] - cpu.host["second copies"]
    assert nvme.host_bytes <= cpu.host_bytes
    assert nvme.memory.tensor_peak_bytes < cpu.memory.tensor_peak_bytes  # nothing is fetched ahead
    assert nvme.time.limits[Phase.UPDATE] == "NVMe"


def test_weights_pass_through_buffers_that_hold_the_largest_share_and_a_whole_sub_group():
    """Per rank six shares of the embedding; and all eight shares of the sub-group that ends with the head: it begins
    with three linears of the last block but one."""
    away = Offload(parameters="nvme", optimizer="nvme")
    host = predict(eight_b(sharding=Zero(stage=3, backend="deepspeed"), offload=away)).host
    share, linear, block = EMBEDDING // 8, 4096 * 14336 // 8, (P - 2 * EMBEDDING - 4096) // 32 // 8 - 2 * 512
    assert host["weights staging"] == 8 * 2 * (6 * share + 8 * (3 * linear + block + share))


def test_reads_from_nvme_are_waited_for():
    choice = {"sharding": Zero(stage=3, backend="deepspeed")}
    on_host, waited, twice = (
        predict(
            eight_b(**choice, offload=Offload(parameters=place, optimizer="nvme"), hardware=hardware)
        ).time
        for place, hardware in (
            ("cpu", cluster()),
            ("nvme", cluster(nvme_bandwidth=3e9)),
            ("nvme", cluster(nvme_bandwidth=6e9)),
        )
    )
    assert waited.phases[Phase.FORWARD] > on_host.phases[Phase.FORWARD] + 2 * P / 3e9
    saved = waited.phases[Phase.FORWARD] - twice.phases[Phase.FORWARD]
    assert saved == pytest.approx(2 * P / 6e9, rel=0.01)


def test_states_on_a_disk_twice_as_fast_take_half_the_time():
    choice = {"sharding": Zero(stage=3, backend="deepspeed"), "offload": Offload(optimizer="nvme")}
    assumed, named = (predict(eight_b(**choice, hardware=cluster(nvme_bandwidth=b))) for b in (0.0, 6e9))
    read_and_written = 2 * 12 * P
    saved = assumed.time.phases[Phase.UPDATE] - named.time.phases[Phase.UPDATE]
    assert saved == pytest.approx(read_and_written / 3e9 - read_and_written / 6e9)


def test_offloaded_activations_are_all_that_the_blocks_keep():
    estimate = predict(eight_b(hardware=gpu("h100"), offload=Offload(activations="cpu")))
    assert estimate.host["activations"] == 32 * 1024 * 2 * 4096


def test_nothing_is_on_the_host_of_a_cpu_and_little_on_that_of_a_gpu():
    assert predict(plan_for(known("gpt2"))).host == {}
    alone = predict(eight_b(hardware=gpu("h100")))
    assert (alone.host, alone.nvme_bytes, alone.communication_bytes) == ({"processes": PROCESS_BYTES}, 0, 0)


@pytest.mark.parametrize(
    ("choice", "per_parameter"),
    [
        ({"precision": "bf16-master"}, 14),
        ({"precision": "bf16"}, 6),
        ({"precision": "bf16-master", "sharding": Zero(stage=3, backend="fsdp")}, 14),
        ({"precision": "bf16", "offload": Offload(optimizer="cpu")}, 14),
        ({"precision": "bf16", "optimizer": Sgd()}, 2),
        ({"precision": "bf16", "optimizer": AdamW8bit()}, 2 + 2 * (1 + 4 / 256)),
    ],
)
def test_a_checkpoint_holds_trained_weights_masters_and_states(choice, per_parameter):
    """Of adapters, theirs alone."""
    assert checkpoint_bytes(eight_b(**choice)) == pytest.approx(per_parameter * P, rel=1e-5)
    adapters = eight_b(**choice, tuning="lora", rank=16)
    assert checkpoint_bytes(adapters) == pytest.approx(per_parameter * 41_943_040, rel=1e-4)


@pytest.mark.parametrize("sharding", [Ddp(), Zero(stage=3, backend="fsdp")], ids=str)
@pytest.mark.parametrize(
    "choice",
    [{"optimizer": AdamW8bit()}, {"tuning": Lomo(adaptive=True, clip=ClipByValue(value=1.0))}],
    ids=["8 bit", "AdaLomo"],
)
def test_a_checkpoint_is_as_large_however_it_is_divided(sharding, choice):
    alone = replace(eight_b(hardware=gpu("h100")), **choice)
    divided = replace(alone, hardware=cluster(), sharding=sharding)
    assert checkpoint_bytes(divided) == checkpoint_bytes(alone)


def test_measuring_the_norm_first_goes_back_twice_and_forth_once():
    lomo = {
        clip: Lomo(adaptive=False, clip=clip) for clip in (ClipByValue(value=1.0), ClipByNorm(max_norm=1.0))
    }
    once, twice = (
        predict(replace(eight_b(hardware=gpu("h100"), optimizer=Sgd()), tuning=tuning)).time
        for tuning in lomo.values()
    )
    assert twice.phases[Phase.FORWARD] == once.phases[Phase.FORWARD]
    assert twice.phases[Phase.LOSS] == pytest.approx(2 * once.phases[Phase.LOSS])
    assert 1.7 < twice.phases[Phase.BACKWARD] / once.phases[Phase.BACKWARD] < 2  # it updates once
    assert once.phases[Phase.UPDATE] == twice.phases[Phase.UPDATE] == 0


def test_eight_devices_see_eight_times_the_tokens():
    one = predict(eight_b(hardware=gpu("h100"), tuning="lora"))
    eight = predict(eight_b(tuning="lora", sharding=Ddp()))
    assert 7 < eight.tokens_per_second / one.tokens_per_second <= 8
