"""The config of a model that is rehearsed, and of the same model with fewer blocks."""

import copy
from pathlib import Path

from transformers import PretrainedConfig

from fitune.models import door
from fitune.spec.model_table import find_known_model


def model_config(path: str) -> PretrainedConfig:
    """transformers' config of a folder, of a model in the built-in table, or from the Hub and its cache.

    Raises ModelError when there is none. Of a model that also sees, the language model's part.
    """
    known = None if Path(path).is_dir() else find_known_model(path)
    if known is not None:
        return door.config_from(known.config).get_text_config()
    with door.reading(path, "its config cannot be read"):
        return door.read_config(path).get_text_config()


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The same model cut off after ``count`` blocks."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        shallow.layer_types = config.layer_types[:count]
    return shallow
