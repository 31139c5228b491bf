"""The tokenizer of a model folder, the tokens that a plan adds to it, and their rows in the model's tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fitune.errors import ModelError
from fitune.models.readers import read_tokenizer, reading
from fitune.values.named_templates import CHATML_MARKS
from fitune.values.plan import Plan

NOISE = 0.01
"""Spread of new rows around the mean of all, as a share of the rows' own: new tokens begin alike, not equal
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models")."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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
    # text in the data must not become a mark of messages
    added = [AddedToken(token, normalized=False, special=token in CHATML_MARKS) for token in added_tokens]
    tokenizer.add_tokens(added)
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
