"""TrainState, all that a run needs to go on as if it had never stopped, and its tensors as safetensors.

The library writes a file from tensors that are all in host memory and hashes nothing. This writer yields the same
format piece by piece, so a save holds one tensor outside its device and the hash costs no second read. Reading
(slices.py) is the library's. Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fitune.errors import CheckpointError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state after ``step`` optimizer steps.

    ``tensors`` are groups of named tensors: "model" (the trained parameters), "optimizer" ("exp_avg/<parameter>"),
    "rng" (generator states as bytes). Those that are divided over ranks are DTensors; those of a checkpoint are read
    when they are asked for (slices.py). ``facts`` is everything that is no tensor: the plan, the position in the data,
    the loss scale, the best evaluation loss.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: dict[str, Json]
    log: bytes = b""
    """metrics.jsonl up to this step: a log that is lost or changed is put back from here."""


NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def tensor_chunks(
    tensors: Mapping[str, Tensor], make: Callable[[str], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header, then each tensor.

    With ``make``, which makes a tensor by its name when it is written, ``tensors`` may be on "meta".
    Raises CheckpointError naming a tensor that is empty or of a type the format does not know.
    """
    header = _header(tensors)
    yield len(header).to_bytes(8, "little")
    yield header
    for name in aligned_order(tensors):
        yield bytes_of(tensors[name] if make is None else make(name))


def tensors_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the file that ``tensor_chunks`` makes."""
    return 8 + len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def aligned_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names as they are, but wide types first: every tensor then starts at a multiple of its element size."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in aligned_order(tensors):
        tensor = tensors[name]
        require_not_empty(name, tensor)
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}, which fitune does not save")
        stop = start + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def require_not_empty(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError naming a tensor without elements."""
    if tensor.numel() == 0:
        raise CheckpointError(
            f"tensor {name!r} is empty, shape {tuple(tensor.shape)}: nothing would be saved of it"
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """The content of ``tensor``, from the host."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
