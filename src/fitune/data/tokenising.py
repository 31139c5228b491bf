"""Examples to rows of token ids that fit the context, with every token accounted for."""

import os
import pickle
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from fitune.child import Beat, Child, ChildEnded, requests
from fitune.data.conversations.messages import Example, Text
from fitune.data.conversations.piece_encoder import TokenizerFailed
from fitune.data.conversations.rendering import Piece
from fitune.data.conversations.templates import ChatTemplate, EncodedRows
from fitune.data.examples import kept_parts
from fitune.data.ledger import TOO_LONG
from fitune.data.reading.rows import BadRow
from fitune.data.reading.sources import with_skip_hint
from fitune.errors import DataError
from fitune.values.plan import DataPlan

MOST_TEXT_AT_ONCE = 2**19
"""Characters per call of the tokenizer, which needs some hundred bytes for each. A longer row goes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Outcome of one example: it is in the dataset as ``rows`` rows, or was dropped for ``reason``."""

    tokens: int = 0
    """As it was read; 0 when it was dropped before that."""
    rows: int = 0
    kept: int = 0
    supervised: int = 0
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class TokenRows:
    """The rows of a batch of examples end to end, and the fate of each example."""

    ids: np.ndarray
    """int32, of shape (tokens,)."""
    supervised: np.ndarray
    """bool, of shape (tokens,)."""
    lengths: np.ndarray
    """int64, of shape (rows,)."""
    fates: list[Fate]


_Part = tuple[np.ndarray, np.ndarray]
"""Ids and marks of one row."""


class RowTokeniser:
    """Tokenises batches of examples. What it returns depends on the batch alone."""

    def __init__(self, data: DataPlan, template: ChatTemplate, *, seq_len: int) -> None:
        self._data, self._template, self._seq_len = data, template, seq_len

    def __call__(self, examples: Sequence[Example]) -> TokenRows:
        """The rows of ``examples`` in their order. Raises DataError for the first example that cannot be used, where
        that is an error."""
        fates: list[Fate] = []
        ids, marks = [np.empty(0, np.int32)], [np.empty(0, np.bool_)]
        for batch in self._laid_out(examples):
            for fate, parts in self._encoded(batch):
                fates.append(fate)
                ids += [part for part, _ in parts]
                marks += [part for _, part in parts]
        return TokenRows(
            ids=np.concatenate(ids),
            supervised=np.concatenate(marks),
            lengths=np.fromiter(map(len, ids[1:]), np.int64, len(ids) - 1),
            fates=fates,
        )

    def _laid_out(self, examples: Sequence[Example]) -> Iterator[list[tuple[Example, list[Piece] | BadRow]]]:
        """The examples as their template writes them, with about MOST_TEXT_AT_ONCE characters together."""
        waiting: list[tuple[Example, list[Piece] | BadRow]] = []
        text = 0
        for example, laid_out in zip(examples, self._template.lay_out_rows(examples), strict=True):
            waiting.append((example, laid_out))
            if not isinstance(laid_out, BadRow):
                text += sum(len(piece.text) for piece in laid_out)
            elif self._data.on_bad_row == "error":
                break
            if text > MOST_TEXT_AT_ONCE:
                yield waiting
                waiting, text = [], 0
        yield waiting

    def _encoded(
        self, batch: Sequence[tuple[Example, list[Piece] | BadRow]]
    ) -> Iterator[tuple[Fate, list[_Part]]]:
        """The fate of each example and its rows."""
        try:
            encoded = self._template.encode_rows(
                [row for _, row in batch if not isinstance(row, BadRow)],
                empty_thoughts=self._data.train_on_empty_thinking,
            )
        except TokenizerFailed as failed:
            for example, row in batch:  # finds the row
                is_found = len(batch) == 1 and not isinstance(row, BadRow)
                yield from self._encoded([(example, failed.of_row(example.where) if is_found else row)])
            return
        if self._data.train_on_prompt:
            encoded.supervised[:] = True
        ends = encoded.ends
        begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        before = np.concatenate([[0], np.cumsum(encoded.supervised)])
        learned = before[ends] - before[np.minimum(begins + 1, ends)]  # counted for all rows at once
        uncut = zip(begins.tolist(), ends.tolist(), learned.tolist(), strict=True)
        for example, row in batch:
            if not isinstance(row, BadRow):
                yield self._cut(encoded, *next(uncut), example.where)
            elif self._data.on_bad_row == "error":
                raise with_skip_hint(row)
            else:
                yield Fate(reason=row.reason), []

    def _cut(
        self, encoded: EncodedRows, first: int, past: int, learned_uncut: int, where: str
    ) -> tuple[Fate, list[_Part]]:
        """The fate of the row whose tokens are ``first`` to ``past``: how many are kept, and how many learned."""
        length, limit = past - first, self._seq_len
        if length > limit and self._data.on_long_row == "error":
            raise DataError(
                f"{where}: the row has {length:,} tokens, seq_len is {limit:,}: {length - limit:,} too many",
                hint=f"seq_len {length}, or on_long_row: truncate, split or drop",
            )
        parts = [(first + begin, first + end) for begin, end in kept_parts(length, self._data, seq_len=limit)]
        learned = [learned_uncut]
        if parts != [(first, past)]:
            # the first token of a part is not learned: nothing stands before it
            learned = [int(encoded.supervised[begin + 1 : end].sum()) for begin, end in parts]
        rows = [slice(*part) for part, count in zip(parts, learned, strict=True) if count]
        too_long = TOO_LONG[1 if parts else 0]
        reason = too_long if length > limit else "nothing to learn"
        fate = Fate(
            tokens=length, rows=len(rows), kept=sum(row.stop - row.start for row in rows), supervised=sum(learned),
            reason="" if rows else reason,
        )  # fmt: skip
        return fate, [(encoded.ids[row], encoded.supervised[row]) for row in rows]


