"""Weights that a checkpoint stores in 4 or 8 bits, read as the 16-bit weights that they stand for.

| stored as            | known by                                   | a weight is                                    |
|----------------------|--------------------------------------------|------------------------------------------------|
| MXFP4 (gpt-oss)      | ``…_blocks`` and ``…_scales``              | a 4-bit float times a power of two for 32      |
| FP8 (DeepSeek, Qwen) | ``….weight_scale_inv`` of an e4m3 weight   | an 8-bit float times the scale of its block    |
| bitsandbytes' 4 bits | ``….weight.quant_state.bitsandbytes__nf4`` | one of 16 values times its block's largest     |

Sources: OCP Microscaling Formats 1.0 (e2m1 elements, e8m0 scales); DeepSeek-V3's report, section 3.3.2; bitsandbytes'
QuantState. No code of a library that wrote them is run. Values are bf16: exact for MXFP4, rounded once for the others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fitune.errors import ModelError
from fitune.models.headers import AGAIN, FLOATS, StoredTensor
from fitune.units import KIB
from fitune.values.serial import parse_object

Decode = Callable[[Mapping[str, Tensor]], Tensor]
"""Parts by their role -> the weight, bf16."""
Block = tuple[int, int]
"""Rows and columns of an FP8 weight that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitTensor(StoredTensor):
    """A 16-bit weight in fewer bits; ``size_bytes`` is what all its parts take."""

    parts: Mapping[str, tuple[str, Path]]
    """Role -> name and file."""
    decode: Decode


def as_read(stored: Mapping[str, StoredTensor], block: Block) -> dict[str, StoredTensor]:
    """``stored`` with one 16-bit tensor in the place of the parts of each weight of few bits.

    Raises ModelError naming file and tensor when parts do not belong together.
    """
    found = dict(stored)
    for weights in (_mxfp4(stored), _fp8(stored, block), _bitsandbytes(stored)):
        for name, shape, parts, decode in weights:
            if twice := [part for part in parts.values() if part not in found]:
                raise ModelError(
                    f"{stored[twice[0]].file}: {twice[0]} belongs to two weights of few bits", hint=AGAIN
                )
            tensors = {role: found.pop(part) for role, part in parts.items()}
            found[name] = LowBitTensor(
                file=next(iter(tensors.values())).file,
                dtype="BF16",
                shape=shape,
                size_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
                parts={role: (parts[role], tensor.file) for role, tensor in tensors.items()},
                decode=decode,
            )
    return found


_Weights = Iterator[tuple[str, tuple[int, ...], dict[str, str], Decode]]
"""Name, shape, role -> name of a part, and how it is decoded."""


def _mxfp4(stored: Mapping[str, StoredTensor]) -> _Weights:
    """Stacks of experts: blocks [E, rows, groups, 16] with two elements a byte, scales [E, rows, groups]; the model has
    them as [E, 32 * groups, rows]."""
    for name, blocks in stored.items():
        stack = name.removesuffix("_blocks")
        if stack == name or blocks.dtype != "U8":
            continue
        scales = _part(stored, f"{stack}_scales", name, "U8")
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise _do_not_fit(name, blocks, scales)
        experts, rows, groups, _ = blocks.shape
        yield stack, (experts, 32 * groups, rows), {"blocks": name, "scales": f"{stack}_scales"}, _of_mxfp4


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127


def _of_mxfp4(parts: Mapping[str, Tensor]) -> Tensor:
    experts, rows, groups, _ = parts["blocks"].shape
    weight = torch.empty((experts, 32 * groups, rows), dtype=torch.bfloat16)
    for expert, (blocks, scales) in enumerate(zip(parts["blocks"], parts["scales"], strict=True)):
        powers = torch.exp2(scales.to(torch.float32) - _E8M0_BIAS).to(torch.bfloat16)
        values = _looked_up(_E2M1, blocks, low_first=True, dtype=torch.bfloat16)
        weight[expert] = (values * powers.unsqueeze(-1)).flatten(1).T
    return weight


