"""Write what was trained in Hugging Face's layout, one tensor at a time, and prove it by reading it back.

Everything is written to a temporary folder, read back byte for byte, synced, and renamed to its place last: a folder
with the final name was verified. A merged weight is held to its law (merge.py). A model in memory is also loaded from
there with transformers and peft alone, must have every tensor that was written, and answers as the trained one does
(parity.py). Where nothing else holds what was trained (``ExportFolder.secure``) the folder has a durable name,
``<target>-unverified``, before that.

``weights``, where they are given, come one by one, from all ranks or from a checkpoint, each asked for once and in
their order; the model is then on "meta", and nobody holds all of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fitune.checkpoint.layout import (
    ExportFolder,
    FileTensor,
    model_pieces,
    require_complete,
    staged,
    stored_tensors_of,
    write_adapter,
    write_model,
)
from fitune.checkpoint.merge import changes_of, is_merged, merged, without_layers
from fitune.checkpoint.parity import Model, Verified, reload_device, verify_export
from fitune.errors import CheckpointError
from fitune.models.adapter_file import PREFIX
from fitune.models.adapters import (
    is_loaded_whole,
    is_named_in_whole,
    ties_are_kept,
    trained_table_modules,
    words_for,
)
from fitune.models.attention import attends_by_rows
from fitune.models.expert_adapters import names_as_given
from fitune.models.headers import name_in_whole
from fitune.models.low_bit.quantised import count_weights, quantised_base
from fitune.models.readers import model_folder, whole_model, with_adapter
from fitune.models.tokens import resized
from fitune.models.weight_files import nobody, stored_tensors, unread_tensors
from fitune.models.weights import load_model
from fitune.values.plan import Dense

Weights = Mapping[str, Tensor] | None
"""Trained tensors by the names of the model's parameters; None where the model in memory holds them itself."""
CardOf = Callable[[PreTrainedModel], str]
"""Measures a merged model that was read back and is right, and returns the card that says so."""

_MERGE_SLACK = 2.0
"""The weights are held to their law; logits may differ by the rounding of two ways: the adapted model rounds W x and
s · B A x each, the merged one W + s · B A once and its product."""


def export_adapter(
    model: PeftModel, into: ExportFolder, *, base: str, base_path: str = "", weights: Weights = None
) -> Verified:
    """Write the active adapter; ``base`` is recorded as its base, ``base_path`` is where that lies (default: base).

    Raises CheckpointError when the reloaded adapter differs, RunDirectoryError when the folder has content that is not
    to be replaced.
    """
    tensors, in_whole = adapter_weights(model, weights), is_loaded_whole(base_path or base)
    name_of: Callable[[str], str] = name_in_whole if in_whole else str
    named = {name_of(name): tensor for name, tensor in tensors.items()}
    with staged(into.target, sum(tensor.nbytes for tensor in named.values()), replace=into.replace) as stage:
        digests = write_adapter(model, stage.folder, named, base, in_whole=in_whole)
        into.write_texts(stage)
        if weights is not None:
            return None, ()
        return verify_export(
            model, digests, reload=partial(_reloaded_adapter, model, tensors, base_path or base, stage.folder),
            held=lambda again: {name_of(n): t for n, t in adapter_weights(again).items()}, slack=1.0,
            dtypes=[tensor.dtype for tensor in tensors.values()],
        )  # fmt: skip


def export_full(
    model: PreTrainedModel,
    into: ExportFolder,
    *,
    dtype: torch.dtype | None = None,
    weights: Weights = None,
    base_path: str = "",
) -> Verified:
    """Write all weights, rounded to ``dtype`` (default: in the type they have).

    With ``weights``, what else a folder of the model has is read in ``base_path``.
    """
    own = stored_tensors_of(model)
    trained = dict.fromkeys(weights or ())  # ``weights`` itself, asked for a name, would make the tensor
    with _stored_in(base_path if weights is not None else "") as stored:

        def made(name: str) -> Tensor:
            """The trained tensor, or the base's own."""
            if weights is None:
                return own[name]
            return weights[name] if name in trained else stored[name][...]

        names = [*sorted(own.keys() - trained.keys()), *trained]
        pieces = model_pieces(model, {name: own[name] for name in names}, made, dtype or model.dtype)
        return _export_model(model, pieces, into, against=model if weights is None else None)


def export_merged(
    model: PeftModel,
    into: ExportFolder,
    *,
    base_path: str = "",
    dtype: torch.dtype | None = None,
    weights: Weights = None,
    card_of: CardOf | None = None,
) -> Verified:
    """Write the base with the adapter folded in (merge.py), in ``dtype`` (default: as it is); ``model`` is untouched.

    A packed base, and one on "meta", is read from ``base_path``: the adapter is folded into the weights on disk, and
    what is written is compared with their answers. Every merged weight is held to its law (merge.py). Logits may differ
    by rounding (twice ``parity.TOLERANCE``), with the experts of each token fixed. A warning says when rounding takes
    much of what was learned. ``card_of`` writes the card anew once the merged model is verified.
    """
    if weights is None and quantised_base(model) != Dense():
        model = on_dense_base(model, base_path)
    inner = model.get_base_model()
    changes, tables = changes_of(model, weights), _tables(model, weights)
    kind, squares = dtype or inner.dtype, [0.0, 0.0]
    own = {
        without_layers(name): tensor
        for name, tensor in stored_tensors_of(inner).items()
        if ".lora_" not in name
    }
    with _stored_in(base_path if weights is not None else "") as stored:

        def made(name: str) -> Tensor:
            """The tensor with what the adapter does to it, held to its law."""
            if name in tables:
                return tables[name]
            weight = own[name] if weights is None else stored[name][...]
            weight = weight.to(inner.dtype) if weight.is_floating_point() else weight
            if name not in changes:
                return weight
            result, *sums = merged(weight, changes[name], kind)
            squares[:] = (sum(pair) for pair in zip(squares, sums, strict=True))
            if not is_merged(weight, changes[name], result):
                raise CheckpointError(
                    f"{name}: the merged weight is not W + scaling · B A within one rounding"
                )
            return result

        difference, warnings = _export_model(
            inner, model_pieces(inner, own, made, kind), into, against=model if weights is None else None,
            slack=_MERGE_SLACK, card_of=card_of,
        )  # fmt: skip
    return difference, (*warnings, *_rounded_away(*squares))


