"""Tables of text for the terminal."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """The first column to the left, the others to the right, each as wide as its widest cell."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = (
        "  ".join(
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))]
        )
        for name, *cells in rows
    )
    return "\n".join((" " * indent + line).rstrip() for line in lines)
