"""What a published run keeps between two steps, and its gradients: widths by habit, shares by sharding."""

from fitune.estimate.overhead import cublas_workspace_bytes
from fitune.estimate.parameters import embedding_parameters, head_parameters
from fitune.estimate.quantised import base_of
from fitune.estimate.shares import (
    base_bytes,
    base_share_bytes,
    num_shares,
    share_elements,
    weights_are_divided,
    zero_stage,
)
from fitune.estimate.states import eight_bit_state_bytes, states_per_parameter
from fitune.estimate.tensors import base_tensors, trained_tensors
from fitune.records.gathered import gathered_of
from fitune.records.mapping import Case
from fitune.spec.plan import AdamW8bit, Ddp, Dense, Lomo, trains_every_weight

Terms = dict[str, int]


def resident_terms(case: Case) -> Terms:
    """Weights, trained copies, masters and moments of one rank."""
    plan, storage = case.plan, case.storage
    trained = stepped_elements(case)
    weights = 0 if trains_every_weight(plan.tuning) else base_weight_bytes(case)
    own = _held_elements(case) * storage.weight
    if plan.offload.parameters != "device":
        weights, own = 0, 0
    host_steps = plan.offload.optimizer != "device"
    return {
        "weights": weights,
        "trained weights": own,
        "masters": 0 if host_steps or isinstance(plan.tuning, Lomo) else trained * storage.master,
        "optimizer": 0 if host_steps else _moments_bytes(case, trained),
        "trained copies": _root_copies_bytes(case),
        "cuBLAS workspace": cublas_workspace_bytes(plan.hardware.gpu),
        "bucket copies": _bucket_copies(case),
        "undivided tensors": gathered_of(case).resident,
    }


def _bucket_copies(case: Case) -> int:
    """DDP's buckets hold every gradient a second time unless they are views of one another (torch's default: not).

    gradient_as_bucket_view; torch/nn/parallel/distributed.py. FSDP's NO_SHARD sums its flat gradients in place.
    """
    shares_flat = case.row.says("sharding", "no_shard")
    return gradient_bytes(case) if isinstance(case.plan.sharding, Ddp) and not shares_flat else 0


def base_weight_bytes(case: Case) -> int:
    """The frozen base on one rank; embedding, head and norms in fp32 where the trainer upcasts them."""
    plan = case.plan
    whole = (
        base_share_bytes(plan) if weights_are_divided(plan) else base_bytes(base_tensors(plan.model), plan)
    )
    packed = not isinstance(base_of(plan), Dense)
    if not (packed and case.habits.upcasts_packed and plan.precision.compute_bytes == 2):
        return whole
    dense = base_bytes([t for t in base_tensors(plan.model) if not t.in_block], plan)
    return whole + dense // (num_shares(plan) if weights_are_divided(plan) else 1)


def stepped_elements(case: Case) -> int:
    """Trained parameters that one rank's optimizer steps."""
    return share_elements(trained_tensors(case.plan), case.plan)


def _held_elements(case: Case) -> int:
    """Trained parameters that one rank keeps between steps: its share only where weights are divided."""
    if weights_are_divided(case.plan):
        return stepped_elements(case)
    return sum(t.elements * t.count for t in trained_tensors(case.plan))


def _root_copies_bytes(case: Case) -> int:
    """PEFT's modules_to_save: embedding and head once more, trained in the type they have: weight and two moments.

    peft/utils/other.py, ModulesToSaveWrapper copies the module; only adapters are cast to fp32.
    """
    plan = case.plan
    return root_copy_bytes(case) * (1 + states_per_parameter(plan.optimizer))


def root_copy_bytes(case: Case) -> int:
    """One tensor of that kind for embedding and head each: weights, or gradients, or a moment."""
    if not case.trains_root:
        return 0
    plan = case.plan
    elements = embedding_parameters(plan.model) + head_parameters(plan.model)
    return elements * plan.precision.compute_bytes


def _moments_bytes(case: Case, trained: int) -> int:
    plan = case.plan
    if isinstance(plan.tuning, Lomo):
        return 0
    if case.row.says("optimizer", "paged"):
        return 0  # managed memory, beside torch's allocator (bitsandbytes GlobalPageManager)
    if isinstance(plan.optimizer, AdamW8bit):
        return eight_bit_state_bytes(plan)
    return states_per_parameter(plan.optimizer) * trained * case.storage.moment


def gradient_bytes(case: Case) -> int:
    """All gradients when backward is through: a share where they are divided, none where they are used at once."""
    if used_at_once(case) or case.plan.offload.optimizer != "device":
        return 0
    elements = stepped_elements(case) if zero_stage(case.plan) >= 2 else _held_elements(case)
    return elements * case.storage.gradient + root_copy_bytes(case)


def used_at_once(case: Case) -> bool:
    """LOMO, and an optimizer that steps in backward hooks."""
    words = f"{case.row.words['optimizer']} {case.row.remarks}"
    in_backward = any(f"optimizer{word}" in words for word in ("_in_bwd", " in backward", "_in_backward"))
    return isinstance(case.plan.tuning, Lomo) or in_backward