def _rounded_away(learned: float, lost: float) -> tuple[str, ...]:
    """A warning when rounding moved the merged weights by as much as half of what training did."""
    if learned == 0:
        return ("the adapter changes nothing: merged and base model answer alike",)
    if lost > 0.25 * learned:
        return (
            f"rounding moves the merged weights by {(lost / learned) ** 0.5:.0%} of what training did: much of what "
            "was learned is lost; export the adapter, or train longer",
        )
    return ()


def _export_model(
    model: PreTrainedModel,
    pieces: Mapping[str, FileTensor],
    into: ExportFolder,
    *,
    against: Model | None,
    slack: float = 1.0,
    card_of: CardOf | None = None,
) -> Verified:
    """Write a model and prove it; ``against``: whose answers a reloaded one must give, None where none is in memory."""

    def measured(reloaded: PreTrainedModel) -> None:
        """Writes the card of the model that was read back."""
        if card_of is not None:
            (stage.folder / "README.md").write_text(card_of(reloaded), encoding="utf-8")

    size = sum(piece.like.nbytes for piece in pieces.values())
    with staged(into.target, size, replace=into.replace) as stage:
        digests = write_model(model, stage.folder, pieces)
        into.write_texts(stage)
        if against is not None:
            return verify_export(
                against, digests, slack=slack,
                reload=lambda attention: whole_model(stage.folder, attention=attention).to(reload_device(model)),
                held=lambda again: revert_weight_conversion(again, again.state_dict()),
                dtypes=[piece.like.dtype for piece in pieces.values()],
                on_reloaded=measured,
            )  # fmt: skip
        require_complete(stage.folder, digests)
    return None, ()


@contextmanager
def _stored_in(path: str) -> Iterator[Mapping[str, Any]]:
    """The tensors of the model at ``path``, none of them in memory yet; nothing without one."""
    if not path:
        yield {}
        return
    with unread_tensors(stored_tensors(model_folder(path)), nobody) as unread:
        yield unread


def adapter_weights(model: PeftModel, weights: Weights = None) -> dict[str, Tensor]:
    """The adapters, and the tables that train in place (models/adapters.py), on the host, under the names of PEFT's
    files."""
    # PEFT would ask the Hub whether the vocabulary grew.
    state = get_peft_model_state_dict(
        model, state_dict=None if weights is None else dict(weights), adapter_name=model.active_adapter,
        save_embedding_layers=False,
    )  # fmt: skip
    own = {n: t.detach().cpu().contiguous() for n, t in state.items() if weights is None or ".lora_" in n}
    return {**own, **{f"{PREFIX}{n}": t.detach().cpu().clone() for n, t in _tables(model, weights).items()}}


def on_dense_base(model: PeftModel, base_path: str) -> PeftModel:
    """``model``'s adapter on its base as it is on disk, in the compute type; on the host where the packed one fits on
    the device and the dense one does not."""
    dtype = model.get_base_model().dtype
    device = reload_device(model, needed_bytes=count_weights(model) * dtype.itemsize)
    base = load_model(base_path, dtype=dtype, device=device)
    resized(base, _rows(model))
    with names_as_given():
        adapted = get_peft_model(base, model.peft_config[model.active_adapter], autocast_adapter_dtype=False)
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    set_peft_model_state_dict(adapted, weights)
    for name, module in trained_table_modules(model.get_base_model()).items():
        base.get_submodule(name).load_state_dict(module.state_dict())
    return adapted


def _tables(model: PeftModel, weights: Weights) -> dict[str, Tensor]:
    """Trained embedding and head weights by their names in the base; both names of a tied one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{name}.{inner}": parameter if weights is None else weights[names[id(parameter)]]
        for name, module in trained_table_modules(model.get_base_model()).items()
        for inner, parameter in module.named_parameters()
    }


def _reloaded_adapter(
    model: PeftModel, weights: dict[str, Tensor], base_path: str, folder: Path, attention: str
) -> PeftModel:
    """A fresh base, packed as the trained one, with the adapter of ``folder``."""
    trained = model.get_base_model()
    base = load_model(base_path, dtype=trained.dtype, device=reload_device(model), base=quantised_base(model))
    resized(base, _rows(model))
    if attends_by_rows(base):
        base.set_attn_implementation(attention)
    # PEFT casts adapters to the base's type, or 16-bit ones to fp32: ask for whichever keeps what was trained.
    in_fp32 = all(tensor.dtype == torch.float32 for tensor in weights.values())
    with ties_are_kept():
        words = words_for(base, folder) if is_named_in_whole(folder) else {}
        return with_adapter(base, folder, in_fp32=in_fp32, **words)


def _rows(model: PeftModel) -> int:
    return int(model.get_base_model().get_input_embeddings().weight.shape[0])
