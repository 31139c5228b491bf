"""The account of what happened to every row and token on the way from the files to the dataset, and how far it is.

Two sums hold, and the tests check them:

* rows read = rows kept + rows dropped. A row that is split into several stays one row.
* tokens read = tokens kept + tokens cut + tokens of dropped rows. A row dropped before it was tokenised, because
  it could not be read or its source's weight left it out, has no tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fitune.data.reading.rows import NOT_UTF8, TO_UTF8
from fitune.units import counted, format_count, format_percent
from fitune.values.reports import Ledger


def describe_ledger(ledger: Ledger) -> str:
    """A few lines for people: rows, what was dropped and why, tokens, what is learned."""
    dropped = ledger.rows_read - ledger.rows_kept
    lines = [
        f"{counted(ledger.rows_read, 'row')} read as {', '.join(dict.fromkeys(ledger.formats))}, "
        f"{ledger.rows_kept:,} kept"
    ]
    if dropped:
        lines.append(f"{dropped:,} dropped: {describe_dropped(ledger.dropped)}")
    lines.append(
        f"{_tokens(ledger.tokens_kept)} kept of {_tokens(ledger.tokens_read)}; longest row {ledger.longest_row:,}"
    )
    if ledger.rows_cut:
        longer = f"{counted(ledger.rows_cut, 'row')} longer than the context"
        lines.append(f"{longer}: {_tokens(ledger.tokens_cut)} cut")
    if ledger.tokens_kept:
        share = ledger.tokens_supervised / ledger.tokens_kept
        lines.append(f"{_tokens(ledger.tokens_supervised)} learned ({format_percent(share)})")
    if ledger.packs:
        lines.append(
            f"{counted(ledger.packs, 'pack')} of about {ledger.tokens_kept / ledger.packs:,.0f} tokens"
        )
    return "\n".join(lines)


def describe_dropped(dropped: dict[str, int]) -> str:
    """``3 not JSON, 1 empty field``, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


LEFT_OUT = "left out by the weight of the source"
TOO_LONG = ("longer than the context", "no answer left after truncation")
"""Reasons that a larger seq_len does away with."""


def hint_for_dropped(dropped: Mapping[str, int]) -> str:
    """What to do about rows of which none is left, by the most frequent reason."""
    reason = max(dropped, key=lambda name: dropped[name])
    if reason in TOO_LONG:
        return "raise seq_len, or on_long_row: split"
    if reason == LEFT_OUT:
        return "raise the weight of the source"
    if reason == NOT_UTF8:
        return TO_UTF8
    return "with on_bad_row: error, training stops at the first such row and says what is wrong with it"


def _tokens(count: int) -> str:
    return f"{format_count(count)} tokens"


Doing = Literal["checking", "tokenising", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Progress of the reading."""

    doing: Doing
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
    """Counts what is read and made and tells ``watch``; called with nothing new, it lets the watcher stop."""

    def __init__(self, watch: Watch, *, doing: Doing = "tokenising", in_all: int = 0) -> None:
        self._watch = watch
        self.so_far = Reading(doing=doing, bytes_read=0, bytes_in_all=in_all)

    def __call__(self, read: int = 0, *, rows: int = 0, tokens: int = 0, doing: Doing | None = None) -> None:
        now = self.so_far
        self.so_far = replace(
            now, doing=doing or now.doing, bytes_read=now.bytes_read + read, rows=now.rows + rows,
            tokens=now.tokens + tokens,
        )  # fmt: skip
        self._watch(self.so_far)
