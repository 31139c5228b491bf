"""Models whose config.json is built in, by Hub name and short name.

The table, models.json, has the part of each config.json that decides shapes, so that planning needs no network; a test
holds each entry against the published number of parameters.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fitune.spec.model.families import FAMILIES

_USUAL_MEANING = {
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3.5-mini": "microsoft/Phi-3.5-mini-instruct",
    "phi-3-medium": "microsoft/Phi-3-medium-4k-instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "gemma-3-12b": "google/gemma-3-12b-pt",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "mamba-codestral-7b": "mistralai/Mamba-Codestral-7B-v0.1",
    "nemotron-nano-9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nemotron-nano-12b-v2": "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
}
"""Short names that the rule of ``_short_name`` does not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One line of the table: the exact Hub name and its config."""

    name: str
    config: Mapping[str, Any]
    """Fields of the text part, where the checkpoint has one for images too."""
    has_vision_part: bool = False
    copy_of: str = ""
    """Name of the model that a mirror or a copy in few bits holds; empty for the model itself."""


_MIRRORS = ("unsloth", "nousresearch")
"""They hold copies of others' models under the same names."""
_COPY = re.compile(r"(-unsloth)?-(bnb-4bit|bf16|fp8)$")
"""Endings of the names of copies in other types."""


def find_known_model(name: str) -> KnownModel | None:
    """The model of a Hub name or short name (``llama-3.1-8b``, ``qwen3-8b``), upper and lower case alike.

    A copy in fewer bits that can be read (models/low_bit/files.py) is the same model.
    """
    lowered = name.lower()
    owner, _, short = lowered.partition("/")
    if owner not in _MIRRORS:
        if (found := _index().get(lowered)) is not None or not short.endswith("-fp8"):
            return found
        found = _index().get(lowered.removesuffix("-fp8"))
    else:
        found = _index().get(_short_name(_COPY.sub("", short)))
    return None if found is None else replace(found, name=name, copy_of=found.name)


def text_model_like(config: Mapping[str, Any]) -> str | None:
    """The known model with the widths of a vision model's text part, and the nearest number of blocks."""
    widths = ("hidden_size", "intermediate_size", "num_attention_heads")
    alike = [
        model
        for model in _index().values()
        if not model.has_vision_part and all(model.config.get(key) == config.get(key) for key in widths)
    ]
    layers = config.get("num_hidden_layers") or 0
    nearest = min(alike, key=lambda model: abs(model.config["num_hidden_layers"] - layers), default=None)
    return None if nearest is None else nearest.name


def known_model_names() -> tuple[str, ...]:
    """Every Hub name of the table, in its order."""
    return tuple(dict.fromkeys(model.name for model in _index().values()))


def names_with_formulas() -> tuple[str, ...]:
    """Known names of models whose architecture needs no tracing."""
    models = {model.name: model for model in _index().values()}
    return tuple(name for name, model in models.items() if model.config["model_type"] in FAMILIES)


def configs_to_trace() -> tuple[str, ...]:
    """The first name of each config in the table whose architecture has no formula."""
    firsts = {id(model.config): model for model in reversed(_index().values())}
    return tuple(
        model.name for model in reversed(firsts.values()) if model.config["model_type"] not in FAMILIES
    )


def accepted_model_names() -> tuple[str, ...]:
    """Hub names and short names: what a did-you-mean may offer."""
    return (*known_model_names(), *_index())


@cache
def _index() -> dict[str, KnownModel]:
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    models = [
        KnownModel(name=name, config=entry["config"], has_vision_part=entry.get("has_vision_part", False))
        for entry in json.loads(text)
        for name in entry["names"]
    ]
    index = {model.name.lower(): model for model in models}
    for model in models:
        index.setdefault(_short_name(model.name), model)
    for short, name in _USUAL_MEANING.items():
        index.setdefault(short, index[name.lower()])
    return index


def _short_name(name: str) -> str:
    """``meta-llama/Meta-Llama-3-8B`` -> ``llama-3-8b``; ``meta-llama/Llama-2-7b-hf`` -> ``llama-2-7b``."""
    return name.rsplit("/", 1)[-1].lower().removeprefix("meta-").removesuffix("-hf")
