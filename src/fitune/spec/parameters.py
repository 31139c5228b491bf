"""Exact parameter counts, as sums over the linears of one block."""

from fitune.spec.model import Linear, ModelSpec, ParameterCounts
from fitune.spec.tuning import Lora, Tuning, trains_embeddings


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameters by component: blocks × (linears + norms) + embeddings + final norm + head.

    A tied head counts once, as embeddings. ``active`` leaves out the experts a token does not visit.
    """
    parts = {part: _block_parameters(model, part) for part in ("attention", "mlp", "experts", "router")}
    norms = model.num_layers * _block_norm_parameters(model) + _norm_parameters(model, model.hidden_size)
    embeddings = (model.vocab_size + model.learned_positions) * model.hidden_size
    head = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    head += model.vocab_size if model.head_bias else 0
    idle = model.num_layers * sum(_idle_parameters(linear) for linear in model.linears)
    total = sum(parts.values()) + norms + embeddings + head
    return ParameterCounts(**parts, norms=norms, embeddings=embeddings, head=head, active=total - idle)


def lora_parameters(model: ModelSpec, lora: Lora) -> int:
    """Trainable parameters of LoRA: Σ rank · (in + out), + out with DoRA, over the adapted linears of adapted blocks.

    A is rank × in, B is out × rank (Hu et al. 2021, arXiv 2106.09685, section 4.1; of DoRA's norms Liu et al. 2024,
    arXiv 2402.09353, section 4.1); no bias is trained.
    """
    adapted = [linear for linear in model.linears if linear.is_target(lora.targets)]
    of_a_block = sum(
        lora.rank * (m.in_features + m.out_features) + m.out_features * lora.dora for m in adapted
    )
    return adapted_blocks(model, lora) * of_a_block


def adapted_blocks(model: ModelSpec, lora: Lora) -> int:
    """How many blocks have adapters."""
    return len(lora.layers) or model.num_layers


def blocks_gone_back_through(model: ModelSpec, tuning: Tuning) -> int:
    """How many blocks, counted from the last, backward goes through: all, or from the first adapted one on when nothing
    before it trains."""
    adapters_alone = isinstance(tuning, Lora) and not trains_embeddings(tuning)
    first = min(tuning.layers, default=0) if isinstance(tuning, Lora) and adapters_alone else 0
    return model.num_layers - first


def _block_parameters(model: ModelSpec, part: str) -> int:
    return model.num_layers * sum(linear.parameters for linear in model.linears if linear.part == part)


def _idle_parameters(linear: Linear) -> int:
    """What a token does not go through: the experts that were not chosen."""
    return linear.parameters // linear.copies * (linear.copies - linear.active_copies)


def _block_norm_parameters(model: ModelSpec) -> int:
    per_hidden = model.norms_per_block * _norm_parameters(model, model.hidden_size)
    match model.qk_norm:
        case "none":
            return per_hidden
        case "head":
            return per_hidden + 2 * _norm_parameters(model, model.head_dim)
        case "full":
            return per_hidden + _norm_parameters(model, model.q_dim) + _norm_parameters(model, model.kv_dim)


def _norm_parameters(model: ModelSpec, width: int) -> int:
    """RMSNorm has a weight, LayerNorm a weight and a bias."""
    return width if model.norm_type == "rms" else 2 * width
