"""The optimisation matrix as a picture: models down, lengths of rows across, one card for each cell."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fitune.report.drawing import circle, document, line, polygon, rectangle, text

Need = Literal["nothing", "recompute", "offload", "both", "too much"]
"""What a setting takes to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One cell: words about the plan that is taken, how full it fills a device, a row of needs for each method."""

    title: str
    lines: tuple[str, ...]
    colour: str
    """Of the palette: one for each method."""
    filled: float
    """Peak as a share of what is usable; above 1 it does not fit, 0 draws no bar."""
    needs: tuple[tuple[Need, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPicture:
    title: str
    rows: tuple[tuple[str, str], ...]
    """Name and size of each model."""
    columns: tuple[str, ...]
    cards: tuple[tuple[Card, ...], ...]
    methods: tuple[str, ...]
    shardings: tuple[str, ...]


_TOP, _GAP = 74, 10
_CARD_WIDTH, _LINE, _MARK = 188, 16, 27
_NEEDS: tuple[tuple[Need, str], ...] = (
    ("nothing", "fits"),
    ("recompute", "recomputed blocks"),
    ("offload", "weights or optimizer on the host"),
    ("both", "both"),
    ("too much", "does not fit"),
)


def draw_matrix(picture: MatrixPicture) -> str:
    """A whole SVG file."""
    card_height, left = _card_height(picture), _left(picture)
    width = left + len(picture.columns) * (_CARD_WIDTH + _GAP) + _GAP
    height = _TOP + len(picture.rows) * (card_height + _GAP) + 46
    elements = [text(_GAP, 26, picture.title, style="large")]
    for place, heading in enumerate(picture.columns):
        centre = left + place * (_CARD_WIDTH + _GAP) + _CARD_WIDTH / 2
        elements.append(text(centre, _TOP - 14, heading, style="bold middle"))
    for row, (name, size) in enumerate(picture.rows):
        top = _TOP + row * (card_height + _GAP)
        elements += [text(_GAP, top + 20, name, style="bold"), text(_GAP, top + 37, size, fill="muted")]
        for place, card in enumerate(picture.cards[row]):
            x = left + place * (_CARD_WIDTH + _GAP)
            elements += _card(card, picture, left=x, top=top, height=card_height)
    elements += _legend(picture, y=height - 24)
    return document(elements, width=width, height=height, label=picture.title)


def _left(picture: MatrixPicture) -> float:
    """Room for the longest name in bold, about 7.4 pixels a letter."""
    return max(120, 2 * _GAP + 7.4 * max(len(name) for name, _ in picture.rows))


def _card_height(picture: MatrixPicture) -> float:
    lines = max(len(card.lines) for row in picture.cards for card in row)
    marks = (len(picture.methods) + 1) * 17 + 8 if picture.methods else 0
    return 44 + lines * _LINE + marks


def _card(card: Card, picture: MatrixPicture, *, left: float, top: float, height: float) -> Iterator[str]:
    yield rectangle(left, top, _CARD_WIDTH, height, fill="panel", radius=8)
    yield rectangle(left, top, 5, height, fill=card.colour, radius=2)
    inside = left + 16
    yield text(inside, top + 20, card.title, style="bold")
    if card.filled:
        yield from _bar(card, x=inside, y=top + 28)
    for number, words in enumerate(card.lines):
        yield text(inside, top + 52 + number * _LINE, words, fill="muted", style="small")
    if card.needs:
        yield from _marks(card.needs, picture, x=inside, bottom=top + height - 10)


def _bar(card: Card, *, x: float, y: float) -> Iterator[str]:
    """What of the device is filled; all of it in red where it does not fit."""
    width = _CARD_WIDTH - 32
    yield rectangle(x, y, width, 7, fill="line", radius=3)
    fill = "bad" if card.filled > 1 else card.colour
    yield rectangle(x, y, width * min(card.filled, 1), 7, fill=fill, radius=3)


def _marks(
    needs: Sequence[Sequence[Need]], picture: MatrixPicture, *, x: float, bottom: float
) -> Iterator[str]:
    """A row for each method, a column for each sharding."""
    first = bottom - (len(needs) - 1) * 17
    start = x + 62
    for place, name in enumerate(picture.shardings):
        yield text(start + place * _MARK, first - 17, _short(name), fill="muted", style="small middle")
    for row, (method, marks) in enumerate(zip(picture.methods, needs, strict=True)):
        y = first + row * 17
        yield text(x, y, method, fill="muted", style="small")
        for place, need in enumerate(marks):
            yield from _mark(need, x=start + place * _MARK, y=y - 4)


def _short(sharding: str) -> str:
    """``Z2`` for ZeRO-2; ``DDP`` is short; one device has no name."""
    return sharding.replace("ZeRO-", "Z").replace("one device", "")


def _mark(need: Need, *, x: float, y: float) -> Iterator[str]:
    """A full disc fits; half a disc recomputes; a ring offloads; a ring with half a disc does both; a dash is none."""
    radius = 5.0
    match need:
        case "nothing":
            yield circle(x, y, radius, fill="good")
        case "recompute":
            yield _half_disc(x, y - 2.5, radius)
        case "offload":
            yield circle(x, y, radius - 0.5, stroke="good")
        case "both":
            yield circle(x, y, radius - 0.5, stroke="good")
            yield _half_disc(x, y, radius - 0.5)
        case "too much":
            yield line(x - 3, y, x + 3, y, stroke="muted")


def _half_disc(x: float, y: float, radius: float) -> str:
    """The lower half, as a polygon of 12 corners."""
    unit = ((1, 0), (0.97, 0.26), (0.87, 0.5), (0.71, 0.71), (0.5, 0.87), (0.26, 0.97))
    corners = [*unit, (0, 1), *((-a, b) for a, b in reversed(unit))]
    return polygon([(x + a * radius, y + b * radius) for a, b in corners], fill="good")


def _legend(picture: MatrixPicture, *, y: float) -> Iterator[str]:
    if not picture.methods:
        return
    x: float = _GAP
    yield text(x, y, "A setting needs", fill="muted", style="small")
    x += 92
    for need, words in _NEEDS:
        yield from _mark(need, x=x, y=y - 4)
        yield text(x + 10, y, words, fill="muted", style="small")
        x += 30 + 6.1 * len(words)
