"""Refuses a config.json that fitune cannot plan or read, before anybody uses it.

A field that is absent or null is its class's default. Fields that shapes are made of are checked where they are read
(config_fields.py), the types of all others by transformers' configuration classes, which read them first. Every
complaint names the file, the field and the value.
"""

from collections.abc import Mapping
from typing import Any

from fitune.errors import ModelError
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.model_spec import Dropout
from fitune.values.model.traits import ACTIVATIONS, WITH_WEIGHTS

_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_LEAST = {"num_hidden_layers": 1, "n_layer": 1, "num_labels": 0}
"""Counts of what transformers makes one by one, blocks and names of classes: a slip of many zeros would never end."""


def check_config(fields: ConfigFields, *, traced: bool) -> None:
    """Raises ModelError for a config.json that describes no model fitune can plan, or weights it cannot read.

    A model whose blocks are ``traced`` may have any activation that transformers has.
    """
    given = {name: value for name, value in fields.values.items() if value is not None}
    for name in given:
        if "dropout" in name or name.endswith("_pdrop"):
            fields.share(name)
        elif name in _ACTIVATION_FIELDS and not traced:
            _require_activation(fields, name)
        elif name in _LEAST:
            fields.count(name, least=_LEAST[name])
    if given.get("use_bidirectional_attention", False) not in (False, "vision"):  # a picture's tokens alone
        why = "lets tokens see those behind them: this is no causal language model"
        fields.refuse("use_bidirectional_attention", why)
    if "transformers_weights" in given:
        fields.refuse("transformers_weights", "names weights elsewhere, which fitune does not read")
    if "quantization_config" in given:
        _require_readable(fields)
    if isinstance(text := given.get("text_config"), Mapping):
        check_config(ConfigFields(values=text, where=f"{fields.where}: text_config"), traced=traced)


def stop_ids(fields: ConfigFields) -> frozenset[int]:
    """Ids of ``eos_token_id``: one, a list, −1 (some configs of 2023) or none. Raises ModelError for anything else."""
    value = fields.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(each) is int and -1 <= each < 2**31 for each in ids):
        fields.refuse("eos_token_id", "must be a token's id, or a list of ids")
    return frozenset(ids)


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


def _require_activation(fields: ConfigFields, name: str) -> None:
    value = fields.values[name]
    if not isinstance(value, str) or value not in ACTIVATIONS:
        learns = isinstance(value, str) and value in WITH_WEIGHTS
        why = "has weights of its own, which fitune does not train" if learns else "is no known activation"
        fields.refuse(name, why, hint=f"the known ones are {', '.join(sorted(ACTIVATIONS))}")


def _require_readable(fields: ConfigFields) -> None:
    """Weights of few bits are read as 16-bit ones where they were stored as models/low_bit/files.py says."""
    name, value = "quantization_config", fields.values["quantization_config"]
    if not isinstance(value, Mapping):
        fields.refuse(name, "must be an object")
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
