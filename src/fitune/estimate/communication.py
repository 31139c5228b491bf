"""What the ranks send one another in one optimizer step, by phase."""

from dataclasses import dataclass

from fitune.estimate.buffers import REDUCE_BUCKET, block_weight_bytes, root_weight_bytes
from fitune.estimate.parameters import trained_parameters
from fitune.estimate.shares import num_ranks, num_shares, reduce_width
from fitune.spec.plan import Ddp, Plan, Single, Zero
from fitune.units import MIB

DDP_BUCKET_BYTES = 25 * MIB
"""torch's bucket_cap_mb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Bytes that one rank sends in a phase of the whole step, in ``calls`` collectives of ``ranks`` each."""

    bytes: float = 0.0
    calls: int = 0
    ranks: int = 1
    crosses_nodes: bool = False


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
        return round(self.forward.bytes + self.backward.bytes + self.between_nodes.bytes + self.update.bytes)


def forward_passes(plan: Plan) -> int:
    """One for each micro-batch: what backward reads is kept for a second one (engine/in_backward.py)."""
    return plan.batch.accumulation


def backward_passes(plan: Plan) -> int:
    """The same, twice where they measure the gradients first; recomputed blocks run again in each."""
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
        case Zero(backend="fsdp"):
            return _fsdp(plan, plan.sharding)
        case Zero():
            return _deepspeed(plan, plan.sharding)


def _fsdp(plan: Plan, zero: Zero) -> Communication:
    """Gathers every block and the root in forward, the blocks again in backward at stage 3; sums by group.

    Stage 1 gathers and sums once a step, the others in every pass. Frozen weights are gathered too.
    """
    groups = plan.model.num_layers + 1
    there, back = (1, 1) if zero.stage == 1 else (forward_passes(plan), backward_passes(plan))
    blocks = plan.model.num_layers * block_weight_bytes(plan)
    summed = trained_parameters(plan) * reduce_width(plan)
    again = blocks if zero.stage == 3 else 0
    calls = groups * (2 if zero.stage == 3 else 1)
    return Communication(
        forward=_ring(plan, there * (blocks + root_weight_bytes(plan)), calls=there * groups),
        backward=_ring(plan, back * (again + summed), calls=back * calls),
        between_nodes=_between_nodes(plan, zero, back * summed),
    )


def _deepspeed(plan: Plan, zero: Zero) -> Communication:
    """Stages 1 and 2 sum gradients by buckets (stage 1 once a step) and gather the new weights in the update.

    Stage 3 gathers all weights in forward and again in backward, frozen ones too.
    """
    e, trained = plan.precision.compute_bytes, trained_parameters(plan)
    there, back = (1, 1) if zero.stage == 1 else (forward_passes(plan), backward_passes(plan))
    buckets = max(1, -(-trained // REDUCE_BUCKET))
    between = _between_nodes(plan, zero, back * trained * e)
    if zero.stage < 3:
        return Communication(
            backward=_ring(plan, back * trained * e, calls=back * buckets),
            between_nodes=between,
            update=_ring(plan, trained * e, calls=buckets),
        )
    linears = plan.model.num_layers * len(plan.model.linears) + 2
    whole = plan.model.num_layers * block_weight_bytes(plan) + root_weight_bytes(plan)
    return Communication(
        forward=_ring(plan, there * whole, calls=there * linears),
        backward=_ring(plan, back * (whole + trained * e), calls=back * (linears + buckets)),
        between_nodes=between,
    )


def _ring(plan: Plan, size: float, *, calls: int) -> Exchange:
    hybrid = isinstance(plan.sharding, Zero) and plan.sharding.hybrid
    n = num_shares(plan) if hybrid else num_ranks(plan)
    crosses = plan.hardware.nodes > 1 and not hybrid
    return Exchange(bytes=size * (n - 1) / n, calls=calls if n > 1 else 0, ranks=n, crosses_nodes=crosses)


def _between_nodes(plan: Plan, zero: Zero, summed: float) -> Exchange:
    """Hybrid: each rank all-reduces its share with its like on the other nodes, 2 · (m−1)/m of it."""
    nodes = plan.hardware.nodes
    if not zero.hybrid or nodes == 1:
        return Exchange()
    share = summed / num_shares(plan)
    calls = backward_passes(plan) * (plan.model.num_layers + 1)
    return Exchange(bytes=2 * share * (nodes - 1) / nodes, calls=calls, ranks=nodes, crosses_nodes=True)
