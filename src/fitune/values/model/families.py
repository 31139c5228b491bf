"""From a config.json to a ModelSpec: one function per architecture.

Names and shapes of the linears are those of transformers 5; a test builds every family on the meta
device and compares. Defaults for absent fields are those of the transformers configuration classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fitune.errors import ModelError
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.model_spec import (
    Dropout,
    Linear,
    ModelSpec,
    Widths,
    attention,
    experts,
    gated_mlp,
    plain_mlp,
)


def read_llama(fields: ConfigFields, name: str) -> ModelSpec:
    """Llama: ``attention_bias`` adds a bias to all four projections, ``mlp_bias`` to the MLP."""
    widths = _widths(fields, kv_optional=True)
    bias = fields.flag("attention_bias")
    linears = (
        *attention(widths, qkv_bias=bias, out_bias=bias),
        *gated_mlp(widths, bias=fields.flag("mlp_bias")),
    )
    return _spec(fields, name, widths, linears)


def read_mistral(fields: ConfigFields, name: str) -> ModelSpec:
    """Mistral: a sliding window of 4096 tokens where the field is absent, none where it is null."""
    widths = _widths(fields)
    window = fields.count("sliding_window", default=0) if "sliding_window" in fields.values else 4096
    return _spec(fields, name, widths, (*attention(widths), *gated_mlp(widths)), sliding_window=window)


def read_mixtral(fields: ConfigFields, name: str) -> ModelSpec:
    """Mixtral: experts in every block; their routing weights are fp32."""
    widths = _widths(fields)
    window = fields.count("sliding_window", default=0)
    return _mixture(fields, name, widths, sliding_window=window, weighs_experts_in_fp32=True)


def read_qwen2(fields: ConfigFields, name: str) -> ModelSpec:
    """Qwen2: bias on q, k and v alone; the sliding window may cover some of the blocks."""
    widths = _widths(fields)
    linears = (*attention(widths, qkv_bias=True), *gated_mlp(widths))
    return _spec(fields, name, widths, linears, **_qwen_windows(fields))


def read_qwen3(fields: ConfigFields, name: str) -> ModelSpec:
    """Qwen3: q and k are normalised per head; heads have 128 elements where the field is absent."""
    widths = _widths(fields, head_dim=128)
    bias = fields.flag("attention_bias")
    linears = (*attention(widths, qkv_bias=bias, out_bias=bias), *gated_mlp(widths))
    return _spec(fields, name, widths, linears, qk_norm="head", **_qwen_windows(fields))


def read_qwen3_moe(fields: ConfigFields, name: str) -> ModelSpec:
    """``intermediate_size`` of the spec is one expert's: no block has a dense MLP."""
    if fields.count("decoder_sparse_step", default=1) != 1:
        fields.refuse("decoder_sparse_step", "mixes dense and sparse blocks, which is not supported")
    if fields.values.get("mlp_only_layers"):
        fields.refuse("mlp_only_layers", "mixes dense and sparse blocks, which is not supported")
    widths = _widths(fields, intermediate="moe_intermediate_size")
    return _mixture(
        fields, name, widths,
        bias=fields.flag("attention_bias"), qk_norm="head", sliding_window=_qwen_window(fields),
    )  # fmt: skip


def read_gemma2(fields: ConfigFields, name: str) -> ModelSpec:
    """Gemma 2: every second block has the sliding window; scores and logits are capped unless the config says null."""
    return _gemma(
        fields, name, _widths(fields, head_dim=256), window_of=2,
        tied_embeddings=_tied(fields, default=True),
        caps_scores=fields.is_capped("attn_logit_softcapping", default=True),
        caps_logits=fields.is_capped("final_logit_softcapping", default=True),
    )  # fmt: skip


def read_gemma3_text(fields: ConfigFields, name: str) -> ModelSpec:
    """Gemma-3's text_config leaves out what equals the class's defaults."""
    defaults = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
    known = {key: value for key, value in fields.values.items() if value is not None}
    fields = ConfigFields(values={**defaults, **known}, where=fields.where)
    widths = _widths(fields, head_dim=256)
    return _gemma(
        fields, name, widths, window_of=fields.count("sliding_window_pattern", default=6),
        tied_embeddings=_tied(fields, default=True), qk_norm="head",
        caps_logits=fields.is_capped("final_logit_softcapping", default=False),
    )  # fmt: skip


