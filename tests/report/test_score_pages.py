"""score.html and comparison.html: what was measured, in words, with strangers' texts escaped."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fitune.errors import RunDirectoryError
from fitune.report.score_pages import write_score_comparison, write_score_page
from fitune.report.score_rows import first_grader_error, read_scored_rows
from fitune.score.grades.intervals import paired_scores
from fitune.session.score.scoring import compare_scores
from fitune.values.reports import ScoreReport
from fitune.values.serial import to_json

HOSTILE = "</p></style><script>alert(1)</script>"
GRADER = "regex:<b>$x^2$"


def write_folder(folder, grades, *, scale="share", tokens=7):
    """A finished scoring as score() leaves it, with one row for each grade; the last row has no answer."""
    folder.mkdir()
    rows, lines = [], []
    for place, grade in enumerate(grades):
        failed = place == len(grades) - 1
        rows.append(
            {
                "custom_id": f"row {place}", "prompt": f"question {place} {HOSTILE}", "expected": HOSTILE,
                "answer": None if failed else f"answer {place} of {folder.name}", "completion_tokens": tokens + place,
                "finish_reason": None if failed else "length" if place % 2 else "stop",
                f"grade_{GRADER}": grade,
                "error": "prompt 9 + 9 = 18 tokens, the model has room for 8" if failed else None,
            }
        )  # fmt: skip
        line = {"id": f"row {place}", "expected": HOSTILE, "grades": {GRADER: grade}}
        if grade is None:
            line |= {
                "errors": {GRADER: "the verdict cannot be read"},
                "said": {GRADER: "I <i>cannot</i> say"},
            }
        lines.append(json.dumps(line) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), folder / "answers.parquet")
    (folder / "grades.jsonl").write_text("".join(lines))
    known = [grade for grade in grades if grade is not None]
    report = ScoreReport(
        model=f"models/{HOSTILE}", adapter="", data="rows.jsonl", rows=len(grades), answered=len(grades) - 1, failed=1,
        grades={GRADER: sum(known) / len(known)}, intervals={GRADER: (0.1, 0.9)}, scales={GRADER: scale},
        measures={GRADER: "answers in which the pattern is found"}, seconds=2.0, rows_asked=len(grades),
        generated_tokens=50, cut_off=2, prompt_tokens=100, ungraded={GRADER: grades.count(None)},
        grader_errors={GRADER: grades.count(None)},
    )  # fmt: skip
    (folder / "report.json").write_text(to_json(report))
    return folder


def text_of(page):
    """What a reader sees, on one line."""
    body = page.read_text().partition("<main>")[2]
    return " ".join(re.sub(r"<svg.*?</svg>|<[^>]*>", " ", body, flags=re.DOTALL).split())


def require_harmless(page):
    """Nothing is loaded or executed, and strangers' texts are text."""
    text = page.read_text()
    assert "<script" not in text
    assert "<i>cannot" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"\s(src|onload|onclick)=|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


