"""The making of datasets: rows are read, sent to their side, tokenised batch after batch and written."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import nsmallest
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fitune.data import cache
from fitune.data.conversations.messages import Conversation, Example
from fitune.data.dataset import DatasetWriter, TokenDataset
from fitune.data.examples import examples_of
from fitune.data.ledger import LEFT_OUT, Progress, describe_dropped, hint_for_dropped
from fitune.data.reading.rows import BadRow
from fitune.data.reading.sources import with_skip_hint
from fitune.data.tokenising import MOST_TEXT_AT_ONCE, RowTokeniser, TokenRows, text_size, tokenised
from fitune.errors import DataError
from fitune.units import counted
from fitune.values.plan import DataPlan, DataSource
from fitune.values.reports import Ledger

FIRST_CONVERSATIONS = 64
"""Conversations that are kept as text too."""
_BATCH_ROWS = 1024
"""Rows that are tokenised together; fewer when they are long."""
_MOST_PLACES = 50_000_000
"""Most places of repeated rows: an epoch keeps some 50 bytes in memory for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Rows for training and evaluation, and the account of how they came to be."""

    train: TokenDataset
    train_ledger: Ledger
    eval: TokenDataset | None
    eval_ledger: Ledger | None
    eval_examples: list[Conversation]
    """The first held-out conversations, at most FIRST_CONVERSATIONS: prompts for the samples of the report."""
    also_trained: tuple[str, ...] = ()
    """Paths of evaluation sources whose content is also trained on: their loss says nothing about new rows."""
    contents: tuple[str, ...] = ()
    """A hash of every source's content, those for evaluation last."""


