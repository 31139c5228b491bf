"""LoRA adapters through PEFT, and embedding and head trained whole beside them.

PEFT keeps a frozen table beside its trained copy (ModulesToSaveWrapper), V · h more for each, and unties the two. Here
the model's own parameters train, so nothing is held twice and what is tied stays tied; what is written is PEFT's
layout, and what is read from it is put back in place.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import dora
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from fitune.errors import ModelError
from fitune.models.adapter_file import WEIGHTS, check_adapter, linear_names, read_adapter_config, resolved
from fitune.models.expert_adapters import names_as_given, run_with_adapters, stacks_among, stacks_shown
from fitune.models.headers import name_in_whole, own_name, read_header
from fitune.models.readers import read_config, reading, with_adapter
from fitune.models.tokens import resized
from fitune.values.plan import Lora


def add_adapters(model: PreTrainedModel, lora: Lora, *, dtype: torch.dtype, seed: int) -> PeftModel:
    """Freeze ``model`` but for ``lora.modules_to_save``; put a trainable low-rank pair beside each of ``lora.targets``.

    PEFT would cast the adapters to fp32; then every adapted input is kept a second time in fp32
    (about +63 % activations). They stay in ``dtype``, and the optimizer keeps an fp32 master where the plan says so.
    """
    stacks, ends = stacks_among(model, lora.targets), tuple(f".{target}" for target in lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[name for name in lora.targets if name not in stacks],
        target_parameters=stacks or None,
        layers_to_transform=list(lora.layers) or None,
        fan_in_fan_out=any(
            isinstance(m, Conv1D) for n, m in model.named_modules() if n.endswith(ends)
        ),  # GPT-2's [in, out]
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    if lora.dora:
        # PEFT's (up to 0.21 at least) makes a trained Parameter of a frozen weight: autograd keeps its input, computes
        # its gradient, which nobody reads, and holds on to weights that were brought to the device for one block. It is
        # called in each forward, so no context could put PEFT's back; mypy: it is PEFT's own import, not exported
        dora.transpose = _transposed  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    # DoRA computes its first norms from parameters; no graph may hold on to them
    with torch.no_grad(), stacks_shown(model), names_as_given():
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    run_with_adapters(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    train_tables(model, lora.modules_to_save)
    return adapted


def _transposed(weight: Tensor, fan_in_fan_out: bool) -> Tensor:
    return weight.T if fan_in_fan_out else weight


def load_adapter(model: PreTrainedModel, path: str | Path) -> PeftModel:
    """Put a saved adapter on ``model`` for inference, every key of it: PEFT drops what it does not find.

    Where tokens were added, embedding and head grow to what is saved. Only safetensors are read. Raises
    CheckpointError when the adapter does not fit this very model.
    """
    folder = Path(path)
    check_adapter(folder, base=model)
    resized(model, saved_rows(folder))
    with ties_are_kept():
        adapted = with_adapter(model, folder, **words_for(model, folder))
    put_in_place(adapted)
    return adapted


def words_for(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """The adapter's config and the names of its file in terms of ``model``, for ``with_adapter``."""
    in_whole = is_named_in_whole(folder)
    spelled: Callable[[str], str] = name_in_whole if in_whole else str
    config = read_adapter_config(folder)
    chosen = resolved(config, {spelled(name): name for name in linear_names(model)})
    names = {r"^model\.language_model\.": "model."} if in_whole else None
    return {"config": config.for_peft(**chosen), "names": names}


def is_loaded_whole(base: str | Path) -> bool:
    """True if transformers makes of the folder or Hub id ``base`` a model in which the language model is a part."""
    with reading(str(base), "its config cannot be read"):
        config = read_config(str(base))
    text = config.get_text_config()
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return text is not config and classes.get(config.model_type) != classes.get(text.model_type)


def is_named_in_whole(folder: Path) -> bool:
    """True if the adapter's file names the language model as a part of one that also sees."""
    try:
        names = read_header(folder / WEIGHTS)
    except (OSError, ModelError):  # damaged or missing: check_adapter says which
        return False
    return any(name != own_name(name) for name in names)


def train_tables(base: PreTrainedModel, modules_to_save: Sequence[str]) -> None:
    """Let gradients into the tables that values/choices.py's Lora names."""
    for role, module in _tables(base).items():
        if role in modules_to_save:
            module.requires_grad_(True)


def trained_table_modules(base: PreTrainedModel) -> dict[str, nn.Module]:
    """Name in the base -> module, of those whose weight trains; both names of a table that is tied."""
    trained = [m for m in _tables(base).values() if m.weight.requires_grad]
    return {name: module for name, module in base.named_modules() if any(module is m for m in trained)}


def put_in_place(model: PeftModel) -> None:
    """Replace what PEFT wrapped by the saved copies, and tie again what the base ties."""
    base, adapter = model.get_base_model(), model.active_adapter
    wrapped = [(n, m) for n, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)]
    for name, wrapper in wrapped:
        parent, _, last = name.rpartition(".")
        setattr(base.get_submodule(parent), last, wrapper.modules_to_save[adapter])
    if wrapped:
        base.tie_weights()


def saved_rows(adapter: Path) -> int:
    """Rows of the largest table in an adapter's file, 0 when there is none."""
    tables = read_adapter_config(adapter).modules_to_save or []
    ends = tuple(f".{table}.weight" for table in tables)
    stored = read_header(adapter / WEIGHTS)
    return max((tensor.shape[0] for name, tensor in stored.items() if name.endswith(ends)), default=0)


@contextmanager
def ties_are_kept() -> Iterator[None]:
    """While PEFT reads an adapter: it warns of ties that it breaks, and here they are put back, or its copies equal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
        yield


def _tables(base: PreTrainedModel) -> dict[str, nn.Module]:
    return {"embed_tokens": base.get_input_embeddings(), "lm_head": base.get_output_embeddings()}
