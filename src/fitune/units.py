"""The only place where numbers become text and text becomes numbers."""

import re

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kb": 1000, "kib": KIB,
    "m": MIB, "mb": 1000**2, "mib": MIB,
    "g": GIB, "gb": 1000**3, "gib": GIB,
    "t": TIB, "tb": 1000**4, "tib": TIB,
}  # fmt: skip


def format_bytes(value: int | float) -> str:
    """Bytes for people: ``9.08 GiB``, ``512.0 MiB``, ``12 B``."""
    size = abs(value)
    if size >= 0.1 * GIB:
        return f"{value / GIB:,.2f} GiB"
    if size >= 0.1 * MIB:
        return f"{value / MIB:.1f} MiB"
    if size >= KIB:
        return f"{value / KIB:.1f} KiB"
    return f"{int(value)} B"


def parse_bytes(text: str | int) -> int:
    """``"128GiB"``, ``"24 GB"``, ``"512M"`` or a number of bytes. GB is 10⁹, GiB and G are 2³⁰.

    Raises ValueError when the text is no size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _BYTE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 24GiB, 24GB or 512MiB")
    return int(float(match.group(1)) * unit)


def format_count(value: int | float) -> str:
    """A count with three digits: ``8.19 B``, ``13.6 M``, ``950``."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}"


def format_seconds(value: float) -> str:
    """A duration for people: ``840 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 25 min``."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_rate(tokens_per_second: float) -> str:
    """Throughput: ``12,473 tokens/s``."""
    digits = 0 if tokens_per_second >= 100 else 1
    return f"{tokens_per_second:,.{digits}f} tokens/s"


def format_percent(fraction: float, *, signed: bool = False) -> str:
    """A fraction as a percentage: ``2.4 %``, ``+0.8 %``."""
    return f"{fraction * 100:{'+' if signed else ''}.1f} %"
