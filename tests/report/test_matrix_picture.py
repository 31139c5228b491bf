"""The picture of a matrix is one well-formed file with everything in it, drawn without any library."""

import xml.etree.ElementTree as xml

from fitune.report.drawing import document, text
from fitune.report.matrix_picture import Card, MatrixPicture, draw_matrix

_SVG = "{http://www.w3.org/2000/svg}"
CARD = Card(
    title="LoRA · ZeRO-3",
    lines=("20 of 30 GiB", "1,550 tokens/s"),
    colour="series-3",
    filled=20 / 30,
    needs=(("nothing", "recompute"), ("both", "too much")),
)
LONGER = Card(title="no such rows", lines=("the model was made for",), colour="line", filled=0)


def picture(*cards: Card) -> MatrixPicture:
    return MatrixPicture(
        title="What fits on <2> & more",
        rows=(("tiny", "1 B parameters"),),
        columns=tuple(f"{number} tokens" for number, _ in enumerate(cards)),
        cards=(cards,),
        methods=("LoRA", "QLoRA"),
        shardings=("DDP", "ZeRO-3"),
    )


def test_every_card_is_drawn_inside_the_picture():
    root = xml.fromstring(draw_matrix(picture(CARD, LONGER)))
    words = [element.text for element in root.iter(f"{_SVG}text")]
    assert words.count("LoRA · ZeRO-3") == 1
    assert "no such rows" in words
    assert "What fits on <2> & more" in words
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{_SVG}rect"):
        assert float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) + float(box.get("height")) <= height


def test_the_bar_is_as_long_as_the_device_is_full_and_red_beyond():
    def bars(card: Card):
        boxes = list(xml.fromstring(draw_matrix(picture(card))).iter(f"{_SVG}rect"))
        whole, filled = (box for box in boxes if box.get("height") == "7")
        return filled, float(filled.get("width")) / float(whole.get("width"))

    filled, share = bars(CARD)
    assert abs(share - 2 / 3) < 0.001
    assert filled.get("class") == "fill-series-3"
    filled, share = bars(Card(title="none", lines=(), colour="series-3", filled=1.4))
    assert share == 1
    assert filled.get("class") == "fill-bad"


def test_a_picture_follows_light_and_dark():
    whole = document([text(0, 0, "a")], width=10, height=10, label='"quoted"')
    assert "prefers-color-scheme:dark" in whole
    assert xml.fromstring(whole).get("aria-label") == '"quoted"'