def _fp8(stored: Mapping[str, StoredTensor], block: Block) -> _Weights:
    """Weights [rows, columns] with a scale for each block of them, or one for all."""
    for name, weight in stored.items():
        if weight.dtype != "F8_E4M3":
            continue
        scale = _part(stored, f"{name}_scale_inv", name, *FLOATS, "F8_E8M0")
        is_one = math.prod(scale.shape) == 1
        blocks = tuple(-(-length // side) for length, side in zip(weight.shape, block, strict=False))
        if len(weight.shape) != 2 or not (is_one or scale.shape == blocks):
            raise _do_not_fit(name, weight, scale)
        parts = {"weight": name, "scale": f"{name}_scale_inv"}
        # the scale of what goes in is for products in FP8
        parts |= {
            role: f"{name.removesuffix('weight')}{role}"
            for role in ("activation_scale", "input_scale")
            if f"{name.removesuffix('weight')}{role}" in stored
        }
        yield name, weight.shape, parts, partial(_of_fp8, block=block)


def _of_fp8(parts: Mapping[str, Tensor], block: Block) -> Tensor:
    weight, scale = parts["weight"].to(torch.float32), parts["scale"].to(torch.float32)
    if scale.numel() == 1:
        return weight.mul_(scale).to(torch.bfloat16)
    for rows, scales in zip(weight.split(block[0]), scale, strict=True):
        rows.mul_(scales.repeat_interleave(block[1])[: rows.shape[1]])
    return weight.to(torch.bfloat16)


_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE = 64 * KIB


def _bitsandbytes(stored: Mapping[str, StoredTensor]) -> _Weights:
    """Weights in a column of bytes, two elements each; the JSON of their state says shape and size of blocks."""
    for name, tensor in stored.items():
        weight, is_state, _ = name.partition(_STATE)
        if not is_state:
            continue
        packed = _part(stored, weight, name, "U8")
        state = _state(tensor, name)
        shape, size = tuple(state["shape"]), state["blocksize"]
        parts = {"packed": weight, "state": name}
        beside: dict[str, tuple[str, ...]] = {"absmax": FLOATS, "quant_map": FLOATS}
        if _NESTED in state:  # the maxima are of 8 bits themselves
            beside |= {"absmax": ("U8",), "nested_absmax": FLOATS, "nested_quant_map": FLOATS}
        for role, dtypes in beside.items():
            _part(stored, f"{weight}.{role}", weight, *dtypes)
            parts[role] = f"{weight}.{role}"
        blocks = -(-math.prod(shape) // size)
        if 2 * math.prod(packed.shape) < math.prod(shape) or stored[parts["absmax"]].shape != (blocks,):
            raise _do_not_fit(weight, packed, stored[parts["absmax"]])
        yield weight, shape, parts, partial(_of_bitsandbytes, state=state)


_NESTED = "nested_blocksize"


def _state(tensor: StoredTensor, name: str) -> dict[str, Any]:
    """Shape, sizes of blocks and offset, checked."""
    try:
        if tensor.size_bytes > _LARGEST_STATE:
            raise ValueError
        with safe_open(tensor.file, framework="pt") as file:
            state = parse_object(bytes(file.get_tensor(name).tolist()))
        counts = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        offset = state.get("nested_offset", 0.0)
        fits = all(type(count) is int and 0 < count < 2**40 for count in counts) and type(offset) is float
    except (ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise ModelError(f"{tensor.file}: {name}: no state of a weight of 4 bits", hint=AGAIN)
    return state


def _of_bitsandbytes(parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    largest = parts["absmax"]
    if _NESTED in state:
        outer = parts["nested_absmax"].repeat_interleave(state["nested_blocksize"])[: largest.numel()]
        largest = parts["nested_quant_map"][largest.long()] * outer + state["nested_offset"]
    count, size = math.prod(state["shape"]), state["blocksize"]
    values = _looked_up(
        parts["quant_map"].tolist(), parts["packed"].flatten(), low_first=False, dtype=torch.float32
    )
    scaled = values[:count].mul_(largest.to(torch.float32).repeat_interleave(size)[:count])
    return scaled.view(tuple(state["shape"])).to(torch.bfloat16)


def _looked_up(table: Sequence[float], packed: Tensor, *, low_first: bool, dtype: torch.dtype) -> Tensor:
    """Two elements for each byte of ``packed`` [..., n], by one look at the pairs of all bytes: [..., 2 n]."""
    pairs = [(table[byte & 0x0F], table[byte >> 4]) for byte in range(256)]
    values = torch.tensor([pair if low_first else pair[::-1] for pair in pairs], dtype=dtype)
    as_one = values.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).flatten()
    return as_one[packed.int()].view(dtype)


_IN_16_BITS = "the model in 16 bits: fitune packs it itself"


def _part(stored: Mapping[str, StoredTensor], name: str, of: str, *dtypes: str) -> StoredTensor:
    """``name``, of one of ``dtypes``, which belongs to the tensor ``of``."""
    if name not in stored:
        raise ModelError(f"{stored[of].file}: {of} is stored in few bits, and {name} is missing", hint=AGAIN)
    if (part := stored[name]).dtype not in dtypes:
        raise ModelError(
            f"{part.file}: {name} holds {part.dtype}, not {' or '.join(dtypes)}", hint=_IN_16_BITS
        )
    return part


def _do_not_fit(name: str, tensor: StoredTensor, scales: StoredTensor) -> ModelError:
    return ModelError(
        f"{tensor.file}: {name} {list(tensor.shape)} and its scales {list(scales.shape)} are not of one weight",
        hint=AGAIN,
    )