def read_falcon(fields: ConfigFields, name: str) -> ModelSpec:
    """Falcon-7B: one key-value head, one norm; 40B and 180B ("new decoder"): grouped heads, two norms."""
    if fields.flag("alibi"):
        fields.refuse("alibi", "is not supported: only rotary positions are")
    new = fields.flag("new_decoder_architecture")
    parallel = fields.flag("parallel_attn", default=True)
    if new and not parallel:
        fields.refuse("parallel_attn", "contradicts new_decoder_architecture = True")
    norms = fields.count("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    if norms > (2 if new or not parallel else 1):
        fields.refuse("num_ln_in_parallel_attn", "must be 1 or 2, and 2 only in the new decoder")
    widths = _falcon_widths(fields, new=new)
    bias = fields.flag("bias")
    fused = Linear(
        name="self_attention.query_key_value", in_features=widths.hidden,
        out_features=widths.q_dim + 2 * widths.kv_dim, bias=bias,
    )  # fmt: skip
    out = Linear(name="self_attention.dense", in_features=widths.q_dim, out_features=widths.hidden, bias=bias)
    return _spec(
        fields, name, widths,
        (fused, out, *plain_mlp(widths, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=bias)),
        mlp_type="plain", norm_type="layer", norms_per_block=norms, parallel_blocks=parallel,
        masks_whole_stream=True, blocks_name="transformer.h",
        max_seq_len=fields.count("max_position_embeddings", default=2048),
        tied_embeddings=_tied(fields, default=True), dropout=_falcon_dropout(fields, parallel=parallel),
        activation=fields.word("activation", default="gelu"),
    )  # fmt: skip


def read_phi(fields: ConfigFields, name: str) -> ModelSpec:
    """Phi-1 to 2: attention and MLP side by side behind one LayerNorm, a bias on every linear and on the head."""
    widths = _widths(fields, kv_optional=True)
    linears = (
        *attention(widths, qkv_bias=True, out_bias=True, out_name="self_attn.dense"),
        *plain_mlp(widths, "mlp.fc1", "mlp.fc2", bias=True),
    )
    return _spec(
        fields, name, widths, linears,
        mlp_type="plain", norm_type="layer", norms_per_block=1, parallel_blocks=True,
        activation=fields.word("hidden_act", default="gelu_new"),
        head_bias=True, qk_norm="head" if fields.flag("qk_layernorm") else "none",
        dropout=replace(_residual_dropout(fields), embedding=fields.share("embd_pdrop")),
    )  # fmt: skip


def read_phi3(fields: ConfigFields, name: str) -> ModelSpec:
    """Phi-3 and Phi-4: q, k and v are one matrix, gate and up another."""
    widths = _widths(fields, kv_optional=True)
    h, f = widths.hidden, widths.intermediate
    linears = (
        Linear(name="self_attn.qkv_proj", in_features=h, out_features=widths.q_dim + 2 * widths.kv_dim),
        Linear(name="self_attn.o_proj", in_features=widths.q_dim, out_features=h),
        Linear(name="mlp.gate_up_proj", in_features=h, out_features=2 * f, part="mlp"),
        Linear(name="mlp.down_proj", in_features=f, out_features=h, part="mlp"),
    )
    return _spec(
        fields, name, widths, linears,
        sliding_window=fields.count("sliding_window", default=0), dropout=_residual_dropout(fields),
    )  # fmt: skip


def read_gpt2(fields: ConfigFields, name: str) -> ModelSpec:
    """GPT-2 keeps its weights transposed (Conv1D); in and out here mean what they mean everywhere else."""
    if fields.flag("add_cross_attention"):
        fields.refuse("add_cross_attention", "is not supported: fitune trains decoder-only models")
    hidden, heads = fields.count("n_embd", "hidden_size"), fields.count("n_head", "num_attention_heads")
    positions = fields.count("n_positions", "max_position_embeddings")
    _require_multiple(fields, "n_embd", hidden, of=heads, of_name="n_head")
    widths = Widths(
        hidden=hidden, intermediate=fields.count("n_inner", default=4 * hidden),
        heads=heads, kv_heads=heads, head_dim=hidden // heads,
    )  # fmt: skip
    linears = (
        Linear(name="attn.c_attn", in_features=hidden, out_features=3 * hidden, bias=True),
        Linear(name="attn.c_proj", in_features=hidden, out_features=hidden, bias=True),
        *plain_mlp(widths, "mlp.c_fc", "mlp.c_proj", bias=True),
    )
    return _spec(
        fields, name, widths, linears,
        num_layers=fields.count("n_layer", "num_hidden_layers"), mlp_type="plain", norm_type="layer",
        blocks_name="transformer.h",
        activation=fields.word("activation_function", default="gelu_new"),
        learned_positions=positions, max_seq_len=positions, tied_embeddings=_tied(fields, default=True),
        dropout=replace(
            _residual_dropout(fields, default=0.1),
            attention=fields.share("attn_pdrop", default=0.1),
            embedding=fields.share("embd_pdrop", default=0.1),
        ),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[ConfigFields, str], ModelSpec]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3_text,
    "falcon": read_falcon,
    "phi": read_phi,
    "phi3": read_phi3,
    "gpt2": read_gpt2,
}
"""model_type -> how its config is read."""


