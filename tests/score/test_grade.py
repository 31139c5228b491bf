"""Laws of the graders: what counts as the same answer."""

import hashlib
import sys
from decimal import Decimal

import pytest

from fitune.errors import MissingExtra, RecipeError
from fitune.score.grades.graders import GRADERS, References, last_number, open_graders
from fitune.score.grades.grading import grade_line, try_graders


def grade(name, answer, expected):
    return GRADERS[name].grade(answer, expected)


@pytest.mark.parametrize("name", ["exact_match", "contains", "number", "rouge", "f1"])
def test_every_answer_agrees_with_itself_and_an_empty_one_earns_nothing(name):
    for text in ("it costs 1,250.50 dollars", "She has 3 left.\n#### 3"):
        assert grade(name, text, text) == 1.0
        assert grade(name, "", text) == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("#### 1,080", "1080"),
        ("first 5, then 1,234,567", "1234567"),
        ("that is $1,234.50.", "1234.50"),
        ("a loss of -$20", "-20"),
        ("10-5", "5"),
        ("pick 1,2,3", "3"),
        ("007", "7"),
        ("#### 40 and 2 more said before #### 42", "42"),
        ("it costs $.75", "0.75"),
        ("-.5", "-0.5"),
        ("wait...5", "5"),
        ("version 1.2.5", "5"),
        ("1.5e3", "1500"),
        ("1e-3 m", "0.001"),
        ("code 3e8f", "8"),
        ("#### 18\n\n#### Explanation\n1. We add", "18"),
        ("#### 1. Add\n9 + 9 = 18", "18"),
        ("twelve 9 #### none", "9"),
        ("no number here", None),
    ],
)
def test_the_last_number_is_read_as_people_write_it(text, wanted):
    assert last_number(text) == (None if wanted is None else Decimal(wanted))


@pytest.mark.parametrize(
    "text",
    ["Кошка сидела на коврике", "고양이가 매트 위에 앉았다", "बिल्ली चटाई पर बैठी", "แมวนั่งบนเสื่อ",
     "猫がマットの上に座った"],
)  # fmt: skip
def test_rouge_reads_words_of_every_script(text):
    words = text.split() if " " in text else list(text)
    assert grade("rouge", text, text) == 1.0
    assert grade("rouge", "the cat", text) == 0.0
    half = (" " if " " in text else "").join(words[: len(words) // 2])
    assert 0.3 < grade("rouge", half, text) < 0.9


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Élan vital, naïve café!", "Elan vital: naive cafe"),
        ("łódź über straße №5 ½ x² H₂O ℓ", "lodz uber strasse 5 x2 H2O"),
        ("cafe\u0301 noir ﬁn ❤\ufe0f ʻokina", "café noir fin okina"),
        ("Việt Nam 10,5 %", "Viet Nam 10.5"),
    ],
)
def test_rouge_of_latin_text_is_rouge_scores(answer, expected):
    from rouge_score.rouge_scorer import RougeScorer

    theirs = RougeScorer(["rougeL"])
    for one, other in ((answer, expected), (expected, answer), (answer, answer)):
        assert grade("rouge", one, other) == theirs.score(other, one)["rougeL"].fmeasure


def test_rouge_without_its_library_names_the_extra(monkeypatch):
    from fitune.score.grades.graders import _library

    _library.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(MissingExtra, match="rouge") as caught:
        grade("rouge", "a", "b")
    assert caught.value.hint == "pip install 'fitune[metrics]'"


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["18", "#### 4", "1,000"], ("number",)),
        (["18", "four"], ("exact_match", "contains")),
        (["word " * 20], ("exact_match", "contains")),
        (["word " * 21, "short"], ("rouge",)),
        (["#### no idea"], ("exact_match", "contains")),
    ],
)
def test_graders_follow_from_the_references(references, names):
    seen = References()
    for reference in references:
        seen.add(reference)
    chosen, why = seen.graders()
    assert chosen == names
    assert why


_REFERENCE = "He pays 500 + 580 = <<500+580=1080>>1080.\n#### 1,080"


@pytest.mark.parametrize(
    ("name", "answer", "expected", "wanted"),
    [
        ("exact_match", "  item: lamp |\n city: Oslo ", "item: lamp | city: Oslo", 1),
        ("exact_match", "item: Lamp | city: Oslo", "item: lamp | city: Oslo", 0),
        ("contains", "I think it is\nOslo, Norway", "is Oslo", 1),
        ("contains", "Oslo", "Oslo, Norway", 0),
        ("number", "so the answer is $1080.00", _REFERENCE, 1),
        ("number", "so the answer is 1081", _REFERENCE, 0),
        ("number", "I do not know", "#### 3", 0),
        # LCS "the cat sat" = 3 words; precision 3/4, recall 3/6, F1 = 2 · 0.75 · 0.5 / 1.25
        ("rouge", "the cat happily sat", "the cat sat on the mat", 0.6),
        ("f1", "The capital: Oslo, Norway", "Oslo, a Norway.", 0.8),  # 2 shared of 3 and 2 words: 2 · 2 / 5
        ("f1", "", "", 1),
        ("f1", "US", "U.S.", 1),
        ("f1", "well-known", "well known", 0),
        ("f1", "“Oslo”。", "Oslo", 1),
        ("f1", "The theatre", "theatre", 1),
    ],
)
def test_what_counts_as_the_same_answer(name, answer, expected, wanted):
    assert grade(name, answer, expected) == pytest.approx(wanted)


