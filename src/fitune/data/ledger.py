"""The account of what happened to every row and token on the way from the files to the dataset.

Two sums hold, and the tests check them:

* rows read = rows kept + rows dropped. A row that is split into several stays one row.
* tokens read = tokens kept + tokens cut + tokens of dropped rows. A row dropped before it was tokenised, because
  it could not be read or its source's weight left it out, has no tokens.
"""

from collections import Counter
from dataclasses import dataclass, field

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
    tokens_dropped: int = 0
    tokens_supervised: int = 0
    longest_row: int = 0

    def drop(self, reason: str, *, tokens: int = 0, times: int = 1) -> None:
        """A row, read ``times`` times."""
        self.rows_read += times
        self.dropped[reason] += times
        self.tokens_read += tokens * times
        self.tokens_dropped += tokens * times
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
