"""A model folder or Hub id to a transformers model and its tokenizer, with the tokens that a plan adds.

Only safetensors are read.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fitune.errors import ModelError
from fitune.models.door import (
    empty_model,
    filled_model,
    model_folder,
    read_config,
    read_generation_config,
    read_tokenizer,
    reading,
)
from fitune.models.headers import StoredTensor, text_part
from fitune.models.low_bit.pack_on_arrival import Keep, PackOnArrival
from fitune.models.low_bit.quantised import require_quantiser
from fitune.models.weight_files import OnBytes, Unread, nobody, stored_tensors, unread_tensors
from fitune.spec.plan import Dense, Plan, Precision, Quantiser

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
        _refuse_integers(stored)
        with unread_tensors(stored, on_bytes) as unread:
            packing = None if keep is None and isinstance(base, Dense) else PackOnArrival(base, keep=keep)
            model, report = _filled(folder, stored, unread, dtype=dtype, device=device, packing=packing)
        model.config.name_or_path = model.name_or_path = path
        model.generation_config = read_generation_config(folder) or model.generation_config
    _check_complete(path, report, stored)
    _check_tied(path, model)
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
    _refuse_more_layers(folder, config, stored)
    with torch.device("meta"):
        empty = empty_model(config)
    _refuse_another_size(folder, empty, stored)
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


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path``. Raises ModelError when there is none."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES)} are all missing)",
            hint="copy the tokenizer files of the base model into the folder",
        )
    with reading(path, "the tokenizer cannot be loaded", hint="copy the base model's tokenizer files again"):
        tokenizer = read_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no end-of-sequence token, so answers could never end")
    return tokenizer


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
            ("of another shape", _misshapen(report["mismatched_keys"], place)),
            ("unknown to the model", [name + place(name) for name in unknown]),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"{path}: the weights do not match config.json; {'; '.join(problems)}",
            hint=_OF_ONE_MODEL,
        )


def _refuse_integers(stored: Mapping[str, StoredTensor]) -> None:
    """Read as numbers they would load, and mean nothing: packed weights need scales that nobody applies."""
    for name, tensor in stored.items():
        if name.endswith(".weight") and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{tensor.file}: {name} holds {tensor.dtype}: damaged, or quantised weights",
                hint="name the model in 16 bit; tuning: qlora packs it while it is read",
            )


def _refuse_more_layers(folder: Path, config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Before a module is made for each of them."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):
        raise ModelError(
            f"{folder / 'config.json'}: num_hidden_layers = {layers:,}, and the weights are {len(stored)} tensors",
            hint=_OF_ONE_MODEL,
        )


def _refuse_another_size(folder: Path, empty: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Before memory is taken for what no file has; what is missing in a model of the right size is named later."""
    described = sum(parameter.numel() for parameter in empty.parameters())
    there = sum(math.prod(tensor.shape) for tensor in stored.values())
    if described > 2 * there and described > _SMALL:
        raise ModelError(
            f"{folder / 'config.json'} describes {described:,} weights, and the files hold {there:,}",
            hint=_OF_ONE_MODEL,
        )


_SMALL = 100_000_000
_OF_ONE_MODEL = "config.json and weights must be of the same model: fetch them again"


def _check_tied(path: str, model: PreTrainedModel) -> None:
    """transformers unties two tables that differ; the plan, and whoever reads the export, would take them for one."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and head.data_ptr() != embedding.data_ptr():
        raise ModelError(
            f"{path}: the checkpoint has separate embeddings, but config.json says tie_word_embeddings",
            hint="set tie_word_embeddings: false in config.json if the model has two tables; else fetch it again",
        )


def _misshapen(mismatched: Any, place: Callable[[str], str]) -> list[str]:
    """``name (384, 32) in model.safetensors, config.json says (100, 32)``, in a fixed order."""
    return sorted(
        f"{name} {tuple(found)}{place(name)}, config.json says {tuple(wanted)}"
        for name, found, wanted in mismatched
    )


_FLOATS = ("F64", "F32", "BF16", "F16")
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(path: str) -> torch.dtype | None:
    """Type of most of the weights at ``path``, by their headers; None for a type that is not trained in."""
    sizes: Counter[str] = Counter()
    for tensor in stored_tensors(model_folder(path)).values():
        sizes[tensor.dtype] += tensor.size_bytes
    (name, _), *_ = sizes.most_common(1)
    return _STORED_DTYPES.get(name)


_SHOWN = 5


def require_finite(model: nn.Module, path: str) -> None:
    """Raises ModelError naming weights that are NaN or infinite: such a model answers, and every answer is noise."""
    bad = not_finite(dict(chain(model.named_parameters(), model.named_buffers())))
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
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


NOISE = 0.01
"""Spread of new rows around the mean of all, as a share of the rows' own: new tokens begin alike, not equal
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models")."""


