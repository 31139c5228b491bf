"""The header of a safetensors file: which tensors it has, of which dtype and shape, and whose they are. No torch here.

A safetensors file begins with the length of its header (8 bytes, little endian) and the header, JSON: name -> dtype,
shape and the place of its bytes behind the header (https://github.com/huggingface/safetensors#format).

Files of a model that also sees call the language model ``language_model.model`` or ``model.language_model``, beside a
vision tower and a projector. transformers loads some of them (Gemma 3, Mistral 3) as the whole; PEFT and vLLM then look
for an adapter's weights under the whole's names.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fitune.errors import ModelError
from fitune.spec.serial import parse_object
from fitune.units import MIB, format_bytes

_LARGEST_HEADER = 100 * MIB
"""As the safetensors library has it."""
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
AGAIN = "the file is damaged or was not fetched whole: fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> tensor. Raises ModelError when header or data are cut short or contradict one another."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8 or length > _LARGEST_HEADER:
            raise ModelError(
                f"{file}: cut short or no safetensors file: {format_bytes(size)}, and its first 8 bytes ask for a "
                f"header of {format_bytes(length)}",
                hint=AGAIN,
            )
        text = stream.read(length)
    try:
        header = parse_object(text)
    except ValueError as error:
        raise ModelError(f"{file}: its header is unreadable: {error}", hint=AGAIN) from None
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _stored(file, name, entry, data_bytes=size - begin) for name, entry in header.items()}
    stored = sum(tensor.size_bytes for tensor in tensors.values())
    if stored != size - begin:
        raise ModelError(
            f"{file}: its tensors take {stored} bytes, and there are {size - begin} behind the header",
            hint=AGAIN,
        )
    return tensors


def _stored(file: Path, name: str, entry: Any, *, data_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        fits = 0 <= begin <= end and end - begin == size
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file}: {name}: its entry in the header is unreadable: {error!r}", hint=AGAIN
        ) from None
    if not fits:
        raise ModelError(
            f"{file}: {name}: {list(shape)} of {dtype} are {size} bytes, and the header gives it {begin} to {end}",
            hint=AGAIN,
        )
    if end > data_bytes:
        raise ModelError(
            f"{file}: cut short: {name} ends at byte {end} of the data, and there are {data_bytes}",
            hint=AGAIN,
        )
    return StoredTensor(file=file, dtype=dtype, shape=shape, size_bytes=size)


T = TypeVar("T")

_PART = re.compile(r"(?:^|(?<=\.))language_model\.")
_BODY = re.compile(r"^((?:base_model\.model\.)?)model\.(?!language_model\.)")


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
