"""A model without its weights: its config, and the same classes that loading would fill."""

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fitune.errors import ModelError
from fitune.spec.model_table import find_known_model


def model_config(path: str) -> PretrainedConfig:
    """transformers' config of a folder, of a model in the built-in table, or from the Hub and its cache.

    Raises ModelError when there is none. Of a model that also sees, the language model's part.
    """
    known = None if Path(path).is_dir() else find_known_model(path)
    try:
        if known is not None:
            words = dict(known.config)
            config: PretrainedConfig = AutoConfig.for_model(words.pop("model_type"), **words)
        else:
            config = AutoConfig.from_pretrained(path)
        return config.get_text_config()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: its config cannot be read: {str(error).strip().splitlines()[0]}"
        ) from error


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same model cut off after ``count`` blocks."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        shallow.layer_types = config.layer_types[:count]
    return shallow


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters of the right shapes and no content; under a fake mode they take no memory."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
