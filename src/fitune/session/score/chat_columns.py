"""Answers beside each other, as lines of text for a terminal."""

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

_GAP = 3
"""Columns between two answers."""


def side_by_side(
    titles: Sequence[str], texts: Sequence[str], notes: Sequence[str], *, width: int, most_lines: int
) -> str:
    """Each text below its title and above its note, in columns that are ``width`` together; of long texts the last
    ``most_lines`` lines, 0: all."""
    from rich.cells import set_cell_size

    each = (width + _GAP) // len(titles) - _GAP
    bodies = [_folded(text, each)[-most_lines:] for text in texts]
    rows = [[f"── {title}" for title in titles], *zip_longest(*bodies, fillvalue="")]
    if notes:
        rows.append(list(notes))
    return "\n".join((" " * _GAP).join(set_cell_size(cell, each) for cell in row).rstrip() for row in rows)


def _folded(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` cells: a character of Chinese takes two."""
    from rich.cells import cell_len, chop_cells

    lines = []
    for line in text.expandtabs(4).splitlines():
        words = textwrap.wrap(line, width, drop_whitespace=False, break_on_hyphens=False) or [""]
        lines += [
            part
            for piece in words
            for part in (chop_cells(piece, width) if cell_len(piece) > width else [piece])
        ]
    return lines