@pytest.mark.pictures
def test_the_page_says_what_was_measured_and_shows_the_worst_rows(tmp_path):
    page = write_score_page(write_folder(tmp_path / "one", [1.0, 0.0, None, 1.0, 0.0]))
    require_harmless(page)
    text = text_of(page)
    assert "50.0 %: answers in which the pattern is found, over 4 rows (95 %: 10.0 % to 90.0 %)" in text
    assert "Rows 5 1 without an answer" in text
    assert "Cut off 2 40.0 % hit max_new_tokens" in text
    assert "2.5 rows/s" in text
    assert "prompt 9 + 9 = 18 tokens" in text
    assert "the verdict cannot be read I &lt;i&gt;cannot&lt;/i&gt; say" in text
    worst = text.partition("Worst rows")[2].partition("Samples")[0]
    assert worst.index("row 1:") < worst.index("row 0:") < worst.index("row 3:")
    assert "cut off at the token limit" in worst
    by_grade, by_tokens = re.findall("<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert by_grade.count("fill: var(--series-1)") == 2, "a bar of zeros and one of ones"
    assert "fill: var(--series-1)" in by_tokens
    rows = re.findall(r"text-anchor: end[^>]*>([^<]+)</text", by_grade)
    assert rows
    assert len(rows) == len(set(rows)), "no number of rows stands twice"


def test_the_worst_perplexities_are_the_highest(tmp_path):
    page = write_score_page(write_folder(tmp_path / "one", [3.0, 900.0, 5.0, 0.0], scale="perplexity"))
    worst = text_of(page).partition("Worst rows")[2]
    assert worst.index("row 1:") < worst.index("row 2:") < worst.index("row 0:")


@pytest.mark.pictures
def test_two_scorings_are_shown_with_the_rows_that_changed_both_ways(tmp_path):
    mine = write_folder(tmp_path / "mine", [1.0, 1.0, 0.0, 1.0, 0.0, None, 0.0])
    other = write_folder(tmp_path / "other", [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    changed = []
    paired = paired_scores(mine, other, on_changed=changed.append)
    page = write_score_comparison(mine, other, paired, changed)
    require_harmless(page)
    text = text_of(page)
    for words in (
        "50.0 % here, 33.3 % there: +16.7 points (95 %:", "McNemar p = 1): may be chance.",
        "in both only here only there in neither regex:&lt;b&gt;$x^2$ 1 2 1 2",
        "3 rows have the same grade by regex",
    ):  # fmt: skip
        assert words in text
    told = compare_scores(mine, other).splitlines()[0]
    assert told.endswith("may be chance. 2 better, 1 worse, of 6 rows")
    better, _, worse = text.partition("Better here: 2 rows")[2].partition("Worse here: 1 row by")
    for answer in ("0 of mine", "0 of other", "1 of mine"):
        assert f"answer {answer}" in better
    assert re.findall(r"answer \d of \w+", worse)[:2] == ["answer 2 of mine", "answer 2 of other"]
    assert "regex:&lt;b&gt;$x^2$</text>" in page.read_text()  # beside its interval, not read as a formula


def test_the_rows_shown_are_those_of_a_grader_by_which_some_changed(tmp_path):
    mine = write_folder(tmp_path / "mine", [1.0, 1.0, 0.0])
    other = write_folder(tmp_path / "other", [0.0, 1.0, 0.0])
    changed = []
    (by_pattern,) = paired_scores(mine, other, on_changed=changed.append)
    alike = replace(by_pattern, grader="alike", other=by_pattern.mean, difference=0.0, better=0, worse=0)
    text = text_of(write_score_comparison(mine, other, [alike, by_pattern], changed))
    for words in (
        "alike: 66.7 % in both: no row changed.",
        "Better here: 1 row by regex",
        "answer 0 of mine",
    ):
        assert words in text


def test_a_folder_that_is_no_scoring_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"report\.json: cannot be read"):
        write_score_page(tmp_path)


@pytest.mark.parametrize("line", ["{}", "[]", "", '{"id": "row 0", "grades": '])
def test_a_line_of_grades_that_is_none_is_refused(tmp_path, line):
    folder = write_folder(tmp_path / "one", [1.0, 0.0])
    (folder / "grades.jsonl").write_text(f"{line}\n")
    readers = [lambda: read_scored_rows(folder, [0], scales={}), lambda: first_grader_error(folder, GRADER)]
    for read in readers[: 1 if line == "{}" else 2]:
        with pytest.raises(RunDirectoryError, match="its rows cannot be read"):
            read()


def test_the_page_is_made_without_settings_that_cannot_be_read(tmp_path):
    folder = write_folder(tmp_path / "one", [1.0, 0.0])
    (folder / "manifest.json").write_text("[]")
    text = text_of(write_score_page(folder))
    assert "Settings" not in text
    assert "No pictures" in text
    assert "pip install &#39;fitune[plots]&#39;" in text