def text_size(example: Example) -> int:
    """Characters of its content."""
    if isinstance(example, Text):
        return len(example.text)
    return len(example.tools) + sum(
        len(m.thought) + len(m.text if m.calls else m.content) for m in example.messages
    )


_WORTH_A_START = 2**21
"""Characters that are tokenised here before other processes are started: about as long as a start takes."""
_AHEAD = 3
"""Batches that are on their way to each process: none waits for work, and memory stays bounded."""
_MOST_PROCESSES = 16


def tokenised(
    batches: Iterator[list[Example]], tokenise: RowTokeniser, *, beat: Beat
) -> Generator[TokenRows, None, None]:
    """The rows of every batch, in order. A small dataset is tokenised here, the rest of a large one in one
    process for each core. ``beat`` is called several times a second, and may raise to stop.

    An error of ``batches`` is raised after the rows before it: the first bad row is named, however many processes.
    """
    here = 0
    for batch in batches:
        size = sum(map(text_size, batch))
        if here + size > _WORTH_A_START or size > MOST_TEXT_AT_ONCE:
            yield from _by_processes(batch, batches, tokenise, beat=beat, count=_cores())
            return
        beat()
        here += size
        yield tokenise(batch)


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


def _by_processes(
    first: list[Example], rest: Iterator[list[Example]], tokenise: RowTokeniser, *, beat: Beat, count: int
) -> Iterator[TokenRows]:
    started = [Child("fitune.data.tokenising", beat=beat) for _ in range(count)]
    waiting: deque[tuple[Child, list[Example]]] = deque()
    failed: DataError | None = None
    try:
        setup = pickle.dumps(tokenise)
        for child in started:
            child.send(setup)
        turns = cycle(started)
        batch: list[Example] | None = first
        while batch is not None:
            child = next(turns)
            waiting.append((child, batch))
            try:
                child.send(pickle.dumps(batch))  # whole examples: what a row has beside text is not lost
            except ChildEnded as ended:
                unanswered = next(each for owner, each in waiting if owner is child)
                raise _lost(unanswered, ended) from None
            if len(waiting) >= _AHEAD * count:
                yield _received(*waiting.popleft())
            beat()
            try:
                batch = next(rest, None)
            except DataError as error:
                failed, batch = error, None
        while waiting:
            yield _received(*waiting.popleft())
    finally:
        for child in started:
            child.close()
    if failed is not None:
        raise failed


def _received(child: Child, batch: list[Example]) -> TokenRows:
    try:
        rows: TokenRows | DataError = pickle.loads(child.receive())
    except ChildEnded as ended:
        raise _lost(batch, ended) from None
    if isinstance(rows, DataError):
        raise rows
    return rows


def _lost(batch: Sequence[Example], ended: ChildEnded) -> DataError:
    return DataError(
        f"a process that tokenises ended with {ended.how} at {batch[0].where} or in the {len(batch) - 1} rows after it",
        hint="was memory short? leave out rows of many megabytes, or start anew with more memory",
    )


def main() -> None:
    """Main function of the other process: receives what tokenises, then batches."""
    messages = requests(sys.argv)
    _, setup = next(messages)
    tokenise: RowTokeniser = pickle.loads(setup)
    for connection, message in messages:
        connection.send_bytes(answer_to(message, tokenise))


def answer_to(message: bytes, tokenise: RowTokeniser) -> bytes:
    """The rows of a batch, or the error in their place, both pickled."""
    try:
        return pickle.dumps(tokenise(pickle.loads(message)))
    except DataError as error:
        return pickle.dumps(error)


if __name__ == "__main__":
    from fitune.data import tokenising  # what travels is pickled by that name, not as __main__'s

    tokenising.main()
