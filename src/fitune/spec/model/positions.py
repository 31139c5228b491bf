"""Rotary positions and kinds of layers of a config.json: transformers would refuse these when it builds the model."""

from collections.abc import Mapping
from typing import Any

from fitune.spec.model.config_fields import ConfigFields
from fitune.spec.model.model_spec import ModelSpec

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}
"""Kind of rotary positions -> numbers without which transformers cannot compute them."""
_KINDS = ("full_attention", "sliding_attention")


def check_positions(fields: ConfigFields, spec: ModelSpec) -> None:
    """Raises ModelError for rotary positions, or a list of layers, that no model of ``spec``'s shapes can have.

    What transformers would refuse when it builds the model is refused as a plan already.
    """
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.values.get(name)
        if isinstance(value, Mapping):
            _check_rotary(ConfigFields(values=value, where=f"{fields.where}: {name}"), fields, spec)
    kinds = fields.words("layer_types")
    if kinds and (len(kinds) != spec.num_layers or not set(kinds) <= set(_KINDS)):
        fields.refuse("layer_types", f"must name {' or '.join(_KINDS)} for each of {spec.num_layers} layers")
    if kinds and spec.model_type == "mistral":
        fields.refuse("layer_types", "makes it another architecture (ministral), which is not supported")


def _check_rotary(rotary: ConfigFields, config: ConfigFields, spec: ModelSpec) -> None:
    """One description, or one for each kind of layer."""
    parts = [(key, part) for key, part in rotary.values.items() if isinstance(part, Mapping)]
    for key, part in parts:
        _check_rotary(ConfigFields(values=part, where=f"{rotary.where}: {key}"), config, spec)
    key = "rope_type" if rotary.values.get("rope_type") is not None else "type"
    kind = rotary.values.get(key) or "default"
    if spec.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its name before transformers 4.45
    if kind not in _NEEDS:
        rotary.refuse(key, f"is not known: transformers has {', '.join(_NEEDS)}")
    for name in _NEEDS[kind]:
        if rotary.values.get(name) is None:
            rotary.refuse(name, f"is missing, and {kind} positions need it")
    for name in ("long_factor", "short_factor") if kind == "longrope" else ():
        _check_length(rotary, name, config, spec)


def _check_length(rotary: ConfigFields, name: str, config: ConfigFields, spec: ModelSpec) -> None:
    share: Any = (
        rotary.values.get("partial_rotary_factor") or config.values.get("partial_rotary_factor") or 1.0
    )
    wanted, found = int(spec.head_dim * share) // 2, len(rotary.values[name])
    if found != wanted:
        rotary.refuse(name, f"has {found} factors, and half a head's turned part has {wanted}")
