"""Shapes of public models, so that planning needs no network: models.json, by Hub name.

Every entry is the part of the model's config.json that decides shapes, in the same words, read by the
same code as a downloaded one. A test holds each entry against the published number of parameters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
}
"""Short names that the rule of ``_short_name`` does not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One line of the table: the exact Hub name and its config."""

    name: str
    config: Mapping[str, Any]


def find_known_model(name: str) -> KnownModel | None:
    """By Hub name or short name (``llama-3.1-8b``, ``qwen3-8b``), upper and lower case alike."""
    return _index().get(name.lower())


def known_model_names() -> tuple[str, ...]:
    """Every Hub name of the table, in its order."""
    return tuple(dict.fromkeys(model.name for model in _index().values()))


def accepted_model_names() -> tuple[str, ...]:
    """Hub names and short names: what a did-you-mean may offer."""
    return (*known_model_names(), *_index())


@cache
def _index() -> dict[str, KnownModel]:
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    models = [
        KnownModel(name=name, config=entry["config"]) for entry in json.loads(text) for name in entry["names"]
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
