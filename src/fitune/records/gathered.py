"""Whole weights and buffers beside shares, by the sharding that a published run used."""

from dataclasses import replace

from fitune.estimate.buffers import REDUCE_BUCKET, Buffers, block_weight_bytes, buffers_of, root_weight_bytes
from fitune.estimate.shares import uses_fsdp, zero_stage
from fitune.records.mapping import Case


def gathered_of(case: Case) -> Buffers:
    """Whole weights beside shares. FSDP1: the root from forward on, a block while it works, the next one if fetched."""
    plan = case.plan
    if case.by_deepspeed:
        # DeepSpeed allocates its bucket as configured, however little is trained
        own = buffers_of(plan)
        return replace(own, buckets=max(own.buckets, REDUCE_BUCKET * plan.precision.compute_bytes))
    if not uses_fsdp(plan) or case.habits.own_fsdp:
        return buffers_of(plan)
    root, block = root_weight_bytes(plan), block_weight_bytes(plan)
    stage = zero_stage(plan)
    whole = root + plan.model.num_layers * block
    if stage < 3:
        return Buffers(loss=whole, backward=whole)
    return Buffers(loss=root, backward=root + block * (2 if case.habits.prefetches else 1))
