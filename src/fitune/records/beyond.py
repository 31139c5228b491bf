"""From allocated bytes to what a row's instrument counts: torch's cache on top, the driver's context on top of that."""

from fitune.estimate.buffers import block_weight_bytes, root_weight_bytes
from fitune.estimate.overhead import allocator_slack_bytes, cuda_context_bytes
from fitune.estimate.shares import uses_fsdp
from fitune.records.hardware import device_bytes, device_is_named
from fitune.records.mapping import Case
from fitune.records.resident import Terms, resident_terms
from fitune.records.timeline import working_bytes
from fitune.spec.plan import ChunkedLoss, Single
from fitune.spec.reports import Phase
from fitune.units import MIB

COLLECTIVES_BYTES = 300 * MIB
"""Channels and buffers that NCCL keeps outside torch's allocator for a communicator of one node.

NCCL_BUFFSIZE is 4 MiB, for each of up to 32 channels and both directions. Not measured by us.
"""

Phases = dict[Phase, Terms]


def counted_bytes(case: Case, phases: Phases) -> int:
    """What the row's instrument would have said of this run."""
    kind = case.row.words["mem_kind"]
    if "component" in kind:
        return component_sum(phases)
    match _counter(case):
        case "allocated":
            return peak_bytes(phases)
        case "reserved":
            return reserved_bytes(case, phases)
    return reserved_bytes(case, phases) + outside_bytes(case)


def _counter(case: Case) -> str:
    kind = case.row.words["mem_kind"]
    if "alloc" in kind or "active" in kind:
        return "allocated"
    if "reserved" in kind:
        return "reserved"
    if "nvml" in kind or "nvidia-smi" in kind:
        return "device"
    return case.habits.counter


def peak_bytes(phases: Phases) -> int:
    return max(sum(terms.values()) for terms in phases.values())


def component_sum(phases: Phases) -> int:
    """Weights, gradients, states and activations at their own maxima, temporaries left out: no moment has that sum."""
    whole = phases[Phase.UPDATE]
    kept = phases[Phase.LOSS]
    resident = sum(size for name, size in whole.items() if name != "temporaries")
    return resident + sum(kept[name] for name in ("recompute inputs", "activations", "loss"))


def reserved_bytes(case: Case, phases: Phases) -> int:
    """Allocated, and freed blocks in torch's cache; a full device gives back all but what is fragmented."""
    allocated = peak_bytes(phases)
    roomy = allocated + cache_bytes(case, phases)
    if not device_is_named(case.row):
        return roomy
    room = device_bytes(case.row) - outside_bytes(case)
    return max(min(roomy, room), allocated + fragmented_bytes(case, phases))


def on_device_bytes(case: Case, phases: Phases) -> int:
    """The least that a device must hold: what decides whether a run fits."""
    return peak_bytes(phases) + fragmented_bytes(case, phases) + outside_bytes(case)


def outside_bytes(case: Case) -> int:
    alone = isinstance(case.plan.sharding, Single)
    return cuda_context_bytes(case.plan.hardware.gpu) + (0 if alone else COLLECTIVES_BYTES)


def cache_bytes(case: Case, phases: Phases) -> int:
    """Freed blocks that the next phase cannot use.

    Fragments; on FSDP1 the gathered weights, whose stream's blocks serve no other; and where whole logits make the
    peak, what a block works with: it is cut out of their segments, so that the next logits need new ones.
    """
    if case.habits.expandable_segments:
        return fragmented_bytes(case, phases)
    cached = fragmented_bytes(case, phases)
    plan = case.plan
    if uses_fsdp(plan) and not case.habits.own_fsdp:
        cached += root_weight_bytes(plan) + 2 * block_weight_bytes(plan)
    loss, backward = (sum(phases[phase].values()) for phase in (Phase.LOSS, Phase.BACKWARD))
    if loss > backward and not isinstance(plan.loss, ChunkedLoss):
        cached += min(working_bytes(case), phases[Phase.LOSS]["loss"])
    return cached


def fragmented_bytes(case: Case, phases: Phases) -> int:
    """An eighth of what comes and goes: torch's cache splits a block only where the rest is still of use.

    Requests of more than 10 MiB round to 2 MiB and are cut from any larger free block (c10/cuda/CUDACachingAllocator);
    between transformers' sizes that leaves 10–15 % on a full device. With expandable segments: as in the estimate.
    """
    moving = peak_bytes(phases) - sum(resident_terms(case).values())
    return allocator_slack_bytes(moving) if case.habits.expandable_segments else moving // 8
