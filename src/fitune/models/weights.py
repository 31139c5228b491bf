"""A model folder or Hub id to a transformers model and its tokenizer. Only safetensors are read."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fitune.errors import ModelError
from fitune.spec.plan import Precision

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.BF16_MASTER: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """What weights and activations are made of."""
    return _DTYPES[precision]


def load_model(path: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model at ``path`` with its weights in ``dtype`` on ``device``, in training order.

    Raises ModelError when there are no weights, only pickled ones, or weights that do not match the config.
    """
    if Path(path).is_dir():
        _check_weight_files(Path(path))
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{path}: the model cannot be loaded: {_first_line(error)}") from error
    _check_complete(path, report)
    model.to(device)
    return model


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path``. Raises ModelError when there is none."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES)} are all missing)",
            hint="copy the tokenizer files of the base model into the folder",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end-of-sequence token, so answers could never end")
    return tokenizer


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _check_weight_files(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json, so this is no model folder")
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder}: the weights are pickled ({', '.join(pickled[:3])}); loading them could run code",
            hint="convert them to safetensors, e.g. with transformers' save_pretrained, in an environment you trust",
        )
    raise ModelError(f"{folder}: no weights (*.safetensors)", hint="name a complete model folder or a Hub id")


def _check_complete(path: str, report: dict[str, object]) -> None:
    problems = [
        f"{title}: {', '.join(map(str, list(names)[:5]))}"
        for title, names in (
            ("missing", report.get("missing_keys")),
            ("of another shape", report.get("mismatched_keys")),
        )
        if names
    ]
    if problems:
        raise ModelError(f"{path}: the weights do not match config.json; {'; '.join(problems)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
