"""Exact parameter counts, as sums over the linears of one block."""

from collections.abc import Sequence

from fitune.errors import RecipeError, did_you_mean
from fitune.spec.model import Linear, ModelSpec, ParameterCounts


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


def lora_parameters(model: ModelSpec, *, rank: int, targets: Sequence[str]) -> int:
    """Trainable parameters of LoRA: L · Σ rank · (in + out) over the adapted linears of a block.

    A is rank × in, B is out × rank (Hu et al. 2021, arXiv 2106.09685, section 4.1); no bias is trained.
    """
    adapted = [linear for linear in model.linears if linear.is_target(targets)]
    return model.num_layers * sum(rank * (linear.in_features + linear.out_features) for linear in adapted)


def resolve_targets(model: ModelSpec, wanted: Sequence[str]) -> tuple[str, ...]:
    """The names LoRA adapts, in block order; ``all-linear`` (or ``all``) is every linear it can wrap.

    Raises RecipeError for a name the model does not have or cannot adapt.
    """
    known = model.adaptable_names
    if not wanted:
        raise RecipeError("lora_target_modules is empty", hint=f"all-linear, or some of {', '.join(known)}")
    for name in wanted:
        if name not in (*known, "all-linear", "all"):
            raise _unknown_target(model, name)
    if {"all-linear", "all"} & set(wanted):
        return known
    return tuple(name for name in known if name in wanted)


def _unknown_target(model: ModelSpec, name: str) -> RecipeError:
    if name in {linear.short_name for linear in model.linears}:
        why = "is a fused parameter in transformers that LoRA cannot wrap"
    else:
        why = "is no linear of this model"
    known = f"{model.name} has {', '.join(model.adaptable_names)}"
    return RecipeError(
        f"lora_target_modules: {name!r} {why}; {known}",
        hint=did_you_mean(name.rsplit(".", 1)[-1], model.adaptable_names) or "all-linear",
    )


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
