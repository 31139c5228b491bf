"""From allocated bytes to what a row's instrument counts: torch's cache on top, the driver's context on top of that."""

from fitune.estimate.overhead import cuda_context_bytes
from fitune.records.mapping import Case
from fitune.records.timeline import Terms, allocated_terms, resident_terms
from fitune.spec.plan import Single
from fitune.spec.reports import Phase
from fitune.units import MIB

COLLECTIVES_BYTES = 300 * MIB
"""Channels and buffers that NCCL keeps outside torch's allocator for a communicator of one node.

NCCL's NCCL_BUFFSIZE is 4 MiB a channel and peer, of up to 32 channels. Not measured by us.
"""


def counted_bytes(case: Case, phases: dict[Phase, Terms] | None = None) -> int:
    """What the row's instrument would have said of this run."""
    phases = phases or allocated_terms(case)
    kind = case.row.words["mem_kind"]
    allocated = peak_bytes(phases)
    if "nvml" in kind or ("nvidia-smi" in kind and "torch" not in kind):
        return on_device_bytes(case, phases)
    if "reserved" in kind or "unknown" in kind or not kind:
        return allocated + cache_bytes(case, phases)
    return allocated


def peak_bytes(phases: dict[Phase, Terms]) -> int:
    return max(sum(terms.values()) for terms in phases.values())


def on_device_bytes(case: Case, phases: dict[Phase, Terms] | None = None) -> int:
    """Of the whole device: what decides whether a run fits."""
    phases = phases or allocated_terms(case)
    outside = cuda_context_bytes(case.plan.hardware.gpu)
    if not isinstance(case.plan.sharding, Single):
        outside += COLLECTIVES_BYTES
    return peak_bytes(phases) + outside


def cache_bytes(case: Case, phases: dict[Phase, Terms]) -> int:
    """Freed blocks that later requests do not fill: a tenth of what comes and goes, without expandable segments."""
    moving = peak_bytes(phases) - sum(resident_terms(case).values())
    return moving // 10