def _spec(
    fields: ConfigFields, name: str, widths: Widths, linears: tuple[Linear, ...], **different: Any
) -> ModelSpec:
    """The common kind of model (two RMSNorms, gated MLP, own head), except where ``different`` says so."""
    common: dict[str, Any] = {
        "mlp_type": "gated",
        "norm_type": "rms",
        "norms_per_block": 2,
        "has_liger_kernels": different.get("norm_type") != "layer",
    }
    readers: dict[str, Callable[[], Any]] = {
        "num_layers": lambda: fields.count("num_hidden_layers"),
        "max_seq_len": lambda: fields.count("max_position_embeddings"),
        "tied_embeddings": lambda: _tied(fields, default=False),
        "rotary_share": lambda: _rotary_share(fields),
        "dropout": lambda: Dropout(attention=fields.share("attention_dropout")),
        "activation": lambda: fields.word("hidden_act", default="silu"),
    }
    read = {key: reader() for key, reader in readers.items() if key not in different}
    return ModelSpec(
        name=name,
        model_type=fields.values["model_type"],
        hidden_size=widths.hidden,
        intermediate_size=widths.intermediate,
        num_heads=widths.heads,
        num_kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        vocab_size=fields.count("vocab_size"),
        dtype=stored_type(fields),
        linears=linears,
        **{**common, **read, **different},
    )


def _gemma(fields: ConfigFields, name: str, widths: Widths, *, window_of: int, **different: Any) -> ModelSpec:
    """Norms before and after both attention and MLP; every block sees a window but each ``window_of``-th."""
    bias = fields.flag("attention_bias")
    linears = (*attention(widths, qkv_bias=bias, out_bias=bias), *gated_mlp(widths))
    layers = fields.count("num_hidden_layers")
    whole = range(window_of - 1, layers, window_of)
    return _spec(
        fields, name, widths, linears, norms_per_block=4, scales_norms_in_fp32=True, **different,
        activation=fields.word("hidden_activation", default="gelu_pytorch_tanh"),
        sliding_window=fields.count("sliding_window", default=4096),
        full_attention_layers=_full_attention_layers(fields, tuple(whole)),
    )  # fmt: skip


def _mixture(
    fields: ConfigFields, name: str, widths: Widths, *, bias: bool = False, **different: Any
) -> ModelSpec:
    _refuse_router_loss(fields)
    total, chosen = fields.count("num_local_experts", "num_experts"), fields.count("num_experts_per_tok")
    if chosen > total:
        fields.refuse("num_experts_per_tok", f"is more than the {total} experts there are")
    linears = (*attention(widths, qkv_bias=bias, out_bias=bias), *experts(widths, total=total, chosen=chosen))
    return _spec(fields, name, widths, linears, num_experts=total, experts_per_token=chosen, **different)


def _refuse_router_loss(fields: ConfigFields) -> None:
    """transformers would add router_aux_loss_coef × a loss of the router's load, call by call."""
    coefficient = fields.values.get("router_aux_loss_coef")
    if not fields.flag("output_router_logits") or coefficient == 0:
        return
    times = "router_aux_loss_coef" if coefficient is None else f"router_aux_loss_coef = {coefficient!r}"
    fields.refuse(
        "output_router_logits",
        f"adds a load-balancing loss ({times}), which fitune does not train with",
        hint="output_router_logits: false in config.json trains the language-modelling loss alone",
    )


