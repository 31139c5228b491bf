"""The only place where numbers become text, text becomes numbers, and long lines become several; powers of two."""

import math
import os
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kb": 1000, "kib": KIB,
    "m": MIB, "mb": 1000**2, "mib": MIB,
    "g": GIB, "gb": 1000**3, "gib": GIB,
    "t": TIB, "tb": 1000**4, "tib": TIB,
}  # fmt: skip


MOST_EPOCH_ROWS = 10**12
"""Largest number of rows that somebody may say an epoch has."""


def whole_number(text: str, *, most: int) -> int | None:
    """The whole number of at most ``most`` that ``text`` says in digits alone; None where it says none."""
    is_short = text.isdecimal() and len(text.lstrip("0")) <= len(
        str(most)
    )  # of endless digits int makes an error
    return int(text) if is_short and int(text) <= most else None


def power_of_two(size: int) -> int:
    """The smallest that is not less than ``size``; 0 for nothing."""
    return 1 << (size - 1).bit_length() if size else 0


def format_bytes(value: int | float) -> str:
    """Bytes for people: ``9.08 GiB``, ``512.0 MiB``, ``12 B``.

    The unit is chosen after rounding, so nothing prints as 1024.0 MiB.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if round(size / MIB, 1) >= 1024:
        return f"{value / GIB:,.2f} GiB"
    if round(size / KIB, 1) >= 1024:
        return f"{value / MIB:.1f} MiB"
    if round(size) >= KIB:
        return f"{value / KIB:.1f} KiB"
    return f"{round(value)} B"


def parse_bytes(text: str | int) -> int:
    """``"128GiB"``, ``"24 GB"``, ``"1,280.00 GiB"`` or a number of bytes. GB is 10⁹, GiB and G are 2³⁰.

    Raises ValueError when the text is no size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?\s*([a-zA-Z]*)\s*", text, re.ASCII)
    unit = _BYTE_UNITS.get(match.group(3).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 24GiB, 24GB or 512MiB")
    number = match.group(1).replace(",", "") + (match.group(2) or "")
    return int(Decimal(number) * unit)  # a float would lose bytes above 2⁵³


def parse_bandwidth(text: str | float) -> float:
    """Bytes/s: ``"1008GB/s"``, ``"64 GiB/s"``, ``"400Gbit/s"``, ``"100Gbps"``, or a number.

    B is a byte and b, bit or bps a bit. Raises ValueError when the text is none of these.
    """
    if isinstance(text, int | float):
        return float(text)
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kKMGT]i?)?(B|b|bit)(?:/s|ps))?\s*", text, re.ASCII
    )
    if match is None:
        raise ValueError(f"{text!r} is not a bandwidth; write it like 1008GB/s or 100Gbit/s")
    number, prefix, unit = match.groups()
    scale = _BYTE_UNITS[f"{(prefix or '').lower()}b"] if prefix else 1
    return float(number) * scale / (1 if unit in (None, "B") else 8)


def format_count(value: int | float) -> str:
    """A count with three digits: ``8.19 B``, ``13.6 M``, ``950``."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        # 999.5 of the next smaller unit already prints as 1000 of them
        if abs(value) >= size * 0.9995:
            shown = value / size
            decimals = 2 if round(abs(shown), 2) < 10 else 1 if round(abs(shown), 1) < 100 else 0
            return f"{shown:,.{decimals}f} {letter}"
    return f"{value:.0f}"


def counted(count: int, what: str) -> str:
    """``1 row``, ``1,200 rows``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def format_dollars(dollars: float) -> str:
    """``$1,234.50``; less than a cent is said in words."""
    return "under $0.01" if 0 < dollars < 0.01 else f"${dollars:,.2f}"


def format_seconds(value: float) -> str:
    """A duration for people: ``840 ms``, ``1.92 s``, ``12.3 s``, ``4 min 10 s``, ``3 h 25 min``, ``2 d 4 h``."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 0.9995:
        return f"{value * 1000:.3g} ms"
    if abs(value) < 59.95:
        return f"{value:.{2 if abs(value) < 9.995 else 1}f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} d {hours} h"


_TIME_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_seconds(text: str | int | float) -> float:
    """Seconds: ``"90s"``, ``"30 min"``, ``"12h"``, ``"2 d 4 h"``, or a number. Raises ValueError for anything else."""
    if isinstance(text, int | float):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower(), re.ASCII)
    rest = re.sub(r"(\d+(?:\.\d+)?)\s*([a-z]+)", "", text.strip().lower(), flags=re.ASCII)
    if not parts or rest.strip() or any(unit not in _TIME_UNITS for _, unit in parts):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 30min, 12h or 2d")
    return sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)


def format_rate(tokens_per_second: float) -> str:
    """Throughput: ``12,473 tokens/s``."""
    digits = 0 if abs(tokens_per_second) >= 99.95 else 1
    return f"{tokens_per_second:,.{digits}f} tokens/s"


def format_percent(fraction: float, *, signed: bool = False, digits: int = 1) -> str:
    """A fraction as a percentage: ``2.4 %``, ``+0.8 %``, without digits ``53 %``; never ``-0.0 %``."""
    return f"{fraction * 100:{'+' if signed else ''}z.{digits}f} %"


def format_number(value: float, *, digits: int = 4) -> str:
    """A loss or a norm with that many significant digits: ``2.314``, ``0.8200``; ``nan`` stays visible."""
    return f"{value:#.{digits}g}".rstrip(".")


def format_learning_rate(value: float) -> str:
    """``1.9e-04``."""
    return "0" if value == 0 else f"{value:.1e}"


def as_ranges(numbers: Iterable[int]) -> str:
    """``0–3, 7``, in ascending order."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{s[0]}–{s[-1]}" if len(s) > 1 else str(s[0]) for s in runs)


NO_BREAK = "\xa0"
"""A space at which ``wrapped`` breaks no line."""
_COLUMNS = 100
_NARROWEST = 60


def wrapped(text: str, *, indent: int = 2, hanging: int = 0, columns: int = _COLUMNS) -> str:
    """``text`` in lines of at most so many columns, or as many as a narrower terminal has; the lines after the first
    are indented by ``hanging`` more. A number stays with its unit."""
    filled = textwrap.fill(
        re.sub(r"(?<=\d) (?=[KMGT]iB\b|×)|(?<=×) ", NO_BREAK, text),
        width=min(columns, _width()),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(NO_BREAK, " ")


def _width() -> int:
    """Columns of the terminal that standard output is, within limits; those of a page where it is none."""
    if not os.isatty(1):
        return _COLUMNS
    there = shutil.get_terminal_size((_COLUMNS, 24)).columns
    return min(_COLUMNS, max(_NARROWEST, there))


def text_table(rows: Sequence[Sequence[str]], *, indent: int = 0, left: Collection[int] = (0,)) -> str:
    """The columns of ``left`` to the left, the others to the right, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join((" " * indent + line).rstrip() for line in lines)
