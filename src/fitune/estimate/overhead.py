"""What no tensor explains, by name, and how much of a device may be filled.

None of these figures was measured by us yet; each says where it comes from.
"""

from collections.abc import Mapping

from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.reports import Phase
from fitune.units import GIB, MIB

COLLECTIVES_BYTES = 300 * MIB
"""Channels and buffers that NCCL keeps outside torch for a communicator of one node: 4 MiB (NCCL_BUFFSIZE) for each of
up to 32 channels and both directions. Not measured by us."""


def outside_terms(gpu: Gpu, *, moving_bytes: int) -> dict[str, int]:
    """Bytes beside the tensors: nothing on a CPU, where live tensors are what is compared.

    ``moving_bytes``: what comes and goes within a step at its peak.
    """
    if gpu.is_cpu:
        return {}
    return {
        "CUDA context": cuda_context_bytes(gpu),
        "cuBLAS workspace": cublas_workspace_bytes(gpu),
        "allocator slack": allocator_slack_bytes(moving_bytes),
    }


_STREAMS = ("gathered weights", "reduce buffers")


def stream_cache_bytes(phases: Mapping[Phase, Mapping[str, int]], *, gradients: int) -> int:
    """(compute's peak + gradient shards + gathered weights + reduce buffers, each at its own most) − the peak.

    FSDP gathers on one stream and sums on another (_fsdp_param_group.py, FSDPCommContext), and torch's cache keeps a
    freed block for the stream that asked for it: what compute lets go of serves neither. Before memory runs out the
    cache is given back (CUDACachingAllocator.cpp, release_cached_blocks), which counts as a retry and costs time. On
    full fine-tuning with FSDP2 on 8 GPUs this took reserved bytes from 14 % too little to 3 %, in a check that others
    ran; not measured by us.
    """
    streams = {name: max(terms.get(name, 0) for terms in phases.values()) for name in _STREAMS}
    compute = max(
        sum(terms.values())
        - sum(terms.get(name, 0) for name in streams)
        - min(gradients, terms.get("gradients", 0))
        for terms in phases.values()
    )
    peak = max(sum(terms.values()) for terms in phases.values())
    return max(0, compute + gradients + sum(streams.values()) - peak)


def cuda_context_bytes(gpu: Gpu) -> int:
    """Driver state and loaded kernels: 500 MiB from Ampere on, 300 MiB before.

    Others report 400–550 MiB on A100 and H100 and 141 MiB on a T4 without torch's libraries. Not measured by us.
    """
    return 500 * MIB if gpu.capability >= (8, 0) else 300 * MIB


def cublas_workspace_bytes(gpu: Gpu) -> int:
    """32 MiB per handle and stream on compute capability 9 and newer, 8.125 MiB before.

    aten/src/ATen/cuda/CUDABlas workspace defaults, read in the source. Not measured by us.
    """
    return 32 * MIB if gpu.capability >= (9, 0) else 8 * MIB + 128 * 1024


def allocator_slack_bytes(moving_bytes: int) -> int:
    """5 % of what comes and goes: blocks round to 512 B, segments to 2 MiB, and freed ones do not always fit again.

    What stays (weights, states) is packed once. Holds with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True;
    fragmentation can be more without. Not measured by us.
    """
    return moving_bytes // 20


def usable_bytes(hardware: Hardware) -> int:
    """Total memory less a reserve for the driver, the display, other processes and what the estimate misses.

    GPU: 1/16 of it, at most 2 GiB (24 GiB -> 22.5 GiB). CPU: the interpreter and the libraries take 1 GiB, and
    1/8 stays for the rest of the machine.
    """
    total = hardware.gpu.memory_bytes
    if hardware.gpu.is_cpu:
        return max(0, total - total // 8 - GIB)
    return total - min(total // 16, 2 * GIB)
