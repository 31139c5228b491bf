"""A model folder or Hub id to a transformers model. Only safetensors are read."""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from fitune.errors import ModelError
from fitune.models.headers import FLOATS, StoredTensor, text_part
from fitune.models.low_bit.packing import Keep, PackOnArrival
from fitune.models.low_bit.quantised import PackedWeight, require_quantiser
from fitune.models.readers import (
    empty_model,
    filled_model,
    model_folder,
    read_config,
    read_generation_config,
    reading,
)
from fitune.models.weight_files import OnBytes, Unread, nobody, stored_tensors, unread_tensors
from fitune.values.plan import Dense, Precision, Quantiser

_DENSE = Dense()

_COMPUTE_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.BF16_MASTER: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """torch's type of weights and activations."""
    return _COMPUTE_DTYPES[precision]


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    base: Dense | Quantiser = _DENSE,
    keep: Keep | None = None,
    on_bytes: OnBytes = nobody,
) -> PreTrainedModel:
    """The causal language model at ``path`` with its weights in ``dtype`` on ``device``, in training order.

    Read tensor by tensor to where they belong; the linears of a quantised ``base`` are packed as they arrive. With
    ``keep`` the model has in their places what it returns; a tied table, which is compared with its twin, stays.
    Raises ModelError when there are no weights, only pickled ones, or weights that do not match the config.
    """
    require_quantiser(base)
    transformers_logging.disable_progress_bar()
    with reading(path, "the model cannot be loaded"):
        folder = model_folder(path)
        stored = stored_tensors(folder)
        for name, tensor in stored.items():
            if name.endswith(".weight") and tensor.dtype not in FLOATS:
                raise ModelError(
                    f"{tensor.file}: {name} holds {tensor.dtype}: damaged, or quantised weights",
                    hint="name the model in 16 bit; tuning: qlora packs it while it is read",
                )
        with unread_tensors(stored, on_bytes) as unread:
            packing = None if keep is None and isinstance(base, Dense) else PackOnArrival(base, keep=keep)
            model, report = _filled(folder, stored, unread, dtype=dtype, device=device, packing=packing)
        model.config.name_or_path = model.name_or_path = path
        model.generation_config = read_generation_config(folder) or model.generation_config
    _check_complete(path, report, stored)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # transformers unties two tables that differ; the plan, and whoever reads the export, would take them for one
    if model.config.tie_word_embeddings and head.data_ptr() != embedding.data_ptr():
        raise ModelError(
            f"{path}: the checkpoint has separate embeddings, but config.json says tie_word_embeddings",
            hint="set tie_word_embeddings: false in config.json if the model has two tables; else fetch it again",
        )
    return model


def _filled(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    unread: dict[str, Unread],
    *,
    dtype: torch.dtype,
    device: torch.device,
    packing: PackOnArrival | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with every tensor read and put in place, and what did not match."""
    config = read_config(str(folder))
    if config.get_text_config() is not config:  # a model that also sees
        stored, unread = text_part(stored), text_part(unread)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):  # before a module is made for each of them
        raise ModelError(
            f"{folder / 'config.json'}: num_hidden_layers = {layers:,}, and the weights are {len(stored)} tensors",
            hint=_OF_ONE_MODEL,
        )
    with torch.device("meta"):
        empty = empty_model(config)
    # before memory is taken for what no file has; what is missing in a model of the right size is named later
    described = sum(parameter.numel() for parameter in empty.parameters())
    there = sum(math.prod(tensor.shape) for tensor in stored.values())
    if described > 2 * there and described > _SMALL:
        raise ModelError(
            f"{folder / 'config.json'} describes {described:,} weights, and the files hold {there:,}",
            hint=_OF_ONE_MODEL,
        )
    try:
        model, report = filled_model(
            type(empty),
            empty.config,
            unread,
            dtype=dtype,
            quantization_config=packing,
            device_map=None if device.type == "cpu" else {"": device},
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except RuntimeError as error:  # transformers collects what packing raises and raises something of its own
        if packing is not None and packing.failure is not None:
            raise packing.failure from error
        raise
    if packing is not None:
        found = {(name, *shapes) for name, shapes in packing.misshapen.items()}
        report["mismatched_keys"] = found | set(report["mismatched_keys"])
    return model, report


def _check_complete(path: str, report: dict[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    def place(name: str) -> str:
        """The file that holds the tensor, in words; empty without one."""
        return f" in {stored[name].file.name}" if name in stored else ""

    misshapen = sorted(
        f"{name} {tuple(found)}{place(name)}, config.json says {tuple(wanted)}"
        for name, found, wanted in report["mismatched_keys"]
    )
    missing, unknown = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    files = ", ".join(sorted({tensor.file.name for tensor in stored.values()})[:3])
    problems = [
        f"{title}: {', '.join(names[:5])}"
        for title, names in (
            (f"missing in {files}", missing),
            ("of another shape", misshapen),
            ("unknown to the model", [name + place(name) for name in unknown]),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: the weights do not match config.json; {'; '.join(problems)}",
            hint=_OF_ONE_MODEL,
        )


_SMALL = 100_000_000
_OF_ONE_MODEL = "config.json and weights must be of the same model: fetch them again"

_SHOWN = 5


def require_finite(model: nn.Module, path: str) -> None:
    """Raises ModelError naming weights that are NaN or infinite: such a model answers, and every answer is noise.

    Of packed weights the scales are looked at: a weight that is not finite has left one that is not.
    """
    packed = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, PackedWeight)
        for name in module.packed_names
    }
    tensors = chain(model.named_parameters(), model.named_buffers())
    bad = not_finite({name: tensor for name, tensor in tensors if name not in packed})
    if bad:
        raise ModelError(
            f"{path}: weights are NaN or infinite: {first_of(bad)}",
            hint="fetch the model again, or take an earlier checkpoint of it",
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity.

    The largest magnitude of each decides: it is NaN when any element is, and costs no second tensor on the device.
    """
    checked = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    largest = {name: torch.linalg.vector_norm(tensor, ord=float("inf")) for name, tensor in checked.items()}
    return [name for name, value in largest.items() if not torch.isfinite(value)]


def first_of(names: list[str]) -> str:
    """The first few names, and how many more there are, for an error message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
