"""Embedding and head trained whole beside adapters: in place here, copies of their own in PEFT's files.

PEFT keeps the frozen table beside a trained copy (ModulesToSaveWrapper), V · h more for each of them, and unties the
two. Here the model's own parameters train, so nothing is held twice and what is tied stays tied; what is
written is PEFT's layout, and what is read from it is put back in place.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.models.adapter_config import WEIGHTS, read_adapter_config
from fitune.models.weight_files import read_header

PREFIX = "base_model.model."
"""Before a base model's names in an adapter's file."""


def train_tables(base: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """Let gradients into the tables that spec/tuning.py's Lora names."""
    for role, module in _tables(base).items():
        if role in modules_to_save:
            module.requires_grad_(True)


def trained_tables(base: PreTrainedModel) -> dict[str, nn.Module]:
    """Name in the base -> module, of those whose weight trains; both names of a table that is tied."""
    trained = [m for m in _tables(base).values() if m.weight.requires_grad]
    return {name: module for name, module in base.named_modules() if any(module is m for m in trained)}


def table_weights(base: PreTrainedModel) -> dict[str, Tensor]:
    """What trained of them, under the names of PEFT's files."""
    return {
        f"{PREFIX}{name}.{inner}": parameter
        for name, module in trained_tables(base).items()
        for inner, parameter in module.named_parameters()
    }


@torch.no_grad()
def copy_tables(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give ``target`` the trained tables of ``source``, in its own type."""
    for name, module in trained_tables(source).items():
        own = dict(target.get_submodule(name).named_parameters())
        for inner, parameter in module.named_parameters():
            own[inner].copy_(parameter)


def put_in_place(model: PeftModel) -> None:
    """Replace what PEFT wrapped by the saved copies, and tie again what the base ties."""
    base, adapter = model.get_base_model(), model.active_adapter
    wrapped = [(n, m) for n, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for name, wrapper in wrapped:
        parent, _, last = name.rpartition(".")
        setattr(base.get_submodule(parent), last, wrapper.modules_to_save[adapter])
    if wrapped:
        base.tie_weights()


def saved_rows(adapter: Path) -> int:
    """Rows of the largest table in an adapter's file, 0 when there is none."""
    tables = read_adapter_config(adapter).modules_to_save or []
    ends = tuple(f".{table}.weight" for table in tables)
    stored = read_header(adapter / WEIGHTS)
    return max((tensor.shape[0] for name, tensor in stored.items() if name.endswith(ends)), default=0)


@contextmanager
def ties_are_kept() -> Iterator[None]:
    """While PEFT reads an adapter: it warns of ties that it breaks, and here they are put back, or its copies equal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
        yield


def _tables(base: PreTrainedModel) -> dict[str, nn.Module]:
    return {"embed_tokens": base.get_input_embeddings(), "lm_head": base.get_output_embeddings()}
