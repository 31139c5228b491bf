"""The model a row names, by the shapes that the row itself states."""

from dataclasses import replace
from functools import cache

from fitune.records.row import Row
from fitune.records.unrepresented import Unrepresented
from fitune.spec.blocks import Widths, attention, gated_mlp, plain_mlp
from fitune.spec.counts import count_parameters
from fitune.spec.model import ModelSpec
from fitune.spec.model_config import find_known_model, known_model_names, spec_from_config

TOLERATED = 0.05
"""Between the parameters that shapes give and those the row states: biases, padding of the vocabulary."""

_BIASED = ("qwen",)
"""Families with a bias on q, k and v (Qwen-1, 1.5 and 2; Qwen3 has a norm instead and is in the table)."""


def model_of(row: Row) -> ModelSpec:
    """A known model where the row's shapes are its own; else a plain decoder of these shapes.

    Raises Unrepresented when shapes are missing or do not make the parameters that the row states.
    """
    spec = _known(row) or _decoder(row)
    parameters = count_parameters(spec).total / 1e9
    if row.params_b is not None and abs(parameters / row.params_b - 1) > TOLERATED:
        raise Unrepresented(
            f"{row.model}: its shapes make {parameters:.2f} B parameters, the row says {row.params_b:.2f} B"
        )
    return _as_others_run_it(_with_separate_experts(spec), row)


def _as_others_run_it(spec: ModelSpec, row: Row) -> ModelSpec:
    """Fused attention over batches, where ours has a stream: windows take no mask there, and Falcon one row each."""
    if row.says("attention", "eager", "math"):
        return spec
    plain = "mpt" if spec.model_type == "falcon" else spec.model_type
    return replace(spec, sliding_window=0, full_attention_layers=(), model_type=plain)


def _known(row: Row) -> ModelSpec | None:
    """By its name; a mixture of experts, which no row's keys can say, also by its shapes and parameters."""
    named = find_known_model(row.model) if row.model else None
    if named is not None:
        spec = spec_from_config(named.config, name=named.name)
        if _agrees(spec, row):
            return spec
    mixtures = (spec for spec in _known_mixtures() if _agrees(spec, row))
    return next((spec for spec in mixtures if _weighs(spec, row)), None)


@cache
def _known_mixtures() -> tuple[ModelSpec, ...]:
    found = (find_known_model(name) for name in known_model_names())
    specs = (spec_from_config(model.config, name=model.name) for model in found if model is not None)
    return tuple(spec for spec in specs if spec.num_experts)


def _weighs(spec: ModelSpec, row: Row) -> bool:
    return row.params_b is not None and abs(count_parameters(spec).total / 1e9 / row.params_b - 1) < TOLERATED


def _with_separate_experts(spec: ModelSpec) -> ModelSpec:
    """Published runs are older than transformers 5: each expert's matrices were linears, which quantisers packed."""
    if not spec.num_experts:
        return spec
    linears = tuple(replace(m, adaptable=m.adaptable or m.part == "experts") for m in spec.linears)
    return replace(spec, linears=linears)


def _agrees(spec: ModelSpec, row: Row) -> bool:
    stated = (
        (spec.num_layers, row.size("layers")),
        (spec.hidden_size, row.size("hidden")),
        (spec.vocab_size, row.size("vocab")),
    )
    return all(size is None or size == known for known, size in stated)


def _decoder(row: Row) -> ModelSpec:
    needed = ("layers", "hidden", "heads", "intermediate", "vocab")
    missing = [key for key in needed if row.size(key) is None]
    if missing:
        raise Unrepresented(f"{row.model or 'model'}: {', '.join(missing)} not stated")
    layers, hidden, heads, intermediate, vocab = (row.size(key) or 0 for key in needed)
    head_dim = row.size("head_dim") or hidden // heads
    widths = Widths(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=row.size("kv_heads") or heads,
        head_dim=head_dim,
    )
    gated = not row.says("mlp_type", "plain")
    biased = any(name in row.model.lower() for name in _BIASED)
    mlp = gated_mlp(widths) if gated else plain_mlp(widths, "ffn.up_proj", "ffn.down_proj", bias=False)
    return ModelSpec(
        name=row.model,
        model_type="llama" if gated else "mpt",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=widths.kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_seq_len=row.size("seq_len") or 0,
        tied_embeddings=bool(row.switches["tied_embeddings"]),
        mlp_type="gated" if gated else "plain",
        norm_type="rms" if gated else "layer",
        norms_per_block=2,
        linears=(*attention(widths, qkv_bias=biased), *mlp),
    )
