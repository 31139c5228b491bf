"""Pages from Jinja2 templates, with nothing to load from anywhere and nothing to execute; the account of the data.

Names of models, paths, settings and answers come from strangers: everything is escaped but what is Markup.
"""

import base64
import errno
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fitune.errors import MissingExtra, RunDirectoryError
from fitune.files import write_atomically
from fitune.units import counted, format_percent
from fitune.values.reports import Ledger


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the head of a page."""

    name: str
    value: str
    below: str


def render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """A page, with those files of ``templates/`` as its one script: the page's policy lets it run by its hash."""
    from markupsafe import Markup

    if scripts:
        folder = Path(__file__).parent / "templates"
        script = "\n".join((folder / name).read_text(encoding="utf-8") for name in scripts)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        values |= {"script": Markup(script), "script_hash": digest}
    return Markup(_environment().get_template(template).render(**values))


@cache
def _environment() -> Any:
    """Keeps the templates that were compiled."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("fitune.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def pictures_or_advice(draw: Callable[[], Any], *, without: Any) -> tuple[Any, str]:
    """Returns what ``draw`` returns and an empty text; without matplotlib ``without`` and how to install it."""
    try:
        return draw(), ""
    except MissingExtra as error:
        return without, f"No {error.what}: {error.hint}"


def write_page(path: Path, text: str) -> Path:
    """Whole or not at all. Raises RunDirectoryError when the file cannot be written."""
    if path.is_dir():
        raise RunDirectoryError(f"{path} is a folder, not a file", hint=f"{path / 'page.html'}")
    try:
        write_atomically(path, text)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RunDirectoryError(
            f"{path}: cannot be written: {error.strerror or error}",
            hint="all figures are in the files beside it; with room the same command writes the page"
            if is_full
            else None,
        ) from None
    return path


def ledger_table(title: str, ledger: Ledger, seq_len: int) -> dict[str, Any]:
    """Title, rows, numbers of the rows that are sums, and remarks, as the template takes them."""
    lines = account(ledger)
    return {
        "title": title,
        "rows": [(what, _amount(rows), _amount(tokens)) for what, rows, tokens in lines],
        "sums": [place for place, (what, _, _) in enumerate(lines) if what in (_READ, _KEPT)],
        "remarks": remarks(ledger, seq_len=seq_len),
    }


def _amount(value: int | None) -> str:
    return "" if value is None else f"{value:,}".replace("-", "−")


_READ, _KEPT = "Read", "Kept"
"""Lines of the account that are sums."""


def account(ledger: Ledger) -> list[tuple[str, int | None, int | None]]:
    """The account of the data, from rows read to tokens trained on: what, rows and tokens of each line.

    Amounts that were taken off are negative; None leaves the cell empty. An unexplained difference has a line of its
    own.
    """
    dropped = sum(ledger.dropped.values())
    other_rows = ledger.rows_kept - (ledger.rows_read - dropped)
    other_tokens = ledger.tokens_kept - (ledger.tokens_read - ledger.tokens_cut)
    lines: list[tuple[str, int | None, int | None]] = [(_READ, ledger.rows_read, ledger.tokens_read)]
    lines += [(f"Dropped: {reason}", -rows, None) for reason, rows in ledger.dropped.items()]
    if other_tokens:
        what = "Tokens of dropped rows" if other_tokens < 0 and dropped else "Tokens gained or lost otherwise"
        lines.append((what, None, other_tokens))
    if other_rows:
        what = "Rows gained without a reason" if other_rows > 0 else "Rows lost without a reason"
        lines.append((what, other_rows, None))
    if ledger.rows_cut or ledger.tokens_cut:
        lines.append((f"Cut off the end of {ledger.rows_cut:,} long rows", None, -ledger.tokens_cut))
    lines.append((_KEPT, ledger.rows_kept, ledger.tokens_kept))
    lines.append(("of these supervised", None, ledger.tokens_supervised))
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
        parts.append(
            f"{counted(ledger.packs, 'pack')} of up to {seq_len:,} tokens, {format_percent(full)} full"
        )
    text = "; ".join(part for part in parts if part) + "."
    return text[0].upper() + text[1:]