class _Part:
    """The training rows, or the held-out ones, while they are made, and the account of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writer = folder, DatasetWriter(folder)
        self.first_conversations: list[Conversation] = []
        self.counts, self.dropped = Counter[str](), Counter[str]()
        self.longest_row = 0

    def add(self, examples: list[tuple[Example, int]], rows: TokenRows) -> None:
        """``examples`` with their places. Raises DataError when the cache is full, or the places are too many."""
        repeats = []
        for (example, places), fate in zip(examples, rows.fates, strict=True):
            if not fate.rows:
                # a row that the template refuses is counted once, like one that cannot be read
                self.drop(fate.reason, tokens=fate.tokens, times=places if fate.tokens else 1)
                continue
            repeats.append((fate.rows, places))
            self.longest_row = max(self.longest_row, fate.tokens)
            self.counts.update(
                rows_read=places, rows_kept=places, rows_cut=places * (fate.kept < fate.tokens),
                tokens_read=fate.tokens * places, tokens_cut=(fate.tokens - fate.kept) * places,
                tokens_kept=fate.kept * places, tokens_supervised=fate.supervised * places,
            )  # fmt: skip
            room = FIRST_CONVERSATIONS - len(self.first_conversations)
            if room and isinstance(example, Conversation):
                self.first_conversations += [example] * min(places, room)
        wanted = self.writer.places + sum(rows * places for rows, places in repeats)
        if wanted > _MOST_PLACES and any(places > 1 for _, places in repeats):
            where = examples[-1][0].where
            raise DataError(
                f"the weights repeat rows: up to {where} an epoch has {wanted:,} of them, and at most "
                f"{_MOST_PLACES:,} are possible",
                hint="weights count against each other: divide all of them by the same number",
            )
        with cache.writing(self.folder.parent.parent):
            self.writer.add(
                rows.ids, rows.supervised, rows.lengths, np.array(repeats, np.int64).reshape(-1, 2)
            )

    def drop(self, reason: str, *, tokens: int = 0, times: int = 1) -> None:
        """A row, read ``times`` times."""
        self.counts.update(rows_read=times, tokens_read=tokens * times)
        self.dropped[reason] += times
        self.longest_row = max(self.longest_row, tokens)

    def close(
        self,
        formats: tuple[str, ...],
        purpose: str,
        sources: tuple[DataSource, ...],
        val_fraction: float = 0.0,
    ) -> tuple[Ledger, TokenDataset]:
        """The ledger and the dataset. Raises DataError when no row is left."""
        if self.counts["rows_kept"]:
            ledger = Ledger(
                dropped=dict(sorted(self.dropped.items())),
                longest_row=self.longest_row,
                formats=formats,
                **self.counts,
            )
            return ledger, TokenDataset.load(self.folder)
        names = ", ".join(source.path for source in sources) or f"val_fraction {val_fraction:g}"
        if read := self.counts["rows_read"]:
            raise DataError(
                f"no rows left to {purpose}: {names} gave {read:,}, and all were dropped: "
                f"{describe_dropped(self.dropped)}",
                hint=hint_for_dropped(self.dropped),
            )
        raise DataError(
            f"no rows to {purpose}: {names} gave none",
            hint="raise val_fraction, or name eval_data"
            if val_fraction
            else "is it the right file and split?",
        )


_Placed = tuple[Example, _Part, int]
"""An example on its way: the part it belongs to, and how many places it has there."""


class Making:
    """One making of the datasets."""

    def __init__(self, data: DataPlan, folder: Path, tokenise: RowTokeniser, progress: Progress) -> None:
        self._data, self._tokenise, self._progress = data, tokenise, progress
        with cache.writing(folder.parent):
            self._train, self._held_out = _Part(folder / "train"), _Part(folder / "eval")
        self._formats: list[str] = []
        self._held_out_below = 0.0
        """Hashes below this are those of held-out rows."""

    def run(self, seed: int) -> PreparedData:
        """Raises DataError when no row is left."""
        data, train, held_out = self._data, self._train, self._held_out
        self._held_out_below = self._bound(seed) if data.val_fraction else 0.0
        with train.writer, held_out.writer:
            self._write_all(seed)
        if data.val_fraction and not train.counts["rows_read"] and (read := held_out.counts["rows_read"]):
            raise DataError(
                f"no rows to train on: val_fraction {data.val_fraction:g} holds out {read:,} of {counted(read, 'row')}",
                hint="lower val_fraction, or name eval_data",
            )
        formats = tuple(self._formats[: len(data.sources)])
        eval_formats = tuple(self._formats[len(data.sources) :])
        ledger, dataset = train.close(formats, "train on", data.sources)
        prepared = PreparedData(
            train=dataset, train_ledger=ledger, eval=None, eval_ledger=None, eval_examples=[]
        )
        if not data.eval_sources and not data.val_fraction:
            return prepared
        ledger, dataset = held_out.close(
            eval_formats or formats, "evaluate", data.eval_sources, data.val_fraction
        )
        return replace(prepared, eval=dataset, eval_ledger=ledger, eval_examples=held_out.first_conversations)

    def _bound(self, seed: int) -> float:
        """A share of all hashes; for a number of rows, which are read once more for it, the next hash above theirs."""
        wanted = self._data.val_fraction
        if wanted < 1:
            return wanted * 2**64
        rows = chain.from_iterable(
            examples_of(source, on_bytes=lambda _: self._progress()) for source in self._data.sources
        )
        hashes = (_hash_of(row.example, seed) for row in rows if not isinstance(row.example, BadRow))
        return max(nsmallest(int(wanted), hashes), default=0) + 1

    def _write_all(self, seed: int) -> None:
        """Tokenise batch after batch; those on their way to other processes are few, so memory does not grow."""
        under_way: list[list[_Placed]] = []

        def batches() -> Iterator[list[Example]]:
            """Yields the examples of each batch; ``under_way`` keeps the batch until its rows come back."""
            sides = ((self._train, self._data.sources), (self._held_out, self._data.eval_sources))
            read = (
                self._read_source(source, part, seed=seed) for part, sources in sides for source in sources
            )
            for batch in _batches(chain.from_iterable(read)):
                under_way.append(batch)
                yield [example for example, _, _ in batch]

        made = tokenised(batches(), self._tokenise, beat=self._progress)
        with closing(made):
            for rows in made:
                batch = under_way.pop(0)
                for part in (self._train, self._held_out):
                    mine = [side is part for _, side, _ in batch]
                    if any(mine):
                        examples = [(example, places) for example, side, places in batch if side is part]
                        part.add(examples, rows if all(mine) else _chosen(rows, np.array(mine)))
                self._progress(rows=len(batch), tokens=sum(fate.tokens for fate in rows.fates))

    def _read_source(self, source: DataSource, part: _Part, *, seed: int) -> Iterator[_Placed]:
        """Every row of the source, sent to its side; notes the format it was read as."""
        data = self._data
        weight, per = Fraction(source.weight).limit_denominator(1_000_000).as_integer_ratio()
        position, format = 0, source.format
        for read in examples_of(source, on_bytes=self._progress):
            example, format = read.example, read.format
            if isinstance(example, BadRow):
                if data.on_bad_row == "error":
                    raise with_skip_hint(example)
                part.drop(example.reason)
                continue
            if part is self._held_out or (
                self._held_out_below and _hash_of(example, seed) < self._held_out_below
            ):
                yield example, self._held_out, 1
                continue
            places = (position + 1) * weight // per - position * weight // per
            position += 1
            if places:
                yield example, part, places
            else:
                part.drop(LEFT_OUT)
        self._formats.append(format)


def _batches(examples: Iterator[_Placed]) -> Iterator[list[_Placed]]:
    """At most _BATCH_ROWS rows and about MOST_TEXT_AT_ONCE letters. What came before an error comes first."""
    batch: list[_Placed] = []
    size, failed = 0, None
    try:
        for placed in examples:
            own = text_size(placed[0])
            if len(batch) == _BATCH_ROWS or (batch and size + own > MOST_TEXT_AT_ONCE):
                yield batch
                batch, size = [], 0
            batch.append(placed)
            size += own
    except DataError as error:
        failed = error
    if batch:
        yield batch
    if failed is not None:
        raise failed


def _chosen(rows: TokenRows, mine: np.ndarray) -> TokenRows:
    """The rows of the chosen examples of a batch."""
    of_rows = np.repeat(mine, [fate.rows for fate in rows.fates])
    of_tokens = np.repeat(of_rows, rows.lengths)
    return TokenRows(
        ids=rows.ids[of_tokens],
        supervised=rows.supervised[of_tokens],
        lengths=rows.lengths[of_rows],
        fates=[fate for fate, wanted in zip(rows.fates, mine.tolist(), strict=True) if wanted],
    )


def _hash_of(example: Example, seed: int) -> int:
    """64 bits of the content and ``seed``."""
    content: Any = example.text
    if isinstance(example, Conversation):
        content = [[m.role, m.text] for m in example.messages]
        content += [["tools", example.tools]] if example.tools else []
    digest = hashlib.blake2b(json.dumps([seed, content]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
