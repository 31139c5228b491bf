"""Bytes beside the device: a node's memory and NVMe, as strictly as device memory, and a checkpoint on disk.

Pinned buffers are counted at their size: one flat buffer each. (torch's own pinned allocator rounds every request
up to a power of two; a trainer that pins tensor by tensor with it can need up to twice as much.)
"""

from fitune.estimate.parameters import trained_parameters, weights_away_bytes
from fitune.estimate.shares import num_ranks, trained_share
from fitune.estimate.states import (
    SUB_GROUP,
    adalomo_state_bytes,
    eight_bit_state_bytes,
    has_masters,
    states_per_parameter,
)
from fitune.estimate.step import StepStages
from fitune.spec.hardware import Hardware
from fitune.spec.plan import AdamW8bit, Lomo, Plan
from fitune.units import GIB

Terms = dict[str, int]

PROCESS_BYTES = 3 * GIB
"""One rank's interpreter, torch, CUDA libraries, tokenised data. Others report 2–4 GiB. Not measured by us."""
PARAMETER_BUFFERS, PARAMETER_BUFFER = 5, 100_000_000
"""DeepSpeed's offload_param: buffer_count, buffer_size in elements (runtime/zero/offload_config.py)."""
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
            per_rank[f"{name} staging"] = min(size, staging)
    return {name: size * ranks for name, size in per_rank.items() if size}


def nvme_bytes(step: StepStages) -> int:
    """Bytes on one node's NVMe."""
    return ranks_per_node(step.plan) * sum(size for _, place, size, _ in _offloaded(step) if place == "nvme")


def usable_host_bytes(hardware: Hardware) -> int:
    """15/16 of a node's memory: the rest is for the system and its file cache. 0 when its size is not known."""
    return hardware.host_memory_bytes - hardware.host_memory_bytes // 16


def ranks_per_node(plan: Plan) -> int:
    return max(1, num_ranks(plan) // plan.hardware.nodes)


def host_optimizer_bytes(plan: Plan) -> int:
    """(4 + 4·states) · P_trained / N: fp32 masters and states of one rank, which the host steps.

    Ren et al. 2021, arXiv 2101.06840, section 4: Adam's 12 bytes.
    """
    if isinstance(plan.tuning, Lomo) or plan.offload.optimizer == "device":
        return 0
    return 4 * (1 + states_per_parameter(plan.optimizer)) * trained_share(plan)


def host_gradient_bytes(plan: Plan) -> int:
    """4 · P_trained / N: gradients arrive in 16 bit and wait in fp32 (DeepSpeed's fp32_groups_flat_partition.grad)."""
    if isinstance(plan.tuning, Lomo) or plan.offload.optimizer == "device":
        return 0
    return 4 * trained_share(plan)


def offloaded_activation_bytes(step: StepStages) -> int:
    """All that the blocks keep for backward, for one micro-batch on one rank."""
    if not step.activations_leave:
        return 0
    kept = step.kept_by_blocks[-1] - step.kept_by_blocks[step.recomputed]
    return kept + (step.recomputed - step.untouched_before(step.recomputed)) * step.hidden


def _offloaded(step: StepStages) -> list[tuple[str, str, int, int]]:
    """Name, place, bytes of one rank, and the most that passes through the host when the place is NVMe."""
    plan, e = step.plan, step.element_bytes
    offload = plan.offload
    weights = weights_away_bytes(plan)
    sub_group = min(SUB_GROUP, trained_share(plan))
    activations = offloaded_activation_bytes(step)
    return [
        ("weights", offload.parameters, weights, PARAMETER_BUFFERS * PARAMETER_BUFFER * e),
        ("optimizer", offload.optimizer, host_optimizer_bytes(plan), OPTIMIZER_BUFFERS * 4 * sub_group),
        ("gradients", offload.optimizer, host_gradient_bytes(plan), OPTIMIZER_BUFFERS * sub_group),
        ("activations", offload.activations, activations, 2 * max(block.kept for block in step.blocks)),
    ]


def checkpoint_bytes(plan: Plan) -> int:
    """P_trained · (e + 4 with masters) + states: what the next step depends on (train/resume.py).

    Frozen weights are not in it, and nothing is written twice however it is divided.
    """
    trained = trained_parameters(plan)
    weights = trained * (plan.precision.compute_bytes + (4 if has_masters(plan) else 0))
    return weights + _state_bytes(plan, trained)


def _state_bytes(plan: Plan, trained: int) -> int:
    if isinstance(plan.tuning, Lomo):
        return adalomo_state_bytes(plan) if plan.tuning.adaptive else 0
    if isinstance(plan.optimizer, AdamW8bit) and plan.offload.optimizer == "device":
        return eight_bit_state_bytes(plan)
    width = 4 if has_masters(plan) else plan.precision.compute_bytes
    return states_per_parameter(plan.optimizer) * trained * width
