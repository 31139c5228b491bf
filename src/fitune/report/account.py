"""A token ledger as an account: what came in, what was taken off and why, what is left. It always adds up."""

from dataclasses import dataclass

from fitune.spec.reports import Ledger
from fitune.units import format_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. Amounts that were taken off are negative; None leaves the cell empty."""

    what: str
    rows: int | None = None
    tokens: int | None = None
    is_sum: bool = False


def account(ledger: Ledger) -> list[Entry]:
    """From what was read to what is trained on. A difference nobody named gets a line of its own."""
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
