"""The picture of a matrix is one well-formed file with every word of its cards."""

import xml.etree.ElementTree as xml

import pytest

from fitune.report.comparison_plots import MatrixCard, draw_matrix

pytest.importorskip("matplotlib")
CARD = MatrixCard(
    title="LoRA · ZeRO-3", lines=("20 of 30 GiB", "1,550 tokens/s"), method="lora", filled=20 / 30
)
SHORT = MatrixCard(title="nothing fits", lines=("40 of 30 GiB",), method="", filled=4 / 3)
LONGER = MatrixCard(title="no such rows", lines=("the model was made for",), method="", filled=0)


def draw(path, *cards):
    draw_matrix(
        path, [cards], title="What fits on <2> & more", rows=["tiny"],
        columns=[f"{number} tokens" for number, _ in enumerate(cards)], legend="● fits",
    )  # fmt: skip
    return xml.parse(path).getroot()


def test_every_word_is_drawn_and_a_full_device_is_red(tmp_path):
    path = tmp_path / "deep" / "matrix.svg"
    root = draw(path, CARD, SHORT, LONGER)
    text = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    for words in (
        "What fits on <2> & more", "tiny", "2 tokens", "● fits", "LoRA · ZeRO-3", "1,550 tokens/s", "no such rows",
    ):  # fmt: skip
        assert words in text
    styles = " ".join(element.get("style", "") for element in root.iter())
    assert "#009e73" in styles
    assert "#b23c00" in styles
    dark = path.read_text().partition("@media (prefers-color-scheme: dark)")[2].partition("</style>")[0]
    assert "text { fill: #e7eaed }" in dark, "on a dark screen no word stays dark"
    assert '[style*="fill: #f3f5f7"]' in dark, "the panels"
