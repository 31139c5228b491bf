"""Folders in Hugging Face's layout: a place to build one, and the files that belong into it.

save_pretrained takes a state dict, all weights in memory at once. Here a file's header is written from the shapes, and
each tensor is made, written and let go; then the file is read back, and must be what was written, byte for byte.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from fitune.checkpoint.commit import require_space
from fitune.checkpoint.state import aligned_order, bytes_of, tensor_chunks
from fitune.errors import CheckpointError, FituneError, RunDirectoryError
from fitune.files import path_fault, remove, remove_stale_siblings, sync_tree, temporary_sibling, write_synced
from fitune.models.adapter_file import WEIGHTS
from fitune.models.adapters import trained_table_modules
from fitune.models.headers import name_in_whole
from fitune.models.readers import empty_model, read_config
from fitune.models.weight_files import INDEX
from fitune.units import MIB

_MARGIN_BYTES = 32 * MIB
"""Tokenizer, configs and card."""
SHARD_BYTES = 5_000_000_000
"""The Hub's usual size of one file."""

Digests = dict[str, str]
"""Name of a tensor in the files -> sha256 of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFolder:
    """Where an export goes, and what lies there beside its weights."""

    target: Path
    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    """Empty: the tokenizer's own."""
    card: str
    """README.md."""
    also: Mapping[str, bytes] = field(default_factory=dict)
    """Other files by their names."""
    replace: bool = False
    """True where content of ``target`` goes; else a folder that has some is refused."""
    secure: bool = False
    """True where nothing else holds what was trained: it is kept in ``<target>-unverified`` until it is verified."""

    def write_texts(self, stage: "BuiltFolder") -> None:
        """Write all but the weights, which are there already, and secure the folder where that is wanted."""
        folder = stage.folder
        self.tokenizer.save_pretrained(folder)
        for name, content in self.also.items():
            (folder / name).write_bytes(content)
        if self.chat_template:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        (folder / "README.md").write_text(self.card, encoding="utf-8")
        if self.secure:
            stage.secure()


@dataclass(slots=True)
class BuiltFolder:
    """A folder that is being built for ``target``."""

    target: Path
    folder: Path

    def secure(self) -> None:
        """Give it a durable name, ``<target>-unverified``: it stays whatever verification says and whatever ends it."""
        aside = unverified(self.target)
        sync_tree(self.folder)
        _replace(aside, self.folder)
        self.folder = aside


def unverified(target: Path) -> Path:
    """The folder in which an export waits for its verification."""
    return target.with_name(f"{target.name}-unverified")


@contextmanager
def staged(target: Path, size_bytes: int, *, replace: bool) -> Iterator[BuiltFolder]:
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
    stage = BuiltFolder(target, temporary := temporary_sibling(target))
    transformers_logging.disable_progress_bar()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        require_space(target.parent, size_bytes + _MARGIN_BYTES, what=f"export {target.name}")
        remove_stale_siblings(target.parent, target.name)
        temporary.mkdir()
        yield stage
        sync_tree(stage.folder)
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


def _kept(stage: BuiltFolder) -> str:
    secured = stage.folder == unverified(stage.target)
    return f"; what was trained is kept in {stage.folder}" if secured else ""


def _replace(target: Path, temporary: Path) -> None:
    aside = temporary_sibling(target.with_name(f"replaced-{target.name}"))
    if target.exists():
        os.rename(target, aside)
    os.rename(temporary, target)
    remove(aside)


