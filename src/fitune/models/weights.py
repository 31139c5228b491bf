"""A model folder or Hub id to a transformers model and its tokenizer. Only safetensors are read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from fitune.errors import ModelError, is_out_of_memory
from fitune.models.arrival import PackOnArrival
from fitune.models.quantize import require_quantiser
from fitune.models.reading import OnBytes, Unread, nobody, unread_tensors
from fitune.models.weight_files import StoredTensor, stored_tensors
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
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    base: Dense | Nf4 | Hqq = _DENSE,
    on_bytes: OnBytes = nobody,
) -> PreTrainedModel:
    """The causal language model at ``path`` with its weights in ``dtype`` on ``device``, in training order.

    Read tensor by tensor to where they belong; the linears of a quantised ``base`` are packed as they arrive.
    Raises ModelError when there are no weights, only pickled ones, or weights that do not match the config.
    """
    require_quantiser(base)
    transformers_logging.disable_progress_bar()
    with _looked_up(path, "the model cannot be loaded", hint=_FETCH_AGAIN):
        folder = model_folder(path)
        stored = stored_tensors(folder)
        _refuse_integers(stored)
        with unread_tensors(stored, on_bytes) as unread:
            model, report = _filled(folder, unread, dtype=dtype, device=device, base=base)
        model.config.name_or_path = model.name_or_path = path
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    _check_complete(path, report, stored)
    _check_tied(path, model)
    return model


def model_folder(path: str) -> Path:
    """``path`` itself, or where the Hub's cache has the model, fetched when it is not there.

    Raises ModelError when the folder is that of no model.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, allow_patterns=["*.json", "model*.safetensors"]))
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json, so this is no model folder")
    return folder


def _causal(folder: Path) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """transformers' class for the model and its config; of a model that also sees, the language model's."""
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return type(empty), empty.config


def _filled(
    folder: Path,
    unread: dict[str, Unread],
    *,
    dtype: torch.dtype,
    device: torch.device,
    base: Dense | Nf4 | Hqq,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with every tensor read and put in place, and what did not match."""
    architecture, config = _causal(folder)
    packing = None if isinstance(base, Dense) else PackOnArrival(base)
    try:
        model, report = architecture.from_pretrained(
            None,
            config=config,
            state_dict=unread,
            dtype=dtype,
            output_loading_info=True,
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
        tokenizer = _tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end-of-sequence token, so answers could never end")
    return tokenizer


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Raises ValueError, too, for what is damaged in ways that transformers or tokenizers do not foresee."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (AttributeError, TypeError) as error:
        raise ValueError(_first_line(error)) from error
    except Exception as error:
        if type(error) is not Exception:  # tokenizers, which is not Python, has this one for all it refuses
            raise
        raise ValueError(_first_line(error)) from error
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


def _check_complete(path: str, report: dict[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    def place(name: str) -> str:
        return f" in {stored[name].file.name}" if name in stored else ""

    missing, unknown = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    files = ", ".join(sorted({tensor.file.name for tensor in stored.values()})[:3])
    problems = [
        f"{title}: {', '.join(names[:5])}"
        for title, names in (
            (f"missing in {files}", missing),
            ("of another shape", _shapes(report["mismatched_keys"], place)),
            ("unknown to the model", [name + place(name) for name in unknown]),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: the weights do not match config.json; {'; '.join(problems)}",
            hint="config.json and weights must be of the same model: fetch them again",
        )


def _refuse_integers(stored: Mapping[str, StoredTensor]) -> None:
    """Read as numbers they would load, and mean nothing: packed weights need scales that nobody applies."""
    for name, tensor in stored.items():
        if name.endswith(".weight") and tensor.dtype[0] in "IUB" and tensor.dtype != "BF16":
            raise ModelError(
                f"{tensor.file}: {name} holds integers ({tensor.dtype}): damaged, or quantised weights",
                hint="name the model in 16 bit; tuning: qlora packs it while it is read",
            )


def _check_tied(path: str, model: PreTrainedModel) -> None:
    """transformers unties two tables that differ; the plan, and whoever reads the export, would take them for one."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and head.data_ptr() != embedding.data_ptr():
        raise ModelError(
            f"{path}: config.json says that embedding and head are one tensor, and the weights have two that differ",
            hint="tie_word_embeddings: false in its config.json, if the model has two; else fetch it again",
        )


def _shapes(mismatched: Any, place: Callable[[str], str]) -> list[str]:
    """``name (384, 32) in model.safetensors, config.json says (100, 32)``, in a fixed order."""
    return sorted(
        f"{name} {tuple(found)}{place(name)}, config.json says {tuple(wanted)}"
        for name, found, wanted in mismatched
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