def planned_tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    """The base's with the plan's tokens. Raises ModelError for one that it has, or that no row is there for."""
    return tokenizer_with(plan.model_path, plan.added_tokens, rows=plan.model.vocab_size)


def tokenizer_with(path: str, added_tokens: Sequence[str], *, rows: int) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path`` with more tokens, for an embedding of ``rows``. Raises ModelError like
    ``planned_tokenizer``."""
    tokenizer = load_tokenizer(path)
    if not added_tokens:
        return tokenizer
    known = tokenizer.get_vocab()
    for token in added_tokens:
        if token in known:
            raise ModelError(
                f"added_tokens: {token!r} is token {known[token]} of the tokenizer already",
                hint="leave it out",
            )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added_tokens])
    largest = max(_token_ids(tokenizer, added_tokens))
    if largest >= rows:
        raise ModelError(
            f"{path}: the tokenizer gives an added token the id {largest}, and the plan has {rows} rows",
            hint="plan again where the tokenizer can be read",
        )
    return tokenizer


def require_rows(path: str, *, largest_id: int, rows: int) -> None:
    """Raises ModelError for a token without a row in the embedding: on a GPU that takes the process down."""
    if largest_id >= rows:
        raise ModelError(
            f"{path}: its tokenizer gives ids up to {largest_id:,}, and the embedding has {rows:,} rows: they are of "
            "different models, or tokens were added to the tokenizer alone",
            hint="copy the base model's tokenizer files again; added_tokens: gives new tokens their rows",
        )


@torch.no_grad()
def add_rows(model: PreTrainedModel, plan: Plan) -> None:
    """Give ``model`` the plan's rows; those of new tokens and beyond the old table begin as the mean of the others."""
    if not plan.added_tokens:
        return
    ids = _token_ids(planned_tokenizer(plan), plan.added_tokens)
    old, rows = resized(model, plan.model.vocab_size), plan.model.vocab_size
    fresh = torch.tensor(sorted({*ids, *range(old, rows)}))
    learned = min(old, *ids)
    generator = torch.Generator().manual_seed(plan.run.seed)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _start_rows(embedding.weight, fresh, learned, generator)
    if head.weight is not embedding.weight:
        _start_rows(head.weight, fresh, learned, generator)
    if getattr(head, "bias", None) is not None:
        head.bias[fresh] = head.bias[:learned].mean()


def resized(model: PreTrainedModel, rows: int) -> int:
    """Make embedding and head ``rows`` long where they are shorter; returns how long they were."""
    old = int(model.get_input_embeddings().weight.shape[0])
    if rows > old:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return old


def _start_rows(table_VD: Tensor, fresh: Tensor, learned: int, generator: torch.Generator) -> None:
    rows_VD = table_VD[:learned]
    mean_D = rows_VD.mean(dim=0, dtype=torch.float32)
    square_D = torch.linalg.vector_norm(rows_VD, dim=0, dtype=torch.float32).square() / learned
    spread_D = (square_D - mean_D.square()).clamp_min(0).sqrt()
    noise_ND = torch.randn(len(fresh), table_VD.shape[1], generator=generator).to(mean_D.device)
    table_VD[fresh.to(table_VD.device)] = (mean_D + NOISE * spread_D * noise_ND).to(table_VD.dtype)


def _token_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    found: Any = tokenizer.convert_tokens_to_ids([*tokens])
    return list(found)
