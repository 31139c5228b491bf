"""Bytes of what is multiplied and of what is trained: weights, adapters, gradients."""

from fitune.spec.model import ModelSpec
from fitune.spec.parameters import count_parameters, lora_parameters
from fitune.spec.plan import Full, Lomo, Lora, Plan, trains_every_weight


def base_parameters(model: ModelSpec) -> int:
    """Every parameter of the model without adapters; tied embeddings count once."""
    return count_parameters(model).total


def adapter_parameters(plan: Plan) -> int:
    """Σ over adapted linears and blocks of r·(in + out) (Hu et al. 2021, arXiv 2106.09685, section 4.1)."""
    match plan.tuning:
        case Lora(rank=rank, targets=targets):
            return lora_parameters(plan.model, rank=rank, targets=targets)
        case Full() | Lomo():
            return 0


def trained_parameters(plan: Plan) -> int:
    """Parameters that get a gradient: all of them, or the adapters alone."""
    return base_parameters(plan.model) if trains_every_weight(plan.tuning) else adapter_parameters(plan)


def weights_bytes(plan: Plan) -> int:
    """P · e: the model in the compute type; e = 4 for fp32, 2 for bf16 and fp16. Rotary tables are not in it."""
    return base_parameters(plan.model) * plan.precision.compute_bytes


def adapters_bytes(plan: Plan) -> int:
    """Adapters in the compute type, P_lora · e (models/adapters.py keeps PEFT from casting them to fp32)."""
    return adapter_parameters(plan) * plan.precision.compute_bytes


def gradients_bytes(plan: Plan) -> int:
    """P_trained · e: a gradient has the type of its weight."""
    return trained_parameters(plan) * plan.precision.compute_bytes


def embedding_parameters(model: ModelSpec) -> int:
    """V · h, the input table alone; with tied embeddings it is the head too."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """V · h, + V with a bias; the same tensor as the embedding when tied."""
    return model.vocab_size * model.hidden_size + (model.vocab_size if model.head_bias else 0)