def write_adapter(
    model: PeftModel, folder: Path, weights: Mapping[str, Tensor], base: str, *, in_whole: bool
) -> Digests:
    """adapter_model.safetensors and adapter_config.json naming ``base``.

    ``in_whole``: transformers loads the base with the vision part, whose linears have the same short names.
    """
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
    return _written(folder / WEIGHTS, {name: made_piece(tensor) for name, tensor in weights.items()})


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file: another of its shape and type, and what makes it when it is written."""

    like: Tensor
    make: Callable[[], Tensor]


def made_piece(tensor: Tensor) -> FileTensor:
    """A tensor that is there."""
    return FileTensor(tensor, lambda: tensor)


def model_pieces(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], make: Callable[[str], Tensor], dtype: torch.dtype
) -> dict[str, FileTensor]:
    """Name on the Hub -> piece, of a model with ``tensors``, floating ones in ``dtype``; ``make`` makes each by name.

    Where files hold them otherwise than the model does (experts one by one), all are made now and converted together.
    """

    def kind_of(tensor: Tensor) -> torch.dtype:
        """``dtype`` for floating tensors, else their own."""
        return dtype if tensor.is_floating_point() else tensor.dtype

    def made(name: str) -> Tensor:
        """The tensor on the host, in the type that is written."""
        return make(name).detach().to("cpu", kind_of(tensors[name]))

    like = {name: torch.empty(t.shape, dtype=kind_of(t), device="meta") for name, t in tensors.items()}
    on_disk = revert_weight_conversion(model, like)
    if all(on_disk.get(name) is tensor for name, tensor in like.items()):
        return {name: FileTensor(tensor, partial(made, name)) for name, tensor in like.items()}
    converted = revert_weight_conversion(model, {name: made(name) for name in tensors})
    return {name: made_piece(tensor) for name, tensor in converted.items()}


def write_model(model: PreTrainedModel, folder: Path, pieces: Mapping[str, FileTensor]) -> Digests:
    """config.json, generation_config.json, safetensors of at most SHARD_BYTES, an index when there are several.

    Raises OSError, and CheckpointError naming a tensor that is empty, not finite, or comes back otherwise.
    """
    by_name = {name: piece.like for name, piece in pieces.items()}
    # on no device: the library keeps what shares a storage together, as experts do that were one stack
    likes = {name: torch.empty_like(by_name[name], device="meta") for name in aligned_order(by_name)}
    split = split_torch_state_dict_into_shards(likes, max_shard_size=SHARD_BYTES)
    digests: Digests = {}
    for file, names in split.filename_to_tensors.items():
        digests |= _written(folder / file, {name: pieces[name] for name in names})
    if split.is_sharded:
        totals = {"total_parameters": sum(x.numel() for x in likes.values()), **split.metadata}
        content = {"metadata": totals, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(like.dtype for like in likes.values() if like.is_floating_point())
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    return digests


def _written(file: Path, pieces: Mapping[str, FileTensor]) -> Digests:
    """Write one file, read it back, and return what is in it."""
    digests: Digests = {}
    likes = {name: piece.like for name, piece in pieces.items()}

    def made(name: str) -> Tensor:
        """The tensor; raises CheckpointError for one that is not as announced, or not finite."""
        tensor, like = pieces[name].make().contiguous(), likes[name]
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, expected {like.dtype} {tuple(like.shape)}"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"tensor {name!r} is NaN or infinite; it is not exported")
        digests[name] = digest(tensor)
        return tensor

    write_synced(file, tensor_chunks(likes, made))
    with safe_open(file, framework="pt") as opened:
        found = {name: digest(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118  (not a dict)
    require_same(found, digests, f"{file}: not what was written")
    return digests


def digest(tensor: Tensor) -> str:
    """sha256 of the bytes of ``tensor``."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def require_same(found: Mapping[str, str], wanted: Mapping[str, str], what: str) -> None:
    """Raises CheckpointError naming the tensors of ``wanted`` that are missing or others in ``found``."""
    wrong = [name for name, its in wanted.items() if found.get(name) != its]
    if wrong:
        raise CheckpointError(f"{what}: {len(wrong)} tensors differ or are missing: {', '.join(wrong[:5])}")


def require_complete(folder: Path, digests: Digests) -> None:
    """Raises CheckpointError when a model built from the config that was written has other tensors than the files."""
    with torch.device("meta"):
        model = empty_model(read_config(str(folder)))
        wanted = revert_weight_conversion(model, stored_tensors_of(model)).keys()
    if wanted != digests.keys():
        odd = sorted(wanted ^ digests.keys())
        raise CheckpointError(f"{folder}: its config asks for other tensors than were exported: {odd[:5]}")


def stored_tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that a folder of ``model`` has: tied ones once, under the first of their names."""
    names = {name for kind in (model.named_parameters, model.named_buffers) for name, _ in kind()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}
