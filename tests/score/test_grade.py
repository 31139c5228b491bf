"""Laws of the graders: what counts as the same answer."""

import sys
from decimal import Decimal

import pytest

from fitune.errors import MissingExtra, RecipeError
from fitune.score.graders import References, grade, last_number


@pytest.mark.parametrize("name", ["exact_match", "contains", "number", "rouge"])
@pytest.mark.parametrize("text", ["18", "it costs 1,250.50 dollars", "She has 3 left.\n#### 3"])
def test_every_answer_agrees_with_itself(name: str, text: str) -> None:
    assert grade(name, text, text) == 1.0


@pytest.mark.parametrize("name", ["exact_match", "contains", "number", "rouge"])
def test_an_empty_answer_earns_nothing(name: str) -> None:
    assert grade(name, "", "the answer is 18") == 0.0


def test_exact_match_counts_white_space_as_one_space_and_nothing_else() -> None:
    assert grade("exact_match", "  item: lamp |\n city: Oslo ", "item: lamp | city: Oslo") == 1.0
    assert grade("exact_match", "item: Lamp | city: Oslo", "item: lamp | city: Oslo") == 0.0
    assert grade("exact_match", "itemlamp", "item lamp") == 0.0


def test_contains_finds_the_reference_anywhere_but_not_the_other_way_round() -> None:
    assert grade("contains", "I think it is\nOslo, Norway", "is Oslo") == 1.0
    assert grade("contains", "Oslo", "Oslo, Norway") == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Janet sells 9 eggs.\n#### 18", "18"),
        ("#### 1,080", "1080"),
        ("first 5, then 1,234,567", "1234567"),
        ("that is $1,234.50.", "1234.50"),
        ("down by -7", "-7"),
        ("a loss of -$20", "-20"),
        ("10-5", "5"),
        ("pick 1,2,3", "3"),
        ("6.0", "6"),
        ("007", "7"),
        ("he is 12.", "12"),
        ("#### 40 and 2 more said before #### 42", "42"),
        ("no number here", None),
        ("twelve 9 #### none", None),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text: str, wanted: str | None) -> None:
    assert last_number(text) == (None if wanted is None else Decimal(wanted))


def test_number_compares_values_and_not_spelling() -> None:
    reference = "He pays 500 + 580 = <<500+580=1080>>1080.\n#### 1,080"
    assert grade("number", "so the answer is $1080.00", reference) == 1.0
    assert grade("number", "so the answer is 1081", reference) == 0.0
    assert grade("number", "I do not know", "#### 3") == 0.0


def test_rouge_is_the_f1_of_the_longest_common_subsequence() -> None:
    # LCS "the cat sat" = 3 words; precision 3/4, recall 3/6, F1 = 2 · 0.75 · 0.5 / 1.25
    assert grade("rouge", "the cat happily sat", "the cat sat on the mat") == pytest.approx(0.6)


def test_rouge_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from fitune.score.graders import _rouge_scorer

    _rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(MissingExtra, match="rouge") as caught:
        grade("rouge", "a", "b")
    assert caught.value.hint == "pip install 'fitune[metrics]'"


def test_an_unknown_grader_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="exct_match") as caught:
        grade("exct_match", "a", "a")
    assert "exact_match" in str(caught.value)
    with pytest.raises(RecipeError, match="bleurt") as caught:
        grade("bleurt", "a", "a")
    assert "rouge" in str(caught.value)


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["18", "#### 4", "1,000"], ("number",)),
        (["18", "four"], ("exact_match", "contains")),
        (["item: lamp | colour: red"], ("exact_match", "contains")),
        (["a sentence that goes on " * 6, "short"], ("rouge",)),
        (["#### no idea"], ("exact_match", "contains")),
    ],
)
def test_graders_follow_from_the_references(references: list[str], names: tuple[str, ...]) -> None:
    seen = References()
    for reference in references:
        seen.add(reference)
    chosen, why = seen.graders()
    assert chosen == names
    assert why
