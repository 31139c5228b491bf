"""Transfers: what ranks send one another and what goes to the host and to NVMe, in bytes and seconds.

A transfer either runs beside the device's work, so that the longer of the two counts, or has to be waited for.
The rates are assumed where the device was not calibrated.
"""

from dataclasses import dataclass, field

from fitune.estimate.buffers import block_weights
from fitune.estimate.division import (
    num_ranks,
    num_shares,
    reduce_width,
    share_elements,
    trained_share,
    uses_deepspeed,
    zero_stage,
)
from fitune.estimate.overhead import host_optimizer_bytes, offloaded_activation_bytes, ranks_per_node
from fitune.estimate.parameters import root_weight_bytes, trained_parameters, weights_away_bytes
from fitune.estimate.states import gradients_go_to_the_host
from fitune.estimate.step import StepStages
from fitune.values.choices import DDP_BUCKET_BYTES
from fitune.values.counts import trained_tensors, untouched_blocks
from fitune.values.deepspeed import fetches_ahead, reduce_bucket_elements
from fitune.values.machines.hardware import Hardware
from fitune.values.plan import Ddp, Lomo, Lora, Offload, Plan, Single, Zero
from fitune.values.predictions import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Bytes that one rank sends in a phase of the whole step, in ``calls`` collectives of ``ranks`` each."""

    bytes: float = 0.0
    calls: int = 0
    ranks: int = 1
    between_nodes: int = 0
    """Rings that share the network of a node; 0 inside a node."""
    passes: int = 1
    """Passes that it is a part of: each waits for one collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """All zero on one device."""

    forward: Exchange = Exchange()
    backward: Exchange = Exchange()
    between_nodes: Exchange = Exchange()
    """Hybrid sharding's sum of shares over the nodes, in backward."""
    update: Exchange = Exchange()

    @property
    def total_bytes(self) -> int:
        """Bytes of the four exchanges."""
        return round(self.forward.bytes + self.backward.bytes + self.between_nodes.bytes + self.update.bytes)


def backward_passes(plan: Plan) -> int:
    """Backward passes of a step: one a micro-batch, two where the first only measures gradients. Forward is one for
    both, whose tensors are kept for the second (engine/in_backward.py)."""
    return plan.batch.accumulation * (2 if plan.goes_back_twice else 1)


