"""A model written in Hugging Face's layout one tensor at a time, as each is made: nobody holds all of it.

save_pretrained takes a state dict, all weights in memory at once. Here a file's header is written from the shapes, and
each tensor is made, written and let go. It is read back the same way, and must be what was written, byte for byte.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from fitune.checkpoint.layout import SHARD_BYTES, set_values
from fitune.checkpoint.state import bytes_of, head_of
from fitune.errors import CheckpointError
from fitune.files import write_synced
from fitune.models.door import empty_model, read_config

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of a model, which ``make`` makes when it is written."""

    name: str
    like: Tensor
    """A tensor of the same shape and type, on "meta"."""
    make: Callable[[], Tensor]


def write_streamed(
    model: PreTrainedModel, folder: Path, pieces: Sequence[Piece], *, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write ``pieces`` in their order, with the configs of ``model``, and read them back; returns how many there are.

    Raises OSError, and CheckpointError naming a tensor that is not finite, or comes back otherwise.
    """
    shards = _shards(pieces, shard_bytes)
    digests: dict[str, str] = {}
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_synced(folder / name, _chunks(shard, digests))
    if len(shards) > 1:
        _write_index(folder / INDEX, names, shards)
    _write_configs(model, folder, pieces)
    for name in names:
        _require_written(folder / name, digests)
    _require_complete(folder, digests)
    return len(digests)


def _shards(pieces: Sequence[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Files of at most ``shard_bytes``, or of one larger tensor; wide types first, so that all are aligned."""
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in sorted(pieces, key=lambda piece: -piece.like.element_size()):
        if shards[-1] and size + piece.like.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.like.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _chunks(shard: Sequence[Piece], digests: dict[str, str]) -> Iterator[bytes | memoryview]:
    yield from head_of({piece.name: piece.like for piece in shard})
    for piece in shard:
        tensor = piece.make()
        if tensor.shape != piece.like.shape or tensor.dtype != piece.like.dtype:
            raise CheckpointError(
                f"tensor {piece.name!r} is {tensor.dtype} {tuple(tensor.shape)}, expected {piece.like.dtype} "
                f"{tuple(piece.like.shape)}"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"tensor {piece.name!r} is NaN or infinite; it is not exported")
        content = bytes_of(tensor)
        digests[piece.name] = hashlib.sha256(content).hexdigest()
        yield content


def _write_index(file: Path, names: Sequence[str], shards: Sequence[Sequence[Piece]]) -> None:
    pieces = [piece for shard in shards for piece in shard]
    metadata = {
        "total_parameters": sum(piece.like.numel() for piece in pieces),
        "total_size": sum(piece.like.nbytes for piece in pieces),
    }
    places = {piece.name: name for name, shard in zip(names, shards, strict=True) for piece in shard}
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def _write_configs(model: PreTrainedModel, folder: Path, pieces: Sequence[Piece]) -> None:
    """config.json and generation_config.json, as save_pretrained writes them."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    dtype = next(piece.like.dtype for piece in pieces if piece.like.is_floating_point())
    set_values(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def _require_written(file: Path, digests: dict[str, str]) -> None:
    """Raises CheckpointError naming the tensors of ``file`` that are not what was written."""
    with safe_open(file, framework="pt") as opened:
        wrong = [
            name
            for name in opened.keys()  # noqa: SIM118  (not a dict)
            if hashlib.sha256(bytes_of(opened.get_tensor(name))).hexdigest() != digests.get(name)
        ]
    if wrong:
        raise CheckpointError(f"{file}: not what was written: {', '.join(wrong[:5])}")


def _require_complete(folder: Path, digests: dict[str, str]) -> None:
    """Raises CheckpointError when a model built from the config that was written has other tensors than the files."""
    with torch.device("meta"):
        wanted = stored_names(empty_model(read_config(str(folder))))
    if wanted != digests.keys():
        odd = sorted(wanted ^ digests.keys())
        raise CheckpointError(f"{folder}: its config asks for other tensors than were exported: {odd[:5]}")


def stored_names(model: PreTrainedModel) -> set[str]:
    """Names of the tensors that a folder of ``model`` has: tied ones once, under the first of their names."""
    names = {name for name, _ in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    return names | (buffers & model.state_dict().keys())
