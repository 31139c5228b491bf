"""A model folder or Hub id to a transformers model and its tokenizer. Only safetensors are read."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fitune.errors import ModelError, is_out_of_memory
from fitune.models.arrival import PackOnArrival
from fitune.models.foreign import pickled_files
from fitune.models.quantize import require_quantiser
from fitune.spec.hub import no_waiting_for_the_hub
from fitune.spec.plan import Dense, Hqq, Nf4, Precision

_DENSE = Dense()

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.BF16_MASTER: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """What weights and activations are made of."""
    return _DTYPES[precision]


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, base: Dense | Nf4 | Hqq = _DENSE
) -> PreTrainedModel:
    """The causal language model at ``path`` with its weights in ``dtype`` on ``device``, in training order.

    Read tensor by tensor to where they belong; the linears of a quantised ``base`` are packed as they arrive.
    Raises ModelError when there are no weights, only pickled ones, or weights that do not match the config.
    """
    if Path(path).is_dir():
        _check_weight_files(Path(path))
    transformers_logging.disable_progress_bar()
    require_quantiser(base)
    packing = None if isinstance(base, Dense) else PackOnArrival(base)
    with _looked_up(path, "the model cannot be loaded", hint=_FETCH_AGAIN):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            quantization_config=packing,
            device_map=None if device.type == "cpu" else {"": device},
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    _check_complete(path, report)
    return model


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path``. Raises ModelError when there is none."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES)} are all missing)",
            hint="copy the tokenizer files of the base model into the folder",
        )
    with _looked_up(
        path, "the tokenizer cannot be loaded", hint="copy the base model's tokenizer files again"
    ):
        tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end-of-sequence token, so answers could never end")
    return tokenizer


_FETCH_AGAIN = "the files may be cut short or of another model: fetch them again"


@contextmanager
def _looked_up(path: str, what: str, *, hint: str) -> Iterator[None]:
    """What transformers raises while it loads ``path`` becomes a ModelError. A folder needs no Hub."""
    is_folder = Path(path).is_dir()
    if not is_folder and path.startswith(("/", ".", "~")):
        raise ModelError(f"{path}: no such folder", hint="name a folder with a config.json, or a Hub id")
    with nullcontext("") if is_folder else no_waiting_for_the_hub() as unreachable:
        try:
            yield
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            if is_out_of_memory(error):
                raise  # the files are right: the caller says what takes less
            if unreachable:
                raise ModelError(
                    f"{path}: {what}: no such folder, not whole in the Hugging Face cache, and {unreachable}",
                    hint=f"name a folder, or run `hf download {path}` where there is a network",
                ) from error
            raise ModelError(f"{path}: {what}: {_first_line(error)}", hint=hint) from error


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _check_weight_files(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json, so this is no model folder")
    if any(folder.glob("*.safetensors")):
        return
    if pickled := pickled_files(folder):
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
            ("of another shape", _shapes(report.get("mismatched_keys"))),
            ("unknown to the model", sorted(report.get("unexpected_keys") or ())),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: the weights do not match config.json; {'; '.join(problems)}",
            hint="config.json and weights must be of the same model: fetch them again",
        )


def _shapes(mismatched: Any) -> list[str]:
    """``name (384, 32), config.json says (100, 32)``, in a fixed order."""
    return sorted(
        f"{name} {tuple(found)}, config.json says {tuple(wanted)}" for name, found, wanted in mismatched or ()
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
