"""The account of the data, as a table of pages: from rows read to tokens trained on."""

from dataclasses import dataclass
from typing import Any

from fitune.spec.reports import Ledger
from fitune.units import format_percent


def ledger_table(title: str, ledger: Ledger, seq_len: int) -> dict[str, Any]:
    """Title, rows, numbers of the rows that are sums, and remarks, as the template takes them."""
    entries = account(ledger)
    return {
        "title": title,
        "rows": [(entry.what, _amount(entry.rows), _amount(entry.tokens)) for entry in entries],
        "sums": [place for place, entry in enumerate(entries) if entry.is_sum],
        "remarks": remarks(ledger, seq_len=seq_len),
    }


def _amount(value: int | None) -> str:
    return "" if value is None else f"{value:,}".replace("-", "−")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. Amounts that were taken off are negative; None leaves the cell empty."""

    what: str
    rows: int | None = None
    tokens: int | None = None
    is_sum: bool = False


def account(ledger: Ledger) -> list[Entry]:
    """The account of the data, from rows read to tokens trained on. An unexplained difference has a line of its own."""
    dropped = sum(ledger.dropped.values())
    other_rows = ledger.rows_kept - (ledger.rows_read - dropped)
    other_tokens = ledger.tokens_kept - (ledger.tokens_read - ledger.tokens_cut)
    lines = [
        Entry(what="Read", rows=ledger.rows_read, tokens=ledger.tokens_read, is_sum=True),
        *(Entry(what=f"Dropped: {reason}", rows=-rows) for reason, rows in ledger.dropped.items()),
    ]
    if other_tokens:
        what = "Tokens of dropped rows" if other_tokens < 0 and dropped else "Tokens gained or lost otherwise"
        lines.append(Entry(what=what, tokens=other_tokens))
    if other_rows:
        what = "Rows gained without a reason" if other_rows > 0 else "Rows lost without a reason"
        lines.append(Entry(what=what, rows=other_rows))
    if ledger.rows_cut or ledger.tokens_cut:
        lines.append(
            Entry(what=f"Cut off the end of {ledger.rows_cut:,} long rows", tokens=-ledger.tokens_cut)
        )
    lines.append(Entry(what="Kept", rows=ledger.rows_kept, tokens=ledger.tokens_kept, is_sum=True))
    lines.append(Entry(what="of these supervised", tokens=ledger.tokens_supervised))
    return lines


def remarks(ledger: Ledger, *, seq_len: int) -> str:
    """A sentence on what the account does not show: formats, lengths, how full the packs are."""
    parts = [f"Read as {', '.join(ledger.formats)}" if ledger.formats else ""]
    parts.append(f"the longest row has {ledger.longest_row:,} tokens")
    if ledger.tokens_kept:
        supervised = format_percent(ledger.tokens_supervised / ledger.tokens_kept)
        parts.append(f"{supervised} of the kept tokens are supervised")
    if ledger.packs:
        full = ledger.tokens_kept / (ledger.packs * seq_len)
        parts.append(f"{ledger.packs:,} packs of up to {seq_len:,} tokens, {format_percent(full)} full")
    text = "; ".join(part for part in parts if part) + "."
    return text[0].upper() + text[1:]
