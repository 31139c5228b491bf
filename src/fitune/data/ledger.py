"""The account of what happened to every row and token on the way from the files to the dataset, and how far it is.

Two sums hold, and the tests check them:

* rows read = rows kept + rows dropped. A row that is split into several stays one row.
* tokens read = tokens kept + tokens cut + tokens of dropped rows. A row dropped before it was tokenised, because
  it could not be read or its source's weight left it out, has no tokens.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fitune.spec.reports import Ledger
from fitune.units import format_count, format_percent


@dataclass(slots=True, kw_only=True)
class LedgerBook:
    """Counts while rows are read; ``close`` makes the Ledger."""

    rows_read: int = 0
    rows_kept: int = 0
    rows_cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens_read: int = 0
    tokens_cut: int = 0
    tokens_kept: int = 0
    tokens_supervised: int = 0
    longest_row: int = 0

    def drop(self, reason: str, *, tokens: int = 0, times: int = 1) -> None:
        """A row, read ``times`` times."""
        self.rows_read += times
        self.dropped[reason] += times
        self.tokens_read += tokens * times
        self.longest_row = max(self.longest_row, tokens)

    def keep(self, *, tokens: int, kept: int, supervised: int, times: int = 1) -> None:
        """A row of ``tokens`` of which ``kept`` stay; ``supervised`` counts labels, not first tokens."""
        self.rows_read += times
        self.rows_kept += times
        self.rows_cut += times if kept < tokens else 0
        self.tokens_read += tokens * times
        self.tokens_cut += (tokens - kept) * times
        self.tokens_kept += kept * times
        self.tokens_supervised += supervised * times
        self.longest_row = max(self.longest_row, tokens)

    def close(self, *, formats: tuple[str, ...]) -> Ledger:
        """The account as it stands: rows and tokens, and the ``formats`` that the sources were read as."""
        return Ledger(
            rows_read=self.rows_read,
            rows_kept=self.rows_kept,
            dropped=dict(sorted(self.dropped.items())),
            rows_cut=self.rows_cut,
            tokens_read=self.tokens_read,
            tokens_cut=self.tokens_cut,
            tokens_kept=self.tokens_kept,
            tokens_supervised=self.tokens_supervised,
            longest_row=self.longest_row,
            formats=formats,
        )


def describe_ledger(ledger: Ledger) -> str:
    """A few lines for people: rows, what was dropped and why, tokens, what is learned."""
    dropped = ledger.rows_read - ledger.rows_kept
    lines = [
        f"{ledger.rows_read:,} rows read as {', '.join(dict.fromkeys(ledger.formats))}, {ledger.rows_kept:,} kept"
    ]
    if dropped:
        lines.append(f"{dropped:,} dropped: {describe_dropped(ledger.dropped)}")
    lines.append(
        f"{_tokens(ledger.tokens_kept)} kept of {_tokens(ledger.tokens_read)}; longest row {ledger.longest_row:,}"
    )
    if ledger.rows_cut:
        lines.append(f"{ledger.rows_cut:,} rows longer than the context: {_tokens(ledger.tokens_cut)} cut")
    if ledger.tokens_kept:
        share = ledger.tokens_supervised / ledger.tokens_kept
        lines.append(f"{_tokens(ledger.tokens_supervised)} learned ({format_percent(share)})")
    if ledger.packs:
        lines.append(f"{ledger.packs:,} packs of about {ledger.tokens_kept / ledger.packs:,.0f} tokens")
    return "\n".join(lines)


def describe_dropped(dropped: dict[str, int]) -> str:
    """``3 not JSON, 1 empty field``, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _tokens(count: int) -> str:
    return f"{format_count(count)} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Progress of the reading."""

    doing: Literal["checking", "tokenising", "done"]
    """Files are hashed; rows are tokenised; once at the end."""
    bytes_read: int
    bytes_in_all: int
    """0 where it is not known."""
    rows: int = 0
    tokens: int = 0


Watch = Callable[[Reading], None]
"""Called several times a second; may raise to stop."""


def ignore_reading(_reading: Reading) -> None:
    """A Watch for callers that show nothing and never stop."""


class Progress:
    """Counts, and tells ``watch``."""

    def __init__(self, watch: Watch, *, found: int = 0) -> None:
        self._watch, self.found = watch, found
        self._read = self._rows = self._tokens = 0

    def find(self, count: int) -> None:
        """Bytes of a source that were hashed, and will be read if they are not in the cache."""
        self.found += count
        self._watch(Reading(doing="checking", bytes_read=self.found, bytes_in_all=0))

    def read(self, count: int) -> None:
        self._read += count
        self.beat()

    def made(self, *, rows: int, tokens: int) -> None:
        self._rows += rows
        self._tokens += tokens
        self.beat()

    def beat(self) -> None:
        """Let the watcher stop, without news."""
        self._tell("tokenising")

    def done(self) -> None:
        self._tell("done")

    def _tell(self, doing: Literal["tokenising", "done"]) -> None:
        self._watch(
            Reading(
                doing=doing,
                bytes_read=self._read,
                bytes_in_all=self.found,
                rows=self._rows,
                tokens=self._tokens,
            )
        )

    def beat_bytes(self, _count: int) -> None:
        self.beat()