def test_other_rules_of_a_grader_are_another_key():
    """Grades that an earlier version wrote are not taken for today's."""
    for name in ("rouge", "number", "f1"):
        (grader,) = open_graders((name,))
        assert grader.key != hashlib.sha256(f"{name} ".encode()).hexdigest()[:12]
    (same,) = open_graders(("contains",))
    assert same.key == hashlib.sha256(b"contains ").hexdigest()[:12]


def test_bleu_and_chrf_are_sacrebleus_own():
    sacrebleu = pytest.importorskip("sacrebleu")
    answer, expected = "the cat sat on the mat", "the cat is on the mat"
    assert grade("bleu", answer, expected) == sacrebleu.sentence_bleu(answer, [expected]).score / 100
    assert grade("chrf", answer, expected) == sacrebleu.sentence_chrf(answer, [expected]).score / 100
    assert grade("bleu", expected, expected) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("regex", "", "needs PATTERN"),
        ("f1:x", "", "takes nothing"),
        ("python:rules.py", "", "needs FILE.py:FUNCTION"),
        ("json_schema:/no/such.json", "", "cannot be read"),
        ("exct_match", "", r"exct_match(.|\n)*exact_match"),
        ("regex:(", "", r"'regex:\(': .*unterminated subpattern"),
        ("json_schema:{}", "7", "bad.json': .*a schema is an object, true or false"),
        ("json_schema:{}", "{", "bad.json': .*line 1"),
        ("json_schema:{}", '{"type": "objec"}', r"bad.json': .*'objec' is not valid[^\n]*$"),
    ],
)
def test_a_grader_that_cannot_be_used_is_refused_before_any_row(tmp_path, name, content, said):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(RecipeError, match=said):
        try_graders(open_graders((name.format(tmp_path / "bad.json"),)))


def test_a_key_follows_from_the_name_and_the_files(tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text("def f(**_): return 1")
    (first,) = open_graders((f"python:{rules}:f",))
    rules.write_text("def f(**_): return 0")
    (second,) = open_graders((f"python:{rules}:f",))
    assert len({first.key, second.key, *(g.key for g in open_graders(("regex:a", "regex:b")))}) == 4


RULES = """
def shout(*, answer, expected, prompt):
    return answer.isupper() / int(expected) if prompt != "none" else None
"""


def graded(name, answer, expected="1", prompt=""):
    (grader,) = open_graders((name,))
    body = {"object": "chat.completion", "choices": [{"message": {"content": answer}}]}
    return grade_line(grader, {"response": {"body": body}}, {"expected": expected, "prompt": prompt})


def test_a_function_that_raises_is_an_error_of_its_row(tmp_path):
    (tmp_path / "rules.py").write_text(RULES)
    shout = f"python:{tmp_path / 'rules.py'}:shout"
    assert graded(shout, "LOUD") == {"grade": 1.0}
    assert graded(shout, "quiet") == {"grade": 0.0}
    assert graded(shout, "LOUD", "0") == {"grade": 0.0, "error": "ZeroDivisionError: division by zero"}
    assert "not a finite number" in graded(shout, "LOUD", prompt="none")["error"]
    (tmp_path / "rules.py").write_text("def shout(**_): return 3")
    assert graded(shout, "LOUD") == {"grade": 3.0}, "the new file counts"


def test_a_function_may_use_dataclasses_and_numbers_of_numpy(tmp_path):
    (tmp_path / "rules.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import numpy\n"
        "@dataclass\n"
        "class Said:\n    words: list[str]\n"
        "def share(*, answer, **_): return numpy.float32(0.5) * len(Said(answer.split()).words)\n"
        "def count(*, answer, **_): return numpy.int64(len(answer))\n"
    )
    assert graded(f"python:{tmp_path / 'rules.py'}:share", "one two three") == {"grade": 1.5}
    assert graded(f"python:{tmp_path / 'rules.py'}:count", "one") == {"grade": 3.0}


def test_patterns_and_schemas_grade_the_answer_alone(tmp_path):
    (tmp_path / "city.json").write_text('{"type": "object", "required": ["city"]}')
    schema = f"json_schema:{tmp_path / 'city.json'}"
    for name, answer, wanted in (
        ("regex:^[0-9]+$", "42", 1.0),
        ("regex:^[0-9]+$", "forty", 0.0),
        (schema, '```json\n{"city": "Oslo"}\n```', 1.0),
        (schema, '{"town": 1}', 0.0),
        (schema, "no", 0.0),
    ):
        assert graded(name, answer, None) == {"grade": wanted}
