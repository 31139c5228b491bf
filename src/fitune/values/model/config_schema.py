"""One table of what the fields of a model's config.json may be, checked before anybody uses one.

A field that is absent or null is its class's default; a field that is not in the table is left alone. Types are those
of transformers' configuration classes (a test compares), ranges those in which a model can be built and run. Every
complaint names the file, the field and the value.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fitune.errors import ModelError
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.model_spec import Dropout
from fitune.values.model.traits import ACTIVATIONS, WITH_WEIGHTS

Check = Callable[[ConfigFields, str], object]
"""Refuses the value of the field of that name; else what it returns is not used."""


def check_config(fields: ConfigFields, *, traced: bool) -> None:
    """Raises ModelError naming the first field of a config.json whose value has no meaning.

    A model whose blocks are ``traced`` may have any activation that transformers has.
    """
    _check(fields, CONFIG_FIELDS if not traced else _FIELDS_OF_TRACED)
    for name in fields.values:
        if "dropout" in name or name.endswith("_pdrop"):
            _number(low=0, below=1)(fields, name)
    text = fields.values.get("text_config")
    if isinstance(text, Mapping):
        check_config(ConfigFields(values=text, where=f"{fields.where}: text_config"), traced=traced)


def is_random_rate(name: str) -> bool:
    """True for a field of a config by which a model draws random numbers in training.

    transformers has two dozen names: dropout, activation_dropout, resid_pdrop, layerdrop, router_jitter_noise, ...
    """
    return "drop" in name or "jitter" in name


def dropout_of(config: Mapping[str, Any]) -> Dropout:
    """Where a model drops elements out, by the names of its rates; what is of no known place is of both outputs."""
    rates = {n: v for n, v in config.items() if is_random_rate(n) and type(v) in (int, float)}
    elsewhere = ("jitter", "layerdrop", "classifier", "summary")
    rates = {n: float(v) for n, v in rates.items() if not any(word in n for word in elsewhere)}
    attention = {n: v for n, v in rates.items() if n.startswith("att")}
    embedding = {n: v for n, v in rates.items() if n.startswith("emb")}
    outputs = {n: v for n, v in rates.items() if n not in attention and n not in embedding}
    return Dropout(
        attention=max(attention.values(), default=0.0),
        attention_output=max((v for n, v in outputs.items() if n != "activation_dropout"), default=0.0),
        mlp_output=max(outputs.values(), default=0.0),
        embedding=max(embedding.values(), default=0.0),
    )


def check_generation_config(fields: ConfigFields) -> None:
    """Raises ModelError naming the first field of a generation_config.json whose value has no meaning."""
    _check(fields, GENERATION_FIELDS)


def check_tokenizer_config(fields: ConfigFields) -> None:
    """Raises ModelError naming the first field of a tokenizer_config.json whose value has no meaning."""
    _check(fields, TOKENIZER_FIELDS)
    for name in fields.values:
        if name.endswith("_token") and name not in TOKENIZER_FIELDS:
            _token(fields, name)


def _check(fields: ConfigFields, table: Mapping[str, Check]) -> None:
    for name, value in fields.values.items():
        if value is not None and name in table:
            table[name](fields, name)


def _counts(fields: ConfigFields, name: str) -> None:
    """One for all blocks, or one for each (Gemma 3n)."""
    value = fields.values[name]
    for each in value if isinstance(value, list) else [value]:
        ConfigFields(values={name: each}, where=fields.where).count(name)


def _must(why: str) -> Callable[[Callable[[Any], bool]], Check]:
    """Refuses, with ``why``, the values for which the function is false."""

    def decorated(fits: Callable[[Any], bool]) -> Check:
        """The check by ``fits``."""

        def check(fields: ConfigFields, name: str) -> None:
            """Raises ModelError for a value that does not fit."""
            if not fits(fields.values[name]):
                fields.refuse(name, why)

        return check

    return decorated


def _whole(low: int, high: int) -> Check:
    @_must(f"must be a whole number from {low} to {high:,}")
    def check(value: Any) -> bool:
        """True for an int within the bounds."""
        return type(value) is int and low <= value <= high

    return check


def _number(*, low: float | None = None, above: float | None = None, below: float | None = None) -> Check:
    bounds = (("at least", low), ("more than", above), ("less than", below))
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    @_must(f"must be a number {words}".rstrip())
    def check(value: Any) -> bool:
        """True for None and a number below 1e300 in size and within the bounds; a bool is no number."""
        return value is None or (
            type(value) in (int, float)
            and abs(value) < 1e300  # an int may be larger than any float
            and (low is None or value >= low)
            and (above is None or value > above)
            and (below is None or value < below)
        )

    return check


@_must("must be a name")
def _word(value: Any) -> bool:
    return isinstance(value, str)


def _activation(fields: ConfigFields, name: str) -> None:
    value = fields.values[name]
    if not isinstance(value, str) or value not in ACTIVATIONS:
        learns = isinstance(value, str) and value in WITH_WEIGHTS
        why = "has weights of its own, which fitune does not train" if learns else "is no known activation"
        fields.refuse(name, why, hint=f"the known ones are {', '.join(sorted(ACTIVATIONS))}")


@_must("lets tokens see those behind them: this is no causal language model")
def _causal(value: Any) -> bool:
    """``vision``: tokens of a picture alone see those behind them."""
    return value in (False, "vision")


@_must("must be a token's id, or a list of ids")
def _ids(value: Any) -> bool:
    """−1 stands for no token in some configs of 2023."""
    ids = value if isinstance(value, list) else [value]
    return all(type(id_) is int and -1 <= id_ < 2**31 for id_ in ids)


@_must("must be a list of whole numbers")
def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)


@_must("must be an object")
def _object(value: Any) -> bool:
    return isinstance(value, Mapping)


@_must("must be a token")
def _token(value: Any) -> bool:
    content = value.get("content") if isinstance(value, Mapping) else value
    return value is None or isinstance(content, str | bool)  # some tools have switches of that name


def _tokens(fields: ConfigFields, name: str) -> None:
    value = fields.values[name]
    if not isinstance(value, list | Mapping):
        fields.refuse(name, "must be a list of tokens, or tokens by name")
    for token in value if isinstance(value, list) else value.values():
        if not isinstance(token, str) and not (
            isinstance(token, Mapping) and isinstance(token.get("content"), str)
        ):
            fields.refuse(name, "must hold tokens")


@_must("must be left or right")
def _side(value: Any) -> bool:
    return value in ("left", "right")


def _no_other_weights(fields: ConfigFields, name: str) -> None:
    fields.refuse(name, "names weights elsewhere, which fitune does not read")


def _readable(fields: ConfigFields, name: str) -> None:
    """Weights of few bits are read as 16-bit ones where they were stored as models/low_bit/files.py says."""
    _object(fields, name)
    value = fields.values[name]
    method = value.get("quant_method")
    can_be_read = (
        method == "mxfp4"
        or (method == "fp8" and _are_blocks(value.get("weight_block_size", [128, 128])))
        or (method == "bitsandbytes" and value.get("load_in_4bit") is True)
    )
    if not can_be_read:
        how = f" by {method}" if isinstance(method, str) else ""
        raise ModelError(
            f"{fields.where}: {name}: the weights are already quantised{how}",
            hint="name the 16-bit model it was made from; of quantised ones MXFP4, FP8 in blocks and bitsandbytes' "
            "4 bits are read",
        )


def _are_blocks(value: Any) -> bool:
    """Two lengths; None is one scale for each weight."""
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)
    )


def _rope(fields: ConfigFields, name: str) -> None:
    """Rotary positions: numbers by name, or such an object for each type of layer."""
    _object(fields, name)
    value = fields.values[name]
    inner = ConfigFields(values=value, where=f"{fields.where}: {name}")
    _check(inner, _ROPE)
    for key, part in value.items():
        if isinstance(part, Mapping):
            _rope(inner, key)


@_must("must be a list of positive numbers")
def _factors(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(v) in (int, float) and math.isfinite(v) and v > 0 for v in value
    )


_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "original_max_position_embeddings", "n_embd", "n_head",
    "n_layer", "n_positions", "n_inner", "ffn_hidden_size", "num_kv_heads", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    "num_ln_in_parallel_attn",
)  # fmt: skip
_FLAGS = (
    "tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias", "bias", "alibi", "multi_query",
    "parallel_attn", "new_decoder_architecture", "qk_layernorm", "use_sliding_window", "norm_topk_prob",
    "output_router_logits", "add_cross_attention", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn", "summary_use_proj", "summary_proj_to_labels", "is_encoder_decoder", "is_decoder",
    "output_hidden_states", "output_attentions", "return_dict", "use_bidirectional_attention",
)  # fmt: skip
_ZERO_AND_MORE = _number(low=0)
_POSITIVE = _number(above=0)
_ANY_NUMBER = _number()
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")

CONFIG_FIELDS: dict[str, Check] = {
    **dict.fromkeys(_COUNTS, ConfigFields.count),
    **dict.fromkeys(_FLAGS, ConfigFields.flag),
    **dict.fromkeys(_TOKENS, _ids),
    **dict.fromkeys(
        ("initializer_range", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "router_aux_loss_coef",
         "router_jitter_noise"), _ZERO_AND_MORE,
    ),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping",
         "query_pre_attn_scalar", "partial_rotary_factor"), _POSITIVE,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), _activation),
    **dict.fromkeys(("model_type", "summary_type", "transformers_version", "problem_type"), _word),
    **dict.fromkeys(("architectures", "layer_types"), ConfigFields.words),
    **dict.fromkeys(("id2label", "label2id", "text_config"), _object),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _rope),
    "quantization_config": _readable,
    "transformers_weights": _no_other_weights,
    "mlp_only_layers": _whole_numbers,
    "sliding_window": _whole(0, 1_000_000_000),
    "max_window_layers": _whole(0, 1_000_000),
    "pretraining_tp": _whole(1, 1_000_000),
    "chunk_size_feed_forward": _whole(0, 1_000_000_000),
    "num_labels": _whole(0, 1_000_000),  # transformers makes a name for each of them
}  # fmt: skip

_ROPE: dict[str, Check] = {
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
         "rope_theta", "partial_rotary_factor"), _POSITIVE,
    ),
    **dict.fromkeys(("long_factor", "short_factor"), _factors),
    **dict.fromkeys(("type", "rope_type"), _word),
    "mscale_all_dim": _ZERO_AND_MORE,
    "original_max_position_embeddings": ConfigFields.count,
}  # fmt: skip

_FIELDS_OF_TRACED = {
    **{name: check for name, check in CONFIG_FIELDS.items() if check is not _activation},
    "intermediate_size": _counts,
    "use_bidirectional_attention": _causal,
    # Granite 4.0 writes 0 where its blocks have one dense MLP
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _whole(0, 1_000_000)),
}

GENERATION_FIELDS: dict[str, Check] = {
    **dict.fromkeys((*_TOKENS, "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
                     "forced_eos_token_id"), _ids),
    **dict.fromkeys(("max_length", "max_new_tokens", "num_beams", "num_return_sequences"), ConfigFields.count),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), _whole(0, 1_000_000_000)),
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "output_attentions", "output_scores",
                     "return_dict_in_generate"), ConfigFields.flag),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _ZERO_AND_MORE),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _POSITIVE),
    **dict.fromkeys(("length_penalty", "diversity_penalty", "guidance_scale", "max_time"), _ANY_NUMBER),
    **dict.fromkeys(("transformers_version", "cache_implementation"), _word),
    "top_k": _whole(-1, 1_000_000_000),
}  # fmt: skip

TOKENIZER_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
                     "split_special_tokens", "legacy", "use_fast"), ConfigFields.flag),
    **dict.fromkeys(("padding_side", "truncation_side"), _side),
    **dict.fromkeys(("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"), _tokens),
    **dict.fromkeys(("sp_model_kwargs",), _object),
    "model_input_names": ConfigFields.words,
    "model_max_length": _POSITIVE,
}  # fmt: skip
