"""LoRA adapters through PEFT, with their dtype chosen on purpose."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fitune.models.adapter_check import check_adapter, linear_shapes, tensor_shapes
from fitune.models.adapter_config import read_adapter_config
from fitune.models.adapter_targets import settled
from fitune.models.door import with_adapter
from fitune.models.tables import put_in_place, saved_rows, ties_are_kept, train_tables
from fitune.models.vocabulary import resized
from fitune.spec.plan import Lora


def add_adapters(model: PreTrainedModel, lora: Lora, *, dtype: torch.dtype, seed: int) -> PeftModel:
    """Freeze ``model`` but for ``lora.modules_to_save``; put a trainable low-rank pair beside each of ``lora.targets``.

    PEFT would cast the adapters to fp32; then every adapted input is kept a second time in fp32
    (about +63 % activations). They stay in ``dtype``, and the optimizer keeps an fp32 master where the plan says so.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        layers_to_transform=list(lora.layers) or None,
        fan_in_fan_out=_stores_weights_transposed(model, lora.targets),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    with torch.no_grad():  # DoRA computes its first norms from parameters; no graph may hold on to them
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    train_tables(model, lora.modules_to_save)
    return adapted


def _stores_weights_transposed(model: PreTrainedModel, targets: Sequence[str]) -> bool:
    """GPT-2 keeps its linears as Conv1D, [in, out] instead of [out, in]; PEFT wants to be told."""
    ends = tuple(f".{target}" for target in targets)
    return any(isinstance(module, Conv1D) for name, module in model.named_modules() if name.endswith(ends))


def load_adapter(model: PreTrainedModel, path: str | Path) -> PeftModel:
    """Put a saved adapter on ``model`` for inference, every key of it: PEFT drops what it does not find.

    Where tokens were added, embedding and head grow to what is saved. Only safetensors are read. Raises
    CheckpointError when the adapter does not fit this very model.
    """
    linears = linear_shapes(model)
    check_adapter(Path(path), base=linears, tensors=tensor_shapes(model))
    resized(model, saved_rows(Path(path)))
    config = read_adapter_config(Path(path))
    with ties_are_kept():
        words = config.for_peft(**settled(config, linears))
        adapted = with_adapter(model, Path(path), config=words)
    put_in_place(adapted)
    return adapted
