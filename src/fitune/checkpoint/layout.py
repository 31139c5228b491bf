"""Folders in Hugging Face's layout: a place to build one, and the files that belong into it."""

import copy
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fitune.checkpoint.durable import require_space
from fitune.errors import CheckpointError, FituneError, RunDirectoryError
from fitune.files import path_fault, remove, remove_stale_siblings, sync_tree, temporary_sibling
from fitune.models.adapter_config import WEIGHTS
from fitune.models.adapters import trained_table_modules
from fitune.models.headers import name_in_whole
from fitune.spec.deepspeed import tell_deepspeed_where
from fitune.units import MIB

_MARGIN_BYTES = 32 * MIB
"""Tokenizer, configs and card."""


@dataclass(slots=True)
class Stage:
    """A folder that is being built for ``target``."""

    target: Path
    folder: Path

    def secure(self) -> None:
        """Give it a durable name, ``<target>-unverified``: it stays whatever verification says and whatever ends it."""
        aside = unverified(self.target)
        _sync(self.folder)
        _replace(aside, self.folder)
        self.folder = aside


def unverified(target: Path) -> Path:
    """The folder in which an export waits for its verification."""
    return target.with_name(f"{target.name}-unverified")


@contextmanager
def staged(target: Path, size_bytes: int, *, replace: bool) -> Iterator[Stage]:
    """A temporary folder that becomes ``target`` when the block ends well and vanishes, unless it was secured, when it
    does not.

    Raises RunDirectoryError when ``target`` has content and ``replace`` is off, CheckpointError when the disk
    is too small or fails.
    """
    if fault := path_fault(str(target)):
        raise RunDirectoryError(f"export: {fault}", hint="choose another folder")
    if target.is_symlink():
        raise RunDirectoryError(
            f"{target} is a symbolic link, to {os.readlink(target)}", hint="name the folder itself"
        )
    if target.exists() and not (target.is_dir() and (replace or not any(target.iterdir()))):
        raise RunDirectoryError(f"{target} already exists and is not empty", hint="choose another folder")
    temporary = temporary_sibling(target)
    stage = Stage(target, temporary)
    transformers_logging.disable_progress_bar()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        require_space(target.parent, size_bytes + _MARGIN_BYTES, what=f"export {target.name}")
        remove_stale_siblings(target.parent, target.name)
        temporary.mkdir()
        yield stage
        _sync(stage.folder)
        _replace(target, stage.folder)
        if replace:  # what an earlier one left
            remove(unverified(target))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} could not be exported: {error}{_kept(stage)}") from error
    except FituneError as error:
        error.message += _kept(stage)
        raise
    finally:
        remove(temporary)


def _kept(stage: Stage) -> str:
    secured = stage.folder == unverified(stage.target)
    return f"; what was trained is kept in {stage.folder}" if secured else ""


def _sync(folder: Path) -> None:
    _let_all_be_read(folder)
    sync_tree(folder)


def write_adapter(
    model: PeftModel, folder: Path, weights: dict[str, Tensor], base: str, *, in_whole: bool
) -> None:
    """adapter_model.safetensors and adapter_config.json naming ``base``.

    ``in_whole``: transformers loads the base with the vision part, whose linears have the same short names.
    """
    save_file(
        {name_in_whole(n): t for n, t in weights.items()} if in_whole else weights,
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config: Any = copy.copy(model.peft_config[model.active_adapter])
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.task_type = config.task_type or "CAUSAL_LM"
    if in_whole:
        config.target_modules = {name_in_whole(name) for name in model.base_model.targeted_module_names}
        config.layers_to_transform = None
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file from every process
    saved = {name.rsplit(".", 1)[-1] for name in trained_table_modules(model.get_base_model())}
    config.modules_to_save = sorted(saved) or None
    config.save_pretrained(str(folder))


SHARD_BYTES = 5_000_000_000
"""The Hub's usual size of one file."""


def write_model(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    """config.json, generation_config.json, safetensors under the names of the Hub, an index when there are shards."""
    tell_deepspeed_where(has_gpu=torch.cuda.is_available())
    model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=SHARD_BYTES)
    # save_pretrained describes the model in memory: its type, and its adapters among the parameters.
    set_values(folder / "config.json", {"dtype": _dtype_name(weights)})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        metadata = json.loads(index.read_bytes())["metadata"]
        count = sum(tensor.numel() for tensor in _distinct(weights))
        set_values(index, {"metadata": {**metadata, "total_parameters": count}})


def write_texts(folder: Path, tokenizer: PreTrainedTokenizerBase, chat_template: str, card: str) -> None:
    """Tokenizer files, chat_template.jinja (empty: the tokenizer's own) and README.md."""
    tokenizer.save_pretrained(folder)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def _let_all_be_read(folder: Path) -> None:
    """Lets whoever may read the card read all files: safetensors writes them for their owner alone."""
    card = folder / "README.md"
    if card.is_file():
        for file in folder.iterdir():
            file.chmod(stat.S_IMODE(card.stat().st_mode))


def _distinct(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Tied weights once."""
    return list({_storage(tensor): tensor for tensor in weights.values()}.values())


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.data_ptr()


def bytes_in_files(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Bytes that ``weights`` take in a file, floating ones in ``dtype`` where it is given."""
    return sum(t.numel() * _stored_as(t, dtype).itemsize for t in _distinct(weights))


def _stored_as(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _dtype_name(weights: Mapping[str, Tensor]) -> str:
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    return str(dtype).removeprefix("torch.")


def set_values(file: Path, values: dict[str, Any]) -> None:
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, **values}, indent=2) + "\n", encoding="utf-8")


def _replace(target: Path, temporary: Path) -> None:
    aside = temporary_sibling(target.with_name(f"replaced-{target.name}"))
    if target.exists():
        os.rename(target, aside)
    os.rename(temporary, target)
    remove(aside)
