"""Tokenised rows on disk: read once, tokenised once, mapped into memory ever after."""

import hashlib
import json
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fitune.data import cache
from fitune.data.formats import Conversation, Example, Message, Text, detect_format, to_example
from fitune.data.ledger import LedgerBook, describe_dropped
from fitune.data.rows import BadRow
from fitune.data.sources import content_key, read_rows, with_skip_hint
from fitune.data.templates import ChatTemplate, load_template
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError
from fitune.spec.plan import DataPlan, DataSource
from fitune.spec.reports import Ledger
from fitune.spec.serial import from_data, to_data

_LEFT_OUT = "left out by the weight of the source"


class TokenDataset:
    """Rows of token ids end to end: ``ids`` int32 and ``supervised`` bool of shape (tokens,), ``offsets`` int64 of
    shape (rows + 1,): row i is ``ids[offsets[i]:offsets[i + 1]]``."""

    def __init__(self, ids: np.ndarray, supervised: np.ndarray, offsets: np.ndarray) -> None:
        if len(offsets) < 1 or not len(ids) == len(supervised) == offsets[-1]:
            raise ValueError(
                f"{len(ids)} ids, {len(supervised)} marks and offsets to {offsets[-1:]} do not match"
            )
        self._ids, self._supervised, self._offsets = ids, supervised, offsets

    @classmethod
    def load(cls, folder: Path) -> "TokenDataset":
        """Map the files that ``save`` wrote. Raises OSError or ValueError when they are missing or damaged."""
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
        return cls(*arrays)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, array in zip(_ARRAYS, (self._ids, self._supervised, self._offsets), strict=True):
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and supervised marks (bool) of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        begin, end = self._offsets[index], self._offsets[index + 1]
        return self._ids[begin:end], self._supervised[begin:end]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64."""
        return np.diff(self._offsets)

    @cached_property
    def labels_per_row(self) -> np.ndarray:
        """Supervised tokens of every row that something stands before: a row's first token is never predicted."""
        begins = np.asarray(self._offsets[:-1])
        counts = np.add.reduceat(self._supervised, begins, dtype=np.int64) if len(begins) else begins
        return counts - self._supervised[begins]

    @cached_property
    def largest_id(self) -> int:
        """-1 without any."""
        return int(self._ids.max(initial=-1))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every id, mark and offset: a resumed run must go on with the same rows."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._ids, self._supervised, self._offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


_ARRAYS = ("ids", "supervised", "offsets")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """What training reads, and the account of how it came to be."""

    train: TokenDataset
    train_ledger: Ledger
    eval: TokenDataset | None
    eval_ledger: Ledger | None
    eval_examples: list[Conversation]
    """The first held-out conversations, at most FIRST_CONVERSATIONS: prompts for the samples of the report."""
    also_trained: tuple[str, ...] = ()
    """Paths of evaluation sources whose content is also trained on: their loss says nothing about new rows."""


def prepare_data(
    data: DataPlan, *, tokenizer: Any, tokenizer_path: str, seq_len: int, seed: int
) -> PreparedData:
    """Read, check, split, tokenise and cut the data, or take it from the cache when nothing changed.

    ``val_fraction`` holds rows out by a hash of their content and ``seed``: a row stays on its side when others are
    added, and equal rows are on the same side. A source's ``weight`` w gives its n-th row ⌊(n+1)·w⌋ − ⌊n·w⌋ places
    in the training set: 2 repeats every row, 0.5 takes every other one. Held-out rows have one place each.

    Raises DataError when nothing is left to train on or to evaluate, with the counts of why.
    """
    if data.val_fraction and data.eval_sources:
        raise DataError(
            f"both eval_data and val_fraction {data.val_fraction} are set", hint="keep one of them"
        )
    if not data.sources:
        raise DataError("data: no source is named", hint="data: path/to/train.jsonl")
    template = load_template(tokenizer, data.chat_template)
    _refuse_weights(data.eval_sources)
    trained, evaluated = (
        [content_key(source) for source in part] for part in (data.sources, data.eval_sources)
    )
    keys = [*trained, *evaluated]
    also_trained = tuple(
        source.path for source, key in zip(data.eval_sources, evaluated, strict=True) if key in trained
    )
    settings = {"data": to_data(data) | {"cache_dir": ""}, "content": keys, "seq_len": seq_len, "seed": seed}
    key = cache.key_of(settings, tokenizer=tokenizer, template=template.source)
    entry = cache.folder_of(data.cache_dir) / key
    if (found := _load(entry)) is not None:
        return replace(found, also_trained=also_trained)
    prepared = _prepare(data, template, seq_len=seq_len, seed=seed)
    cache.store(entry, lambda folder: _save(prepared, folder, tokenizer_path))
    return replace(_load(entry) or prepared, also_trained=also_trained)


def _refuse_weights(sources: tuple[DataSource, ...]) -> None:
    """Every held-out row counts once: a weight there would have to be ignored."""
    for source in sources:
        if source.weight != 1:
            raise DataError(
                f"eval_data {source.path}: weight {source.weight:g} is not used, every row is evaluated once",
                hint=f"leave the weight out; {source.path}#500 evaluates 500 rows",
            )


