"""Bytes of what is multiplied and of what is trained: weights, adapters, gradients."""

from fitune.estimate.shares import (
    base_bytes,
    base_share_bytes,
    num_shares,
    scale_bytes,
    share_elements,
    uses_fsdp,
    weights_are_divided,
)
from fitune.estimate.tensors import adapter_tensors, base_tensors, is_quantised, trained_tables
from fitune.spec.counts import adapted_blocks, count_parameters, lora_parameters
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Dense, Lora, Plan, Single, base_of


def base_parameters(model: ModelSpec) -> int:
    """Every parameter of the model without adapters; tied embeddings count once."""
    return count_parameters(model).total


def trained_parameters(plan: Plan) -> int:
    """Parameters that get a gradient: all of them, or adapters and what is trained whole beside them."""
    if not isinstance(plan.tuning, Lora):
        return base_parameters(plan.model)
    tables = trained_tables(plan.model, plan.tuning)
    return lora_parameters(plan.model, plan.tuning) + sum(table.elements for table in tables)


def blocks_trained(plan: Plan) -> int:
    """How many blocks have something that trains."""
    return adapted_blocks(plan.model, plan.tuning) if isinstance(plan.tuning, Lora) else plan.model.num_layers


def weights_bytes(plan: Plan) -> int:
    """P · e: the model in the compute type; e = 4 for fp32, 2 for bf16 and fp16. Rotary tables are not in it.

    The linears of a quantised base are packed (quantised.py). Whole, however it is divided.
    """
    if isinstance(base_of(plan), Dense):
        return base_parameters(plan.model) * plan.precision.compute_bytes
    return base_bytes(base_tensors(plan.model), plan)


def weights_share_bytes(plan: Plan) -> int:
    """What one rank holds of them between two steps, wherever it keeps it."""
    if weights_are_divided(plan) and num_shares(plan) > 1:
        return base_share_bytes(plan)
    return weights_bytes(plan)


def weights_on_device_bytes(plan: Plan) -> int:
    """Between two steps. Of offloaded ones embedding, final norm and head stay on one device, scales on several."""
    if plan.offload.parameters == "device":
        return weights_share_bytes(plan)
    if isinstance(plan.sharding, Single):
        return base_bytes([t for t in base_tensors(plan.model) if not t.in_block], plan)
    return scale_bytes(plan)


def weights_away_bytes(plan: Plan) -> int:
    """What of a rank's share waits on the host or on NVMe."""
    if plan.offload.parameters == "device":
        return 0
    return weights_share_bytes(plan) - weights_on_device_bytes(plan)


def adapters_bytes(plan: Plan) -> int:
    """Adapters in the compute type, P_lora · e (models/adapters.py keeps PEFT from casting them to fp32).

    Divided like the base's weights; they stay on the device when those are offloaded.
    """
    if not isinstance(plan.tuning, Lora):
        return 0
    divided = weights_are_divided(plan)
    parameters = (
        share_elements(adapter_tensors(plan), plan) if divided else lora_parameters(plan.model, plan.tuning)
    )
    return parameters * plan.precision.compute_bytes


def weights_read_bytes(plan: Plan) -> int:
    """Stored bytes once; FSDP2 also reads and writes them when it copies them out of its all-gather buffer."""
    return weights_bytes(plan) * (3 if uses_fsdp(plan) else 1)


def unpacking_bytes(plan: Plan) -> int:
    """2·e per packed weight: it is written in the compute type and read back by the product, in every pass."""
    base, e = base_of(plan), plan.precision.compute_bytes
    packed = [t for t in base_tensors(plan.model) if t.linear is not None and is_quantised(t.linear, base)]
    return 2 * e * sum(t.elements * t.count for t in packed)


def gradients_bytes(plan: Plan) -> int:
    """P_trained · e: a gradient has the type of its weight. Whole; gradients.py says what rests where."""
    return trained_parameters(plan) * plan.precision.compute_bytes


def embedding_parameters(model: ModelSpec) -> int:
    """V · h, the input table alone; with tied embeddings it is the head too."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """V · h, + V with a bias; the same tensor as the embedding when tied."""
    return model.vocab_size * model.hidden_size + (model.vocab_size if model.head_bias else 0)
