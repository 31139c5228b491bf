"""Examples to rows of token ids that fit the context, with every token accounted for."""

from collections.abc import Iterator

import numpy as np

from fitune.data.encoding import Piece
from fitune.data.formats import Conversation, Example
from fitune.data.ledger import LedgerBook
from fitune.data.rows import BadRow
from fitune.data.sources import with_skip_hint
from fitune.data.templates import ChatTemplate, Encoded
from fitune.errors import DataError
from fitune.spec.plan import DataPlan

_BATCH_ROWS = 1024
"""Rows per call of the tokenizer: enough for its threads, little in memory."""
FIRST_CONVERSATIONS = 64
"""Conversations that are kept as text too."""


class RowTokeniser:
    """Takes examples one by one and tokenises them in batches; ``book`` says what happened to them."""

    def __init__(self, data: DataPlan, template: ChatTemplate, *, seq_len: int) -> None:
        self.book = LedgerBook()
        self.first_conversations: list[Conversation] = []
        self._data, self._template, self._seq_len = data, template, seq_len
        self._waiting: list[tuple[Example, list[Piece], int]] = []
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, example: Example, *, places: int = 1) -> None:
        """``places`` is how often the row stands in the dataset; each place is counted as a row read."""
        try:
            self._waiting.append((example, self._template.lay_out(example), places))
        except BadRow as bad:
            if self._data.on_bad_row == "error":
                raise with_skip_hint(bad) from None
            self.book.drop(bad.reason)
        if len(self._waiting) == _BATCH_ROWS:
            self._tokenise()

    @property
    def has_rows(self) -> bool:
        """Whether any row came here, kept or dropped."""
        return bool(self._waiting or self.book.rows_read)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids int32, supervised bool, offsets int64 of all rows added."""
        self._tokenise()
        offsets = np.zeros(len(self._rows) + 1, dtype=np.int64)
        np.cumsum([len(ids) for ids, _ in self._rows], out=offsets[1:])
        ids = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in self._rows)])
        supervised = np.concatenate([np.empty(0, np.bool_), *(marks for _, marks in self._rows)])
        return ids, supervised, offsets

    def _tokenise(self) -> None:
        encoded = self._template.encode_rows([pieces for _, pieces, _ in self._waiting])
        for (example, _, places), row in zip(self._waiting, encoded, strict=True):
            for _ in range(places):
                if self._put(row, example.where) and isinstance(example, Conversation):
                    self._remember(example)
        self._waiting.clear()

    def _remember(self, conversation: Conversation) -> None:
        if len(self.first_conversations) < FIRST_CONVERSATIONS:
            self.first_conversations.append(conversation)

    def _put(self, row: Encoded, where: str) -> bool:
        """Store what of the row fits and can be learned. False when it was dropped."""
        ids = np.array(row.ids, dtype=np.int32)
        supervised = np.array(row.supervised, dtype=np.bool_)
        if self._data.train_on_prompt:
            supervised[:] = True
        parts = list(self._parts(len(ids), where))
        kept = [(ids[part], supervised[part]) for part in parts if supervised[part][1:].any()]
        if not kept:
            self.book.drop(self._reason(len(ids), parts), tokens=len(ids))
            return False
        self._rows += kept
        self.book.keep(
            tokens=len(ids),
            kept=sum(len(part_ids) for part_ids, _ in kept),
            supervised=sum(int(marks[1:].sum()) for _, marks in kept),
        )
        return True

    def _parts(self, length: int, where: str) -> Iterator[slice]:
        """The stretches of a row that become rows, as ``on_long_row`` says."""
        policy, limit = self._data.on_long_row, self._seq_len
        if length <= limit or policy == "truncate":
            yield slice(0, min(length, limit))
        elif policy == "split":
            yield from (slice(begin, begin + limit) for begin in range(0, length, limit))
        elif policy == "error":
            raise DataError(
                f"{where}: the row has {length:,} tokens, seq_len is {limit:,}: {length - limit:,} too many",
                hint=f"seq_len {length}, or on_long_row: truncate, split or drop",
            )

    def _reason(self, length: int, parts: list[slice]) -> str:
        if not parts:
            return "longer than the context"
        return "no answer left after truncation" if length > self._seq_len else "nothing to learn"
