"""The header of a safetensors file: which tensors it has, of which dtype and shape, and whose they are. No torch here.

Files of a model that also sees call the language model ``language_model.model`` or ``model.language_model``, beside a
vision tower and a projector. transformers loads some of them (Gemma 3, Mistral 3) as the whole; PEFT and vLLM then look
for an adapter's weights under the whole's names.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fitune.errors import CheckpointError, ModelError, require_library
from fitune.values.answering import NO_ADAPTER, Adapter

_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that are read; integers would load, and mean nothing: nobody applies their scales."""
AGAIN = "the file is damaged or was not fetched whole: fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> tensor. Raises OSError, and ModelError when header or data are cut short or contradict one another."""
    require_library("safetensors", needed_by=f"the header of {file.name}", extra="train")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except SafetensorError as error:
        raise ModelError(f"{file}: cut short or no safetensors file: {error}", hint=AGAIN) from None
    tensors = {}
    for name, (dtype, shape) in found.items():
        if dtype not in _ITEM_BYTES:
            raise ModelError(f"{file}: {name} holds {dtype}, which is not read here", hint=AGAIN)
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        tensors[name] = StoredTensor(file=file, dtype=dtype, shape=shape, size_bytes=size)
    return tensors


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


_MLP_NAMES = (".mlp.", "feed_forward", ".fc1.", ".experts.")


def adapter_size(folder: str) -> Adapter:
    """Elements of a saved adapter, by the header of its file. Raises CheckpointError where there is none, ModelError
    where it is damaged."""
    if not folder:
        return NO_ADAPTER
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is not there", hint="name an adapter's folder, with adapter_config.json"
        )
    tensors = read_header(file)
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return Adapter(elements=elements, on_mlp=any(part in name for name in tensors for part in _MLP_NAMES))
