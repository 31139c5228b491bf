"""Exports of a model that nobody holds whole: its weights come one by one, from all ranks or from a checkpoint.

``model`` is the model on "meta": names, shapes and settings without content. Every tensor is finite, is read back and
is what was written; a merged one is held to the law of merge_law.py. Logits are not compared: that takes all of it.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fitune.checkpoint.export import Exported
from fitune.checkpoint.layout import staged, write_adapter, write_texts
from fitune.checkpoint.merge import (
    Change,
    adapted_layers,
    factors_of,
    merged,
    require_plain_lora,
    stores_transposed,
    weight_name,
    without_layers,
)
from fitune.checkpoint.merge_law import is_merged
from fitune.checkpoint.parity import is_equal, require_same_files
from fitune.checkpoint.streamed import Piece, stored_names, write_streamed
from fitune.errors import CheckpointError
from fitune.models.adapters import PREFIX, is_loaded_whole, trained_table_modules
from fitune.models.headers import name_in_whole
from fitune.models.weight_files import Unread, nobody, stored_tensors, unread_tensors

Texts = tuple[PreTrainedTokenizerBase, str, str]
"""Tokenizer, chat template and model card."""


def stream_full(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    target: Path,
    *,
    base: Path,
    texts: Texts,
    dtype: torch.dtype,
    replace: bool = False,
    secure: bool = False,
) -> Exported:
    """Write all ``weights``, each asked for once and in their order; what else ``model`` stores is read in ``base``."""
    parameters = dict(model.named_parameters())
    with _BaseFiles(base) as files:
        pieces = [
            _piece(name, model.get_buffer(name), dtype, partial(files.read, name))
            for name in sorted(stored_names(model) - parameters.keys())
        ]
        pieces += [
            _piece(name, parameters[name], dtype, partial(weights.__getitem__, name)) for name in weights
        ]
        return _export(model, pieces, target, texts=texts, replace=replace, secure=secure)


def stream_adapter(
    model: PeftModel,
    weights: Mapping[str, Tensor],
    target: Path,
    *,
    base: str,
    texts: Texts,
    replace: bool = False,
    secure: bool = False,
) -> Exported:
    """Write the adapter with its trained tables, ``weights``, all on the host."""
    found, in_whole = _adapter_weights(model, weights), is_loaded_whole(base)
    size = sum(tensor.nbytes for tensor in found.values())
    with staged(target, size, replace=replace) as stage:
        write_adapter(model, stage.folder, found, base, in_whole=in_whole)
        write_texts(stage.folder, *texts)
        if secure:
            stage.secure()
        compared = require_same_files(
            stage.folder,
            {
                name_in_whole(name) if in_whole else name: partial(is_equal, tensor, tensor.dtype)
                for name, tensor in found.items()
            },
        )
        if compared != len(found):
            raise CheckpointError(
                f"{stage.folder}: {compared} of {len(found)} tensors of the adapter are there"
            )
    return Exported(path=target, max_logit_difference=None)


def stream_merged(
    model: PeftModel,
    weights: Mapping[str, Tensor],
    target: Path,
    *,
    base: Path,
    texts: Texts,
    computed: torch.dtype,
    dtype: torch.dtype,
    replace: bool = False,
) -> Exported:
    """Write the model in ``base``, read in the type ``computed`` and its adapter ``weights`` folded in."""
    inner: Any = model.get_base_model()
    changes = _changes(model, weights)
    tables = _tables(model, weights)
    with _BaseFiles(base) as files:

        def made(name: str) -> Tensor:
            if name in tables:
                return tables[name]
            weight = files.read(name)
            weight = weight.to(computed) if weight.is_floating_point() else weight
            if name not in changes:
                return weight
            result = merged(weight, changes[name], dtype)
            if not is_merged(weight, changes[name], result):
                raise CheckpointError(
                    f"{name}: the merged weight is not W + scaling · B A within one rounding"
                )
            return result

        tensors = {without_layers(name): t for name, t in inner.state_dict().items() if ".lora_" not in name}
        names = [name for name in tensors if name in _stored(inner)]
        pieces = [_piece(name, tensors[name], dtype, partial(made, name)) for name in names]
        return _export(inner, pieces, target, texts=texts, replace=replace, secure=False)


def _export(
    model: PreTrainedModel, pieces: list[Piece], target: Path, *, texts: Texts, replace: bool, secure: bool
) -> Exported:
    size = sum(piece.like.nbytes for piece in pieces)
    with staged(target, size, replace=replace) as stage:
        write_streamed(model, stage.folder, pieces)
        write_texts(stage.folder, *texts)
        if secure:
            stage.secure()
    return Exported(path=target, max_logit_difference=None)


def _piece(name: str, like: Tensor, dtype: torch.dtype, make: Any) -> Piece:
    kind = dtype if like.is_floating_point() else like.dtype
    shaped = torch.empty(like.shape, dtype=kind, device="meta")
    return Piece(name=name, like=shaped, make=lambda: make().detach().to("cpu", kind))


def _stored(model: PreTrainedModel) -> set[str]:
    return {without_layers(name) for name in stored_names(model) if ".lora_" not in name}


def _changes(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Change]:
    """Name of a weight in the base -> what the adapter does to it."""
    adapter, found = model.active_adapter, {}
    for name, layer in adapted_layers(model).items():
        require_plain_lora(f"{name}.weight", layer)
        prefix = f"{PREFIX}{name}"
        pair = (weights[f"{prefix}.lora_{part}.{adapter}.weight"] for part in "AB")
        a, b = factors_of(layer, *pair)
        found[weight_name(name, layer)] = Change(
            a=a,
            b=b,
            scaling=layer.scaling[adapter],
            magnitude=weights.get(f"{prefix}.lora_magnitude_vector.{adapter}.weight"),
            transposed=stores_transposed(layer),
        )
    return found


def _tables(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trained embedding and head weights by their names in the base; both names of a tied one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{name}.{inner}": weights[names[id(parameter)]]
        for name, module in trained_table_modules(model.get_base_model()).items()
        for inner, parameter in module.named_parameters()
    }


def _adapter_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of PEFT's files, each a storage of its own."""
    state = get_peft_model_state_dict(
        model, state_dict=dict(weights), adapter_name=model.active_adapter, save_embedding_layers=False
    )
    tables = {f"{PREFIX}{name}": tensor.clone() for name, tensor in _tables(model, weights).items()}
    return {**{name: tensor.contiguous() for name, tensor in state.items() if ".lora_" in name}, **tables}


class _BaseFiles:
    """The tensors of a model's folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._stored = stored_tensors(folder)
        self._open = ExitStack()
        self._unread: Mapping[str, Unread] = {}

    def __enter__(self) -> "_BaseFiles":
        self._unread = self._open.enter_context(unread_tensors(self._stored, nobody))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        return self._unread[name][...]
