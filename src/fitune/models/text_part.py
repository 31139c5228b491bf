"""The language model inside a checkpoint that also sees: which tensors are its own, and how its adapters are named.

Files of the whole call it ``language_model.model`` or ``model.language_model``, beside a vision tower and a projector,
which are not read. transformers loads some of them (Gemma 3, Mistral 3) as the whole; PEFT and vLLM then look for an
adapter's weights under the whole's names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fitune.models.door import read_config, reading

T = TypeVar("T")

_PART = re.compile(r"(?:^|(?<=\.))language_model\.")
_BODY = re.compile(r"^((?:base_model\.model\.)?)model\.(?!language_model\.)")


def has_other_parts(config: PretrainedConfig) -> bool:
    """True if the checkpoint of ``config`` holds more than the language model."""
    return config.get_text_config() is not config


def text_part(tensors: Mapping[str, T]) -> dict[str, T]:
    """The language model's tensors under its own names; all of them where no name says that it is a part."""
    if not any(map(_PART.search, tensors)):
        return dict(tensors)
    return {
        own_name(name): tensor
        for name, tensor in tensors.items()
        if _PART.search(name) or name.startswith("lm_head.")
    }


def own_name(name: str) -> str:
    """``model.language_model.layers.0`` -> ``model.layers.0``; other names as they are."""
    return _PART.sub("", name, count=1)


def name_in_whole(name: str) -> str:
    """``model.layers.0`` -> ``model.language_model.layers.0``, behind PEFT's beginning, too; the head as it is."""
    return _BODY.sub(r"\1model.language_model.", name)


def is_loaded_whole(path: str | Path) -> bool:
    """True if transformers makes of ``path`` a model in which the language model is a part."""
    with reading(str(path), "its config cannot be read"):
        config = read_config(str(path))
    text = config.get_text_config()
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return text is not config and classes.get(config.model_type) != classes.get(text.model_type)