def _prepare(data: DataPlan, template: ChatTemplate, *, seq_len: int, seed: int) -> PreparedData:
    train = RowTokeniser(data, template, seq_len=seq_len)
    held_out = RowTokeniser(data, template, seq_len=seq_len)
    formats = tuple(_read_source(source, data, train, held_out, seed=seed) for source in data.sources)
    eval_formats = tuple(
        _read_source(source, data, None, held_out, seed=seed) for source in data.eval_sources
    )
    if data.val_fraction and not train.has_rows and held_out.has_rows:
        raise DataError(
            f"no rows to train on: val_fraction {data.val_fraction:g} holds out every row of the data",
            hint="lower val_fraction, or name eval_data",
        )
    ledger, dataset = _closed(train, formats, "train on", data.sources)
    if not data.eval_sources and not data.val_fraction:
        return PreparedData(train=dataset, train_ledger=ledger, eval=None, eval_ledger=None, eval_examples=[])
    eval_ledger, eval_dataset = _closed(
        held_out, eval_formats or formats, "evaluate", data.eval_sources, val_fraction=data.val_fraction
    )
    return PreparedData(
        train=dataset,
        train_ledger=ledger,
        eval=eval_dataset,
        eval_ledger=eval_ledger,
        eval_examples=held_out.first_conversations,
    )


def _read_source(
    source: DataSource, data: DataPlan, train: RowTokeniser | None, held_out: RowTokeniser, *, seed: int
) -> str:
    """Send every row of a source to its side; returns the format it was read as."""
    book = (train or held_out).book
    format, position, weight = source.format, 0, Fraction(source.weight).limit_denominator(1_000_000)
    for row in read_rows(source, on_bad_row=data.on_bad_row, count_bad=book.drop):
        if format == "auto":
            format = detect_format(row, source.columns)
        try:
            example = to_example(row, format=format, columns=source.columns)
        except BadRow as bad:
            if data.on_bad_row == "error":
                raise with_skip_hint(bad) from None
            book.drop(bad.reason)
            continue
        if train is None or _is_held_out(example, data.val_fraction, seed):
            held_out.add(example)
            continue
        places = int((position + 1) * weight) - int(position * weight)
        position += 1
        train.add(example, places=places) if places else book.drop(_LEFT_OUT)
    return format


def _is_held_out(example: Example, fraction: float, seed: int) -> bool:
    if not fraction:
        return False
    content = example.text if isinstance(example, Text) else [[m.role, m.content] for m in example.messages]
    digest = hashlib.blake2b(json.dumps([seed, content]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _closed(
    rows: RowTokeniser,
    formats: tuple[str, ...],
    purpose: str,
    sources: tuple[DataSource, ...],
    *,
    val_fraction: float = 0.0,
) -> tuple[Ledger, TokenDataset]:
    """The ledger and the dataset. Raises DataError when no row is left."""
    arrays = rows.arrays()
    book: LedgerBook = rows.book
    if book.rows_kept:
        return book.close(formats=formats), TokenDataset(*arrays)
    names = ", ".join(source.path for source in sources) or f"val_fraction {val_fraction:g}"
    if not book.rows_read:
        raise DataError(f"no rows to {purpose}: {names} gave none", hint=_empty_hint(val_fraction))
    raise DataError(
        f"no rows left to {purpose}: {names} gave {book.rows_read:,}, and all were dropped: "
        f"{describe_dropped(book.dropped)}",
        hint="look at the first rows of the data, or raise seq_len if they are too long",
    )


def _empty_hint(val_fraction: float) -> str:
    return "raise val_fraction, or name eval_data" if val_fraction else "is it the right file and split?"


def _save(prepared: PreparedData, folder: Path, tokenizer_path: str) -> None:
    prepared.train.save(folder / "train")
    if prepared.eval is not None:
        prepared.eval.save(folder / "eval")
    manifest = {
        "tokenizer": tokenizer_path,
        "train_ledger": to_data(prepared.train_ledger),
        "eval_ledger": to_data(prepared.eval_ledger),
        "eval_examples": to_data(prepared.eval_examples),
    }
    (folder / "manifest.json").write_text(
        json.dumps(manifest, ensure_ascii=False, indent=1), encoding="utf-8"
    )


def _load(folder: Path) -> PreparedData | None:
    """What ``_save`` wrote; None when it is not there or damaged, which costs no more than tokenising again."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        has_eval = manifest["eval_ledger"] is not None
        return PreparedData(
            train=TokenDataset.load(folder / "train"),
            train_ledger=from_data(Ledger, manifest["train_ledger"]),
            eval=TokenDataset.load(folder / "eval") if has_eval else None,
            eval_ledger=from_data(Ledger, manifest["eval_ledger"]) if has_eval else None,
            eval_examples=[_conversation(item) for item in manifest["eval_examples"]],
        )
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _conversation(item: dict[str, Any]) -> Conversation:
    return Conversation(tuple(Message(m["role"], m["content"]) for m in item["messages"]), item["where"])
