"""Write what was trained in Hugging Face's layout, and prove it by reading it back.

Everything is written to a temporary folder, reloaded from there with transformers and peft alone, compared
(parity.py), synced, and renamed to its place last: a folder with the final name was verified.
Reloading needs the weights a second time, on the device when they fit there and else on the host.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fitune.checkpoint import parity
from fitune.checkpoint.layout import staged, write_adapter, write_model, write_texts
from fitune.checkpoint.merge import merged_weights
from fitune.models.attention import attends_by_rows
from fitune.models.quantize import quantised_base
from fitune.models.tables import copy_tables, table_weights, ties_are_kept
from fitune.models.vocabulary import resized
from fitune.models.weights import load_model
from fitune.spec.plan import Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A verified folder. ``max_logit_difference`` is against the trained model, on fixed tokens."""

    path: Path
    max_logit_difference: float
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
) -> Exported:
    """Write the active adapter; ``base`` is recorded as its base, ``base_path`` is where that lies (default: base).

    Raises CheckpointError when the reloaded adapter differs, RunDirectoryError when ``target`` has content
    and ``replace`` is off.
    """
    weights = adapter_weights(model)
    with staged(target, weights, replace=replace) as folder:
        write_adapter(model, folder, weights, base)
        write_texts(folder, tokenizer, chat_template, card)
        parity.require_filled(folder)
        with parity.plain_attention(model) as attention:
            found = _reloaded_adapter_logits(model, folder, weights, base_path or base, attention)
            trained = parity.logits(model)
        difference = parity.require_close(found, trained, _narrowest(model, weights))
    return Exported(path=target, max_logit_difference=difference)


def export_merged(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    chat_template: str,
    card: str,
    base_path: str = "",
    replace: bool = False,
) -> Exported:
    """Write the base with the adapter folded in (merge.py), in the type it has; ``model`` is untouched.

    A packed base is read again from ``base_path`` in the compute type: the adapter is folded into that one, and what
    is written is compared with that one's answers. Logits may differ by the rounding of the merged weights
    (``parity.TOLERANCE``); a warning says when that is much of what training changed.
    """
    if base_path and quantised_base(model) != Dense():
        model = on_dense_base(model, base_path)
    weights = merged_weights(model)
    with staged(target, weights, replace=replace) as folder:
        write_model(model.get_base_model(), folder, weights)
        write_texts(folder, tokenizer, chat_template, card)
        parity.require_filled(folder)
        with parity.plain_attention(model) as attention:
            found = _reloaded_logits(model, folder, weights, attention)
            trained = parity.logits(model)
            with model.disable_adapter():
                untrained = parity.logits(model)
        difference = parity.require_close(found, trained, _narrowest(model, weights))
    warnings = parity.rounded_away(found, trained, untrained)
    return Exported(path=target, max_logit_difference=difference, warnings=warnings)


def export_full(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    chat_template: str,
    card: str,
    replace: bool = False,
) -> Exported:
    """Write all weights, in the type they have."""
    weights = model.state_dict()
    with staged(target, weights, replace=replace) as folder:
        write_model(model, folder, weights)
        write_texts(folder, tokenizer, chat_template, card)
        parity.require_filled(folder)
        with parity.plain_attention(model) as attention:
            found = _reloaded_logits(model, folder, weights, attention)
            trained = parity.logits(model)
        difference = parity.require_close(found, trained, _narrowest(model, weights))
    return Exported(path=target, max_logit_difference=difference)


def adapter_weights(model: PeftModel) -> dict[str, Tensor]:
    """On the host, each a storage of its own: adapters, and the tables that train in place (models/tables.py)."""
    # PEFT would ask the Hub whether the vocabulary grew.
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    adapters = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    tables = table_weights(model.get_base_model())
    return {**adapters, **{name: tensor.detach().cpu().clone() for name, tensor in tables.items()}}


def on_dense_base(model: PeftModel, base_path: str) -> PeftModel:
    """The same adapter on its base as it is on disk, in the compute type."""
    dtype = model.get_base_model().dtype
    base = load_model(base_path, dtype=dtype, device=_reload_device(model))
    resized(base, _rows(model))
    config = model.peft_config[model.active_adapter]
    adapted = get_peft_model(base, config, autocast_adapter_dtype=False)
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    set_peft_model_state_dict(adapted, weights)
    copy_tables(model.get_base_model(), base)
    return adapted


def _reloaded_logits(
    model: PreTrainedModel | PeftModel, folder: Path, weights: dict[str, Tensor], attention: str
) -> Tensor:
    """Logits of what lies in ``folder``, after comparing every weight with ``weights``."""
    reloaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=attention, local_files_only=True
    )
    parity.require_same_weights(reloaded.state_dict(), weights)
    return parity.logits(reloaded.to(_reload_device(model)))


def _reloaded_adapter_logits(
    model: PeftModel, folder: Path, weights: dict[str, Tensor], base_path: str, attention: str
) -> Tensor:
    """Logits of a fresh base, packed as the trained one, with the adapter of ``folder``; every weight is compared."""
    base = load_model(
        base_path,
        dtype=model.get_base_model().dtype,
        device=_reload_device(model),
        base=quantised_base(model),
    )
    resized(base, _rows(model))
    if attends_by_rows(base):
        base.set_attn_implementation(attention)
    # PEFT casts adapters to the base's type, or 16-bit ones to fp32: ask for whichever keeps what was trained.
    in_fp32 = all(tensor.dtype == torch.float32 for tensor in weights.values())
    with ties_are_kept():
        reloaded = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=in_fp32)
    parity.require_same_weights(adapter_weights(reloaded), weights)
    return parity.logits(reloaded)


def _rows(model: PeftModel) -> int:
    return int(model.get_base_model().get_input_embeddings().weight.shape[0])


def _reload_device(model: PreTrainedModel | PeftModel) -> torch.device:
    """The model's own device, so that the same kernels answer, unless a second copy does not fit there."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return device
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > 1.2 * needed else torch.device("cpu")


def _narrowest(model: PreTrainedModel | PeftModel, weights: dict[str, Tensor]) -> torch.dtype:
    """The floating type with the coarsest steps among the trained and the exported weights."""
    tensors = (*model.parameters(), *weights.values())
    return max((t.dtype for t in tensors if t.is_floating_point()), key=lambda dtype: torch.finfo(dtype).eps)
