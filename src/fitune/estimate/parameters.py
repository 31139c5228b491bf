"""Bytes of parameters: whole, packed and as one rank's share; weights, adapters and gradients in sum."""

import math
from collections.abc import Iterable

from fitune.estimate.division import num_shares, share_elements, uses_fsdp, weights_are_divided
from fitune.values.counts import (
    ParameterTensor,
    adapted_blocks,
    adapter_tensors,
    base_tensors,
    count_parameters,
    lora_parameters,
    trained_tables,
)
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Dense, Lora, Plan, Quantiser, Single, base_of
from fitune.values.quantisers import is_packed
from fitune.values.remembered import remembered_by


def stored_bytes(weights: int, base: Dense | Quantiser, *, element_bytes: int, copies: int) -> int:
    """One matrix, or a stack of ``copies`` with so many weights in all, as the device holds it."""
    if isinstance(base, Dense):
        return weights * element_bytes
    divided = base.scale_bytes(weights // copies, element_bytes=element_bytes) - base.table_bytes()
    return copies * (base.packed_bytes(weights // copies) + divided) + base.table_bytes(copies=copies)


def base_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Whole tensors of the base as they are stored: packed where quantised, else in the compute type."""
    base, e = base_of(plan), plan.precision.compute_bytes
    return sum(
        t.count * stored_bytes(t.elements, _stored_as(t, base), element_bytes=e, copies=t.copies)
        for t in tensors
    )


def gathered_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Bytes of them that are sent around when they are divided: all but the tables of packed ones."""
    tensors = list(tensors)
    return base_bytes(tensors, plan) - _table_bytes(tensors, base_of(plan))


@remembered_by("model", "tuning", "precision", "sharding", "hardware")
def base_share_bytes(plan: Plan) -> int:
    """The base's weights on the rank that holds most: words and scales are divided like long rows, tables are whole."""
    base, e, parts, divided = base_of(plan), plan.precision.compute_bytes, num_shares(plan), 0
    dense = []
    for t in base_tensors(plan.model):
        stored_as = _stored_as(t, base)
        if isinstance(stored_as, Dense):
            dense.append(t)
            continue
        words = t.copies * stored_as.packed_bytes(t.elements // t.copies)
        stored = stored_bytes(t.elements, stored_as, element_bytes=e, copies=t.copies)
        scales = stored - words - stored_as.table_bytes(copies=t.copies)
        divided += t.count * (-(-words // parts) + -(-scales // parts))
    return divided + table_bytes(plan) + share_elements(dense, plan) * e


def table_bytes(plan: Plan) -> int:
    """Tables beside packed matrices, which every rank holds whole."""
    return _table_bytes(base_tensors(plan.model), base_of(plan))


def _table_bytes(tensors: Iterable[ParameterTensor], base: Dense | Quantiser) -> int:
    if isinstance(base, Dense):
        return 0
    return sum(
        t.count * base.table_bytes(copies=t.copies) for t in tensors if _stored_as(t, base) is not _DENSE
    )


_DENSE = Dense()


def _stored_as(tensor: ParameterTensor, base: Dense | Quantiser) -> Dense | Quantiser:
    return base if tensor.linear is not None and is_packed(tensor.linear, base) else _DENSE


@remembered_by("model", "tuning")
def trained_parameters(plan: Plan) -> int:
    """Parameters that get a gradient: all of them, or adapters and what is trained whole beside them."""
    if not isinstance(plan.tuning, Lora):
        return count_parameters(plan.model).total
    tables = trained_tables(plan.model, plan.tuning)
    return lora_parameters(plan.model, plan.tuning) + sum(table.elements for table in tables)


def blocks_trained(plan: Plan) -> int:
    """Number of blocks that have something that trains."""
    if not isinstance(plan.tuning, Lora):
        return plan.model.num_layers
    return len(adapted_blocks(plan.model, plan.tuning))


def trains_in(plan: Plan, block: int) -> bool:
    """True if something of that block trains."""
    return plan.tuning.adapts(block) if isinstance(plan.tuning, Lora) else True


def weights_bytes(plan: Plan) -> int:
    """P · e: the model in the compute type; e = 4 for fp32, 2 for bf16 and fp16. Rotary tables are not in it.

    The linears of a quantised base are packed (quantised.py). Whole, however it is divided.
    """
    if isinstance(base_of(plan), Dense):
        return count_parameters(plan.model).total * plan.precision.compute_bytes
    return base_bytes(base_tensors(plan.model), plan)


def weights_share_bytes(plan: Plan) -> int:
    """Bytes of the weights that one rank holds between two steps, wherever it keeps them."""
    if weights_are_divided(plan) and num_shares(plan) > 1:
        return base_share_bytes(plan)
    return weights_bytes(plan)


def weights_on_device_bytes(plan: Plan) -> int:
    """Between two steps. Of offloaded ones embedding, final norm and head stay on one device, tables on several."""
    if plan.offload.parameters == "device":
        return weights_share_bytes(plan)
    if isinstance(plan.sharding, Single):
        return root_weight_bytes(plan)
    return table_bytes(plan)


@remembered_by("model", "tuning", "precision", "sharding", "offload", "hardware")
def weights_away_bytes(plan: Plan) -> int:
    """Bytes of a rank's share of the weights that wait on the host or on NVMe."""
    if plan.offload.parameters == "device":
        return 0
    adapters = _adapter_share_bytes(plan) if uses_fsdp(plan) else 0
    return weights_share_bytes(plan) - weights_on_device_bytes(plan) + adapters


def adapters_bytes(plan: Plan) -> int:
    """Adapters in the compute type, P_lora · e (models/adapters.py keeps PEFT from casting them to fp32).

    Divided like the base's weights; they stay on the device when those are offloaded, but FSDP2 sends whole blocks.
    """
    if uses_fsdp(plan) and plan.offload.parameters != "device":
        return 0
    return _adapter_share_bytes(plan)


def _adapter_share_bytes(plan: Plan) -> int:
    if not isinstance(plan.tuning, Lora):
        return 0
    divided = weights_are_divided(plan)
    parameters = (
        share_elements(adapter_tensors(plan), plan) if divided else lora_parameters(plan.model, plan.tuning)
    )
    return parameters * plan.precision.compute_bytes


@remembered_by("model", "tuning", "precision")
def root_weight_bytes(plan: Plan) -> int:
    """Embedding, final norm and head: FSDP2's root group."""
    return base_bytes([t for t in base_tensors(plan.model) if not t.in_block], plan)


@remembered_by("model", "tuning", "precision")
def weights_read_bytes(plan: Plan) -> int:
    """All blocks as they are stored, without adapters: what a pass through them reads. The embedding is looked up, and
    the head is read in the loss."""
    return base_bytes([t for t in base_tensors(plan.model) if t.in_block], plan)


def unpacking_bytes(plan: Plan) -> int:
    """2·e per packed weight: it is written in the compute type and read back by the product, in every pass."""
    base, e = base_of(plan), plan.precision.compute_bytes
    packed = [t for t in base_tensors(plan.model) if t.linear is not None and is_packed(t.linear, base)]
    return 2 * e * sum(t.elements * t.count for t in packed)


def gradients_bytes(plan: Plan) -> int:
    """P_trained · e: a gradient has the type of its weight. Whole; states.py says what rests where."""
    return trained_parameters(plan) * plan.precision.compute_bytes


def embedding_parameters(model: ModelSpec) -> int:
    """V · h, the input table alone; with tied embeddings it is the head too."""
    return model.vocab_size * model.hidden_size


def late_tables(model: ModelSpec) -> tuple[int, ...]:
    """Elements of each root parameter beside embedding, final norm and head, whose gradients backward makes last.

    A table from which each token has an embedding for every block (Gemma 3n, small Gemma 4) is larger than all blocks.
    """
    return tuple(elements for shape in model.roots if (elements := math.prod(shape)) > model.hidden_size)


def head_parameters(model: ModelSpec) -> int:
    """V · h, + V with a bias; the same tensor as the embedding when tied."""
    return model.vocab_size * model.hidden_size + (model.vocab_size if model.head_bias else 0)
