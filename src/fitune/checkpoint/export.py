"""Write what was trained in Hugging Face's layout, and prove it by reading it back.

Everything is written to a temporary folder, reloaded from there with transformers and peft alone, compared
(parity.py), synced, and renamed to its place last: a folder with the final name was verified. Where nothing else holds
what was trained (``secure``) the folder has a durable name, ``<target>-unverified``, before it is verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fitune.checkpoint import parity
from fitune.checkpoint.layout import bytes_in_files, staged, write_adapter, write_model, write_texts
from fitune.checkpoint.merge import base_weights, in_dtype, merged_weights, refuse_quantised_base
from fitune.checkpoint.merge_law import merged_checks
from fitune.checkpoint.parity import Check, Model, Verified, is_equal, reload_device, verify_export
from fitune.models.adapters import (
    copy_tables,
    is_loaded_whole,
    is_named_in_whole,
    table_weights,
    ties_are_kept,
    words_for,
)
from fitune.models.attention import attends_by_rows
from fitune.models.door import whole_model, with_adapter
from fitune.models.expert_adapters import names_as_given
from fitune.models.headers import name_in_whole
from fitune.models.low_bit.quantised import count_weights, quantised_base
from fitune.models.tokens import resized
from fitune.models.weights import load_model
from fitune.spec.plan import Dense

CardOf = Callable[[PreTrainedModel], str]
"""Measures a merged model that was read back and is right, and returns the card that says so."""


_MERGE_SLACK = 2.0
"""The weights are held to their law; logits may differ by the rounding of two ways: the adapted model rounds W x and
s · B A x each, the merged one W + s · B A once and its product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A verified folder. ``max_logit_difference`` is against the trained model, on fixed tokens; None when logits
    could not be compared, and a warning says why."""

    path: Path
    max_logit_difference: float | None
    warnings: tuple[str, ...] = ()


def export_adapter(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    chat_template: str,
    base: str,
    card: str,
    base_path: str = "",
    replace: bool = False,
    secure: bool = False,
) -> Exported:
    """Write the active adapter; ``base`` is recorded as its base, ``base_path`` is where that lies (default: base).

    Raises CheckpointError when the reloaded adapter differs, RunDirectoryError when ``target`` has content
    and ``replace`` is off.
    """
    weights, in_whole = adapter_weights(model), is_loaded_whole(base_path or base)
    name_of: Callable[[str], str] = name_in_whole if in_whole else str
    return _export(
        model,
        target,
        size_bytes=bytes_in_files(weights),
        write=lambda folder: write_adapter(model, folder, weights, base, in_whole=in_whole),
        texts=(tokenizer, chat_template, card),
        checks={name_of(name): partial(is_equal, tensor, tensor.dtype) for name, tensor in weights.items()},
        reload=partial(_reloaded_adapter, model, weights, base_path or base),
        weights_of=lambda reloaded: {name_of(n): tensor for n, tensor in adapter_weights(reloaded).items()},
        dtypes=[tensor.dtype for tensor in weights.values()],
        replace=replace,
        secure=secure,
    )


def export_merged(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    chat_template: str,
    card: str,
    base_path: str = "",
    dtype: torch.dtype | None = None,
    replace: bool = False,
    card_of: CardOf | None = None,
) -> Exported:
    """Write the base with the adapter folded in (merge.py), in ``dtype`` (default: as it is); ``model`` is untouched.

    A packed base is read again from ``base_path`` in the compute type: the adapter is folded into that one, and what
    is written is compared with that one's answers. Every weight is held to the law of merge_law.py. Logits may differ
    by rounding (twice ``parity.TOLERANCE``), with the experts of each token fixed; a warning says
    when that is much of what training changed. ``card_of`` writes the card anew once the merged model is verified.
    """
    if base_path and quantised_base(model) != Dense():
        model = on_dense_base(model, base_path)
    refuse_quantised_base(model)
    kind = dtype or model.get_base_model().dtype
    return _export(
        model,
        target,
        size_bytes=bytes_in_files(base_weights(model), kind),
        write=lambda folder: write_model(model.get_base_model(), folder, merged_weights(model, kind)),
        texts=(tokenizer, chat_template, card),
        checks=merged_checks(model, kind),
        reload=partial(_reloaded, reload_device(model)),
        weights_of=PreTrainedModel.state_dict,
        dtypes=[kind],
        replace=replace,
        slack=_MERGE_SLACK,
        card_of=card_of,
        warnings_of=partial(_rounded_away, model),
    )


def export_full(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    chat_template: str,
    card: str,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    secure: bool = False,
) -> Exported:
    """Write all weights, rounded to ``dtype`` (default: in the type they have)."""
    kind = dtype or model.dtype
    weights = model.state_dict()
    return _export(
        model,
        target,
        size_bytes=bytes_in_files(weights, kind),
        write=lambda folder: write_model(model, folder, in_dtype(weights, kind)),
        texts=(tokenizer, chat_template, card),
        checks={name: partial(is_equal, tensor, kind) for name, tensor in weights.items()},
        reload=partial(_reloaded, reload_device(model)),
        weights_of=PreTrainedModel.state_dict,
        dtypes=[kind],
        replace=replace,
        secure=secure,
    )


def _export(
    model: Model,
    target: Path,
    *,
    size_bytes: int,
    write: Callable[[Path], None],
    texts: tuple[PreTrainedTokenizerBase, str, str],
    checks: Mapping[str, Check],
    reload: Callable[[Path, str], Any],
    weights_of: Callable[[Any], Mapping[str, Tensor]],
    dtypes: Sequence[torch.dtype],
    replace: bool,
    secure: bool = False,
    slack: float = 1.0,
    card_of: CardOf | None = None,
    warnings_of: Callable[[Verified], tuple[str, ...]] = lambda _verified: (),
) -> Exported:
    """Write into a temporary folder, verify it there, and give it its name: the same for every kind of export."""
    with staged(target, size_bytes, replace=replace) as stage:
        write(stage.folder)
        write_texts(stage.folder, *texts)
        parity.require_filled(stage.folder)
        if secure:
            stage.secure()
        verified = verify_export(
            model,
            stage.folder,
            checks,
            reload=partial(reload, stage.folder),
            weights_of=weights_of,
            dtypes=dtypes,
            slack=slack,
            on_reloaded=None if card_of is None else partial(_write_card, stage.folder, card_of),
        )
        warnings = (*verified.warnings, *warnings_of(verified))
    return Exported(path=target, max_logit_difference=verified.difference, warnings=warnings)


def _rounded_away(model: PeftModel, verified: Verified) -> tuple[str, ...]:
    if verified.found is None:
        return ()
    with parity.plain_attention(model), model.disable_adapter():
        untrained = parity.logits(model)
    return parity.rounded_away(verified.found, verified.trained, untrained)


def adapter_weights(model: PeftModel) -> dict[str, Tensor]:
    """The adapters, and the tables that train in place (models/adapters.py), on the host, each a storage of its own."""
    # PEFT would ask the Hub whether the vocabulary grew.
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    adapters = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    tables = table_weights(model.get_base_model())
    return {**adapters, **{name: tensor.detach().cpu().clone() for name, tensor in tables.items()}}


def on_dense_base(model: PeftModel, base_path: str) -> PeftModel:
    """``model``'s adapter on its base as it is on disk, in the compute type; on the host where the packed one fits on
    the device and the dense one does not."""
    dtype = model.get_base_model().dtype
    device = reload_device(model, needed_bytes=count_weights(model) * dtype.itemsize)
    base = load_model(base_path, dtype=dtype, device=device)
    resized(base, _rows(model))
    config = model.peft_config[model.active_adapter]
    with names_as_given():
        adapted = get_peft_model(base, config, autocast_adapter_dtype=False)
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    set_peft_model_state_dict(adapted, weights)
    copy_tables(model.get_base_model(), base)
    return adapted


def _write_card(folder: Path, card_of: CardOf, reloaded: PreTrainedModel) -> None:
    (folder / "README.md").write_text(card_of(reloaded), encoding="utf-8")


def _reloaded(device: torch.device, folder: Path, attention: str) -> PreTrainedModel:
    """Load the model in ``folder`` as transformers does."""
    return whole_model(folder, attention=attention).to(device)


def _reloaded_adapter(
    model: PeftModel, weights: dict[str, Tensor], base_path: str, folder: Path, attention: str
) -> PeftModel:
    """A fresh base, packed as the trained one, with the adapter of ``folder``."""
    base = load_model(
        base_path,
        dtype=model.get_base_model().dtype,
        device=reload_device(model),
        base=quantised_base(model),
    )
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