def _widths(
    fields: ConfigFields,
    *,
    kv_optional: bool = False,
    head_dim: int | None = None,
    intermediate: str = "intermediate_size",
) -> Widths:
    """An absent head_dim is ``head_dim``, else hidden / heads; null key-value heads are as many as heads."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_may_be_absent = kv_optional or "num_key_value_heads" in fields.values
    kv_heads = fields.count("num_key_value_heads", default=heads if kv_may_be_absent else None)
    _require_multiple(fields, "num_attention_heads", heads, of=kv_heads, of_name="num_key_value_heads")
    if fields.values.get("head_dim") is None and head_dim is None:
        _require_multiple(fields, "hidden_size", hidden, of=heads, of_name="num_attention_heads")
        head_dim = hidden // heads
    return Widths(
        hidden=hidden,
        intermediate=fields.count(intermediate),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.count("head_dim", default=head_dim),
    )


def _falcon_widths(fields: ConfigFields, *, new: bool) -> Widths:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    _require_multiple(fields, "hidden_size", hidden, of=heads, of_name="num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    if new:
        kv_heads = fields.count("num_kv_heads", default=heads)
        _require_multiple(fields, "num_attention_heads", heads, of=kv_heads, of_name="num_kv_heads")
    return Widths(
        hidden=hidden,
        intermediate=fields.count("ffn_hidden_size", default=4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
    )


def _require_multiple(fields: ConfigFields, name: str, value: int, *, of: int, of_name: str) -> None:
    if value % of:
        fields.refuse(name, f"is not a multiple of {of_name} = {of}")


def _qwen_windows(fields: ConfigFields) -> dict[str, Any]:
    """A window for the blocks from ``max_window_layers`` on, unless ``layer_types`` says which."""
    window = _qwen_window(fields)
    if not window:
        return {"sliding_window": 0}
    first = fields.count("max_window_layers", default=28, least=0)
    whole = tuple(range(min(first, fields.count("num_hidden_layers"))))
    return {"sliding_window": window, "full_attention_layers": _full_attention_layers(fields, whole)}


def _qwen_window(fields: ConfigFields) -> int:
    return fields.count("sliding_window", default=4096) if fields.flag("use_sliding_window") else 0


def _full_attention_layers(fields: ConfigFields, default: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that ``layer_types`` gives no window; the ``default`` of the family where it is absent. Whether the
    list can be one of the model is checked when its shapes are known (check_positions)."""
    kinds = fields.words("layer_types")
    return tuple(n for n, kind in enumerate(kinds) if kind != "sliding_attention") if kinds else default


def _rotary_share(fields: ConfigFields) -> float:
    """Share of every head that turns; transformers has moved it into the table of rotary settings."""
    tables = (fields.values.get(name) for name in ("rope_parameters", "rope_scaling"))
    places = [fields.values, *(table for table in tables if isinstance(table, Mapping))]
    share = next((s for place in places if (s := place.get("partial_rotary_factor")) is not None), 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ModelError(f"{fields.where}: partial_rotary_factor = {share!r} must be above 0 and at most 1")
    return float(share)


def _residual_dropout(fields: ConfigFields, *, default: float = 0.0) -> Dropout:
    """Attention's, and one rate for what attention and MLP add to the residual stream."""
    rate = fields.share("resid_pdrop", default=default)
    return Dropout(attention=fields.share("attention_dropout"), attention_output=rate, mlp_output=rate)


def _falcon_dropout(fields: ConfigFields, *, parallel: bool) -> Dropout:
    """``attention_dropout`` falls on attention's output where that is added by itself, and never on probabilities."""
    attention = fields.share("attention_dropout")
    return Dropout(attention_output=0.0 if parallel else attention, mlp_output=fields.share("hidden_dropout"))


def _tied(fields: ConfigFields, *, default: bool) -> bool:
    return fields.flag("tie_word_embeddings", default=default)


def stored_type(fields: ConfigFields) -> str:
    """Type that the weights are stored in; float32 when nothing is said, as in torch."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None:
        return "float32"
    short = value.removeprefix("torch.") if isinstance(value, str) else None
    if short not in ("float32", "bfloat16", "float16"):
        fields.refuse(name, "is not supported: weights are float32, bfloat16 or float16")
    return str(short)