def communication_of(plan: Plan) -> Communication:
    """A ring sends (n−1)/n of a buffer to gather or reduce-scatter it, twice that to all-reduce it.

    Full training in one micro-batch makes the classic 2P (DDP, ZeRO-1, ZeRO-2) and 3P (ZeRO-3) elements.
    """
    match plan.sharding:
        case Single():
            return Communication()
        case Ddp():
            size = trained_parameters(plan) * plan.precision.compute_bytes
            return Communication(backward=_ring(plan, 2 * size, calls=-(-size // DDP_BUCKET_BYTES)))
        case Zero() as zero:
            match zero.backend:
                case "fsdp":
                    return _fsdp(plan, zero)
                case "deepspeed":
                    return _deepspeed(plan, zero)


def _fsdp(plan: Plan, zero: Zero) -> Communication:
    """Gathers every block and the root in forward, the blocks again in backward at stage 3; sums by group.

    Stage 1 gathers and sums once a step, the others in every pass. Frozen weights are gathered too.
    """
    groups = plan.model.num_layers + 1
    there, back = (1, 1) if zero.stage == 1 else (plan.batch.accumulation, backward_passes(plan))
    blocks = sum(block_weights(plan))
    summed = trained_parameters(plan) * reduce_width(plan)
    again = blocks if zero.stage == 3 else 0
    calls = groups * (2 if zero.stage == 3 else 1)
    return Communication(
        forward=_ring(plan, there * (blocks + root_weight_bytes(plan)), calls=there * groups, passes=there),
        backward=_ring(plan, back * (again + summed), calls=back * calls, passes=back),
        between_nodes=_between_nodes(plan, zero, back * summed),
    )


def _deepspeed(plan: Plan, zero: Zero) -> Communication:
    """Stages 1 and 2 sum gradients by buckets (stage 1 once a step) and gather the new weights in the update.

    Stage 3 gathers all weights in forward and again in backward, frozen ones too. What was gathered to run a block
    again serves its backward, but for frozen weights, which are let go and gathered a third time: counted on two
    processes (DeepSpeed 0.19.8) as 1.00 and 1.57 times the bytes of a step without recompute.
    """
    e, trained = plan.precision.compute_bytes, trained_parameters(plan)
    there, back = (1, 1) if zero.stage == 1 else (plan.batch.accumulation, backward_passes(plan))
    buckets = max(1, -(-trained // reduce_bucket_elements(plan)))
    between = _between_nodes(plan, zero, back * trained * e)
    if zero.stage < 3:
        return Communication(
            backward=_ring(plan, back * trained * e, calls=back * buckets, passes=back),
            between_nodes=between,
            update=_ring(plan, trained * e, calls=buckets),
        )
    linears = sum(count for _, count in plan.model.counted_linears()) + 2
    blocks = block_weights(plan)
    whole = sum(blocks) + root_weight_bytes(plan)
    recomputed = blocks[untouched_blocks(plan.model, plan.tuning) : plan.recompute.blocks]
    again = sum(recomputed) if isinstance(plan.tuning, Lora) else 0
    calls = linears + buckets + round(linears * again / whole)
    return Communication(
        forward=_ring(plan, there * whole, calls=there * linears, passes=there),
        backward=_ring(plan, back * (whole + again + trained * e), calls=back * calls, passes=back),
        between_nodes=between,
    )


def _ring(plan: Plan, size: float, *, calls: int, passes: int = 1) -> Exchange:
    hybrid = isinstance(plan.sharding, Zero) and plan.sharding.hybrid
    n = num_shares(plan) if hybrid else num_ranks(plan)
    between = int(plan.hardware.nodes > 1 and not hybrid)
    return Exchange(
        bytes=size * (n - 1) / n, calls=calls if n > 1 else 0, ranks=n, between_nodes=between, passes=passes
    )


def _between_nodes(plan: Plan, zero: Zero, summed: float) -> Exchange:
    """Hybrid: each rank all-reduces its share with its like on the other nodes, 2 · (m−1)/m of it, all ranks of a node
    at the same time."""
    nodes = plan.hardware.nodes
    if not zero.hybrid or nodes == 1:
        return Exchange()
    share = summed / num_shares(plan)
    calls = backward_passes(plan) * (plan.model.num_layers + 1)
    return Exchange(
        bytes=2 * share * (nodes - 1) / nodes, calls=calls, ranks=nodes, between_nodes=num_shares(plan)
    )


LINK_EFFICIENCY = 0.75
"""Share of a link's bandwidth that large collectives reach; others report 0.7–0.9 on NVLink. Not measured by us."""
STAGED_BANDWIDTH = 2.6e9
"""Bytes/s of an exchange between GeForce cards: their driver has no direct copies, so every byte goes through host
memory, which several cards share. Others measured 1.7 to 4 GB/s; this is the middle of the two as a ratio. Two cards on
a board with 16 lanes of PCIe 4 each did better. Not measured by us."""
HOST_LINK_EFFICIENCY = 0.8
"""Pinned copies over PCIe; others report 0.75–0.85 of its peak. Not measured by us."""
COLLECTIVE_SECONDS, HOP_SECONDS = 15e-6, 3e-6
"""Start of a collective, and each further rank of its ring. Not measured by us."""
ETHERNET = 12.5e9
"""Bytes/s between nodes when the hardware does not say: 100 Gbit/s, our assumption."""
NVME_BANDWIDTH = 3e9
"""Bytes/s of a node's NVMe, read or write, when the hardware does not say: our assumption."""
CPU_ADAM_PER_CORE, CPU_ADAM_MOST = 1e8, 4e9
"""Parameters per second. ZeRO-Offload reports 4e9 on a node of 48 cores (Ren et al. 2021, arXiv 2101.06840)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Seconds in one phase of the whole step, by what limits them."""

    beside: dict[str, float] = field(default_factory=dict)
    """Each runs beside the device's work and beside the others."""
    waited: dict[str, float] = field(default_factory=dict)


def transfers_of(step: StepStages) -> dict[Phase, Transfers]:
    """Weights are prefetched, sums and copies run while the next block works: beside. Waited for are the first
    gather of a pass, DeepSpeed's sums below stage 3 (overlap_comm off), and everything in the update; with weights on
    NVMe, of which nothing is fetched ahead, all."""
    plan = step.plan
    if isinstance(plan.sharding, Single) and plan.offload == Offload():
        return {}
    exchanged = communication_of(plan)
    forward = exchange_seconds(plan.hardware, exchanged.forward)
    backward = exchange_seconds(plan.hardware, exchanged.backward)
    nodes = exchange_seconds(plan.hardware, exchanged.between_nodes)
    sums_are_waited_for = uses_deepspeed(plan) and zero_stage(plan) < 3
    back = {"communication": backward + nodes}
    links, links_back = (_host_links(step, backward=is_backward) for is_backward in (False, True))
    passes = {
        Phase.FORWARD: Transfers(
            beside={"communication": forward, **links},
            waited={"communication": _first(forward, exchanged.forward)},
        ),
        Phase.BACKWARD: Transfers(
            beside={**({} if sums_are_waited_for else back), **links_back},
            waited=back if sums_are_waited_for else {"communication": _first(backward, exchanged.backward)},
        ),
    }
    if not fetches_ahead(plan):
        passes = {
            Phase.FORWARD: Transfers(waited={"communication": forward, **links}),
            Phase.BACKWARD: Transfers(waited={**back, **links_back}),
        }
    return {
        **passes,
        Phase.UPDATE: Transfers(
            waited={
                "communication": exchange_seconds(plan.hardware, exchanged.update),
                **_host_update(plan),
            }
        ),
    }


def exchange_seconds(hardware: Hardware, exchange: Exchange) -> float:
    """bytes / (slowest link · efficiency) + calls · (start + hops): a ring is as fast as its slowest link.

    Inside a node as measured, if as many ranks were. Rings between nodes share the network of a node.
    """
    if exchange.calls == 0:
        return 0.0
    measured = hardware.calibration.collectives if hardware.calibration is not None else None
    if measured is not None and measured.ranks == exchange.ranks and not exchange.between_nodes:
        return exchange.bytes / measured.bandwidth + exchange.calls * measured.start_seconds
    gpu = hardware.gpu
    bandwidth = gpu.link_bandwidth * LINK_EFFICIENCY
    if gpu.is_geforce:
        bandwidth = min(bandwidth, STAGED_BANDWIDTH)
    if exchange.between_nodes:
        network = hardware.internode_bandwidth or ETHERNET
        bandwidth = min(bandwidth, LINK_EFFICIENCY * network / exchange.between_nodes)
    latency = COLLECTIVE_SECONDS + HOP_SECONDS * (exchange.ranks - 1)
    return exchange.bytes / bandwidth + exchange.calls * latency


def cpu_adam_seconds(plan: Plan) -> float:
    """P_trained / N · ranks of the node / (1e8 · cores, at most 4e9): memory-bound, so cores stop helping."""
    if isinstance(plan.tuning, Lomo) or plan.offload.optimizer == "device":
        return 0.0
    cores, calibration = plan.hardware.cpu_cores, plan.hardware.calibration
    if calibration is not None:
        return trained_share(plan) * ranks_per_node(plan) / calibration.cpu_adam
    rate = min(CPU_ADAM_MOST, CPU_ADAM_PER_CORE * cores) if cores else CPU_ADAM_MOST
    return trained_share(plan) * ranks_per_node(plan) / rate


def _first(seconds: float, exchange: Exchange) -> float:
    """Seconds of one collective a pass: nothing runs yet beside the first (in backward: after the last)."""
    return exchange.passes * seconds / exchange.calls if exchange.calls else 0.0


def _host_links(step: StepStages, *, backward: bool) -> dict[str, float]:
    """Weights come in every pass; gradients leave in backward; activations leave in forward and come in backward."""
    plan = step.plan
    passes = backward_passes(plan) if backward else plan.batch.accumulation
    offload = plan.offload
    weights = passes * weights_away_bytes(plan)
    gradients = 0
    if backward and gradients_go_to_the_host(plan) and not isinstance(plan.tuning, Lomo):
        gradients = passes * trained_share(plan) * plan.precision.compute_bytes
    activations = passes * offloaded_activation_bytes(step)
    stored = (weights if offload.parameters == "nvme" else 0) + (
        activations if offload.activations == "nvme" else 0
    )
    return {
        "host link": _host_seconds(plan, weights + gradients + activations),
        "NVMe": _nvme_seconds(plan, stored),
    }


def _host_update(plan: Plan) -> dict[str, float]:
    """The host's Adam, or reading and writing its states on NVMe where that takes longer; then updated weights
    are copied to the device, or written to NVMe if they are kept there."""
    adam = cpu_adam_seconds(plan)
    if not adam:
        return {}
    e, away = plan.precision.compute_bytes, _stepped_where_they_wait(plan)
    states = host_optimizer_bytes(plan) if plan.offload.optimizer == "nvme" else 0
    stored = _nvme_seconds(plan, 2 * states + (e * away if plan.offload.parameters == "nvme" else 0))
    slower = {"NVMe": stored} if stored > adam else {"CPU optimizer": adam}
    return {**slower, "host link": _host_seconds(plan, e * (trained_share(plan) - away))}


def _stepped_where_they_wait(plan: Plan) -> int:
    """Trained elements of this rank that are kept off the device between steps. On one device: those of the blocks, but
    no adapters (engine/streamed_weights.py). On several: all of its share."""
    if plan.offload.parameters == "device":
        return 0
    if not isinstance(plan.sharding, Single):
        return trained_share(plan)
    return (
        0
        if isinstance(plan.tuning, Lora)
        else share_elements([t for t in trained_tensors(plan) if t.in_block], plan)
    )


def _host_seconds(plan: Plan, size: float) -> float:
    if not size:
        return 0.0
    measured = plan.hardware.calibration.host_bandwidth if plan.hardware.calibration is not None else 0.0
    return size / (measured or plan.hardware.gpu.host_bandwidth * HOST_LINK_EFFICIENCY)


def _nvme_seconds(plan: Plan, size: float) -> float:
    """``size`` of every rank; those of a node share its disk."""
    return ranks_per_node(plan) * size / (plan.hardware.nvme_bandwidth or NVME_BANDWIDTH)
