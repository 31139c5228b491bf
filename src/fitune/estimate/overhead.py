"""Bytes beside the device's tensors: driver and cache, a node's memory and NVMe, a checkpoint; how much may be filled.

None of these figures was measured by us yet; each says where it comes from.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from fitune.estimate.division import (
    num_ranks,
    num_shares,
    trained_share,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from fitune.estimate.parameters import trained_parameters, weights_away_bytes
from fitune.estimate.states import (
    has_masters,
    optimizer_bytes,
    states_per_parameter,
    sub_groups_of,
)
from fitune.estimate.step import StepStages, Terms
from fitune.units import GIB, MIB, power_of_two
from fitune.values.counts import trained_tensors
from fitune.values.deepspeed import NVME_BUFFERS, largest_share_elements
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.plan import AdamW8bit, Lomo, Lora, Offload, Plan, Single
from fitune.values.predictions import SLACK, WORKSPACE, Phase

COLLECTIVES_BYTES = 300 * MIB
"""Channels and buffers that NCCL keeps outside torch for a communicator of one node: 4 MiB (NCCL_BUFFSIZE) for each of
up to 32 channels and both directions. Not measured by us."""


def outside_terms(hardware: Hardware, *, slack_bytes: int, ranks: int = 1) -> dict[str, int]:
    """Bytes beside the tensors: nothing on a CPU, where live tensors are what is compared.

    Driver state and loaded kernels: 500 MiB from Ampere on, 300 MiB before. Others report 400–550 MiB on A100 and H100
    and 141 MiB on a T4 without torch's libraries. cuBLAS has 32 MiB for each handle and stream on compute capability 9
    and newer, 8.125 MiB before: workspace defaults of aten/src/ATen/cuda/CUDABlas, read in the source. Not measured by
    us.
    """
    capability = hardware.gpu.capability
    if hardware.gpu.is_cpu:
        return {}
    return {
        "CUDA context": (500 if capability >= (8, 0) else 300) * MIB,
        WORKSPACE: 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * 1024,
        SLACK: slack_bytes,
        **({"NCCL": COLLECTIVES_BYTES} if ranks > 1 else {}),
    }


_STREAMS = ("gathered weights", "reduce buffers")


def stream_cache_bytes(phases: Mapping[Phase, Mapping[str, int]], *, gradients: int, gathered: int) -> int:
    """(compute's peak + gradient shards + gathered weights + reduce buffers, each at its own most) − the peak.

    FSDP gathers on one stream and sums on another (_fsdp_param_group.py, FSDPCommContext), and torch's cache keeps a
    freed block for the stream that asked for it: what compute lets go of serves neither. ``gathered``: the most weights
    before the first block or before the last, which may be no phase's worst moment. Before memory runs out the cache is
    given back (CUDACachingAllocator.cpp, release_cached_blocks), which counts as a retry and costs time; over a frozen
    base that was not enough on the null GPU. On full fine-tuning with FSDP2 on 8 GPUs this took reserved bytes from
    14 % too little to 3 %, in a check that others ran.
    """
    streams = {name: max(terms.get(name, 0) for terms in phases.values()) for name in _STREAMS}
    streams["gathered weights"] = max(gathered, streams["gathered weights"])
    compute = max(
        sum(terms.values())
        - sum(terms.get(name, 0) for name in streams)
        - min(gradients, terms.get("gradients", 0))
        for terms in phases.values()
    )
    peak = max(sum(terms.values()) for terms in phases.values())
    return max(0, compute + gradients + sum(streams.values()) - peak)


def allocator_slack_bytes(hardware: Hardware, *, moving_bytes: int, recomputes: bool = False) -> int:
    """Bytes that torch's allocator needs beside what comes and goes: freed blocks do not always fit again.

    Of what moves 5 %, and 10 % where blocks run again; in segments of fixed sizes 30 and 50 %. What stays (weights,
    states) is packed once. Measured on the null GPU (results/null_gpu.json), micro-batches of equal and of mixed rows
    over four blocks of 8 B and over 32: 1 to 5 % was enough, and 5 to 10 % where all run again; in fixed segments 5 to
    28 %, and up to 48 %.
    """
    kept, recomputed = (0.05, 0.10) if hardware.growing_segments else (0.30, 0.50)
    return math.ceil((recomputed if recomputes else kept) * moving_bytes)


UNMEASURED = 0.03
"""Part of what could be filled that stays free on a card of a kind that was never measured."""


def usable_bytes(hardware: Hardware) -> int:
    """Total memory less a reserve for the driver, the display, other processes and what the estimate misses.

    GPU: 1/16 of it, at most 2 GiB, what other programs were seen to hold, and of the rest 3 % until a card of its kind
    was measured (24 GiB -> 21.8 GiB). CPU: the interpreter and the libraries take 1 GiB, and 1/8 stays for the rest of
    the machine.
    """
    total = hardware.gpu.memory_bytes
    if hardware.gpu.is_cpu:
        return max(0, total - total // 8 - GIB)
    return max(0, total - reserve_bytes(hardware.gpu) - hardware.taken_bytes - unmeasured_bytes(hardware))


def reserve_bytes(gpu: Gpu) -> int:
    """Bytes of a GPU that no plan fills: 1/16, at most 2 GiB."""
    return min(gpu.memory_bytes // 16, 2 * GIB)


def unmeasured_bytes(hardware: Hardware) -> int:
    """Bytes of a GPU that stay free until a record of ``fitune doctor --prove`` says what plans on its kind turned out
    to be; 0 for a processor, whose memory is not the processes' own anyway."""
    gpu = hardware.gpu
    if gpu.is_cpu or hardware.measured is not None:
        return 0
    return int(UNMEASURED * (gpu.memory_bytes - reserve_bytes(gpu)))


PROCESS_BYTES = 3 * GIB
"""One rank's interpreter, torch, CUDA libraries, tokenised data. Others report 2–4 GiB. Not measured by us."""
OPTIMIZER_BUFFERS = 4
"""DeepSpeed's offload_optimizer.buffer_count: fp32 weight, gradient and two moments of a sub-group of 1e9."""


def host_terms(step: StepStages) -> Terms:
    """Bytes of one node's memory by term; nothing on a CPU, where device and host are one."""
    plan = step.plan
    if plan.hardware.gpu.is_cpu:
        return {}
    ranks = ranks_per_node(plan)
    per_rank: Terms = {"processes": PROCESS_BYTES}
    for name, place, size, staging in _offloaded(step):
        if place == "cpu":
            per_rank[name] = size
        elif place == "nvme":
            per_rank[f"{name} staging"] = staging
    terms = {name: size * ranks for name, size in per_rank.items() if size}
    copies = min(ranks, num_shares(plan)) * checkpoint_copy_bytes(plan)
    return {**terms, "checkpoint copy": copies} if copies else terms


def checkpoint_copy_bytes(plan: Plan) -> int:
    """checkpoint / N: the copy of what one rank writes while the steps go on; 0 when it writes between two steps.

    Only the first rank writes what is not divided.
    """
    return -(-checkpoint_bytes(plan) // num_shares(plan)) if plan.run.async_save else 0


def room_bytes(plan: Plan) -> int:
    """Bytes of a device that a step may fill: on a CPU the copy of a checkpoint is in the same memory."""
    copy = checkpoint_copy_bytes(plan) if plan.hardware.gpu.is_cpu else 0
    return max(0, usable_bytes(plan.hardware) - copy)


def nvme_bytes(step: StepStages) -> int:
    """Bytes on one node's NVMe."""
    return ranks_per_node(step.plan) * sum(size for _, place, size, _ in _offloaded(step) if place == "nvme")


def usable_host_bytes(hardware: Hardware) -> int:
    """Nine tenths of a node's memory: the rest is for the system and its file cache. 0 when its size is not known."""
    return hardware.host_memory_bytes - hardware.host_memory_bytes // HOST_SPARE


def enough_host_bytes(needed: int) -> int:
    """Memory of a node of which ``needed`` bytes are usable."""
    return -(-needed * HOST_SPARE // (HOST_SPARE - 1))


HOST_SPARE = 10
"""One part in so many of a node's memory is never planned for."""


def uses_host(plan: Plan) -> bool:
    """True if something of the training waits on the host: then what the host needs is held against what it has."""
    return plan.offload != Offload() or (plan.run.async_save and not plan.hardware.gpu.is_cpu)


def ranks_per_node(plan: Plan) -> int:
    """Ranks on each node, at least 1."""
    return max(1, num_ranks(plan) // plan.hardware.nodes)


def host_optimizer_bytes(plan: Plan) -> int:
    """(4 + 4·states) · P_trained / N: fp32 masters and states of one rank, which the host steps.

    Ren et al. 2021, arXiv 2101.06840, section 4: Adam's 12 bytes.
    """
    if isinstance(plan.tuning, Lomo) or plan.offload.optimizer == "device":
        return 0
    return 4 * (1 + states_per_parameter(plan.optimizer)) * trained_share(plan)


def offloaded_activation_bytes(step: StepStages) -> int:
    """All that the blocks keep for backward, for one micro-batch on one rank."""
    if not step.activations_leave:
        return 0
    first, split = min(step.recomputed, step.untouched), step.recomputed
    left = (split - first) * step.hidden + step.left_by_blocks[split] - step.left_by_blocks[first]
    return step.kept_by_blocks[-1] - step.kept_by_blocks[split] + left


def _offloaded(step: StepStages) -> list[tuple[str, str, int, int]]:
    """Name, place, bytes of one rank, and those of the host that they pass through when the place is NVMe.

    Gradients arrive in 16 bit and wait in fp32 (DeepSpeed's fp32_groups_flat_partition.grad); FSDP2 has copies of a
    backward's beside their sums, which torch's own allocator pins by powers of two
    (aten/src/ATen/core/CachingHostAllocator.h). Everything else is pinned in rooms of fitune's own, which are as large
    as what is in them (engine/host.py). Weights on NVMe are read through buffers, and written after their step through
    the whole weights of a sub-group, where shares would do (runtime/zero/stage3.py, reserve_partitioned_swap_space):
    both stay for the whole run.
    """
    plan, offload, e = step.plan, step.plan.offload, step.element_bytes
    shares = num_shares(plan)
    sub_group = max(sub_groups_of(plan)) if "nvme" in offload.places else 0
    optimizer = host_optimizer_bytes(plan)
    gradients = 4 * trained_share(plan) if optimizer else 0
    whole = min(trained_parameters(plan), shares * sub_group)
    weight_buffers = e * (NVME_BUFFERS * largest_share_elements(plan) + whole)
    copies = 0
    if uses_fsdp(plan) and offload.optimizer != "device":
        copies = sum(t.count * power_of_two(e * t.share(shares)) for t in trained_tensors(plan))
    return [
        ("weights", offload.parameters, weights_away_bytes(plan), weight_buffers),
        ("optimizer", offload.optimizer, optimizer, min(optimizer, OPTIMIZER_BUFFERS * 4 * sub_group)),
        ("gradients", offload.optimizer, gradients, min(gradients, OPTIMIZER_BUFFERS * sub_group)),
        ("gradient copies", offload.optimizer, copies, 0),
        ("second copies", "cpu", second_copies_bytes(plan), 0),
        (
            "activations",
            offload.activations,
            offloaded_activation_bytes(step),
            2 * max(block.kept for block in step.blocks),
        ),
    ]


def second_copies_bytes(plan: Plan) -> int:
    """Bytes on the host of one rank that DeepSpeed has beside weights, masters and fp32 gradients.

    Stage 3: gradients of the share in 16 bit; adapters in one buffer, and the rooms they were in before, among those
    of small weights that stay (stage3.py). Below it: new weights of the share in 16 bit, the largest tensor whole, and
    at stage 2 gradients between micro-batches, each tensor whole (stage_1_and_2.py); one that two ranks share is whole
    on both, and counted once.
    """
    if not uses_deepspeed(plan):
        return 0
    e, share = plan.precision.compute_bytes, trained_share(plan)
    copies = 0
    if plan.offload.optimizer == "cpu":
        copies += e * share
        if zero_stage(plan) < 3:
            copies += e * max(t.elements for t in trained_tensors(plan))
        if zero_stage(plan) == 2 and plan.batch.accumulation > 1:
            copies += e * -(-trained_parameters(plan) // num_shares(plan))
    if plan.offload.parameters == "cpu" and isinstance(plan.tuning, Lora):
        copies += 2 * e * share
    return copies


def checkpoint_bytes(plan: Plan) -> int:
    """P_trained · (e + 4 with masters) + states: what the next step depends on (train/saving.py).

    Frozen weights are not in it, and nothing is written twice however it is divided.
    """
    trained, e = trained_parameters(plan), plan.precision.compute_bytes
    weights = trained * (e + (4 if has_masters(plan) else 0))
    on_device = plan.offload.optimizer == "device"
    if isinstance(plan.tuning, Lomo) or (isinstance(plan.optimizer, AdamW8bit) and on_device):
        return weights + optimizer_bytes(replace(plan, sharding=Single()))
    return weights + states_per_parameter(plan.optimizer) * trained * (4 if has_masters(plan) else e)
