"""A judge's verdicts are read strictly, its words are kept, and each answer is judged exactly once."""

from dataclasses import replace
from pathlib import Path

import pytest

from fitune.errors import RecipeError, RunDirectoryError
from fitune.report.score_pages import write_score_page
from fitune.score.engines.engine import Sampling
from fitune.score.grades.graders import open_graders
from fitune.score.grades.intervals import paired_scores
from fitune.score.grades.judge_settings import fill, read_verdict
from fitune.score.plan import ScorePlan
from fitune.score.shards import Shards
from fitune.session.results import text_of
from fitune.values.plan import DataSource
from jsonl import read_lines, write_lines
from score.scorings import answers, quietly
from servers import said, serving

ROWS = 6


@pytest.mark.parametrize(
    ("verdict", "words", "grade"),
    [
        ("points", "Verdict: 3\nNo, on second thought\n**Verdict: 8/10**", 8.0),
        ("points", "10", 10.0),
        ("points", "Verdict: 11", None),
        ("points", "Verdict: 0", None),
        ("points", "I would give 7 of 10", None),
        ("yes_no", "Verdict: **Yes**.", 1.0),
        ("yes_no", "no.", 0.0),
        ("yes_no", "yes, it is", None),
        ("prefer", "Verdict: Answer B", 0.0),
        ("prefer", "Verdict: tie", 0.5),
        ("prefer", "", None),
    ],
)
def test_a_verdict_is_read_or_it_is_none(verdict, words, grade):
    assert read_verdict(words, verdict) == grade


def test_an_answer_that_names_a_place_of_the_template_stays_as_it_is():
    texts = {"answer": "say {expected}", "expected": "4", "prompt": "{answer}"}
    assert fill("{prompt}|{answer}|{expected}", texts) == "{answer}|say {expected}|4"


@pytest.fixture
def plan(tiny, tmp_path):
    data = tmp_path / "rows.jsonl"
    rows = [{"id": f"r{n}", "prompt": f"item {n}", "completion": f"lamp {n}"} for n in range(ROWS)]
    write_lines(data, rows)
    return ScorePlan(
        model=str(tiny.folder), sources=(DataSource(path=str(data)),), output_dir=str(tmp_path / "out"),
        sampling=Sampling(max_new_tokens=6), batch_size=2, shard_rows=2,
    )  # fmt: skip


def judge_file(plan, **keys):
    path = Path(plan.output_dir).parent / "judge.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {"model": plan.model, **keys}.items()))
    return f"judge:{path}"


def graded(plan):
    return read_lines(Path(plan.output_dir) / "grades.jsonl")


def reads(tiny, answer):
    """A judge that is shown its prompt as text, and says what ``answer`` says of it."""
    return lambda body, before: said(answer(tiny.tokenizer.decode(body["prompt"])))


def test_points_are_read_words_are_kept_and_what_cannot_be_read_is_counted(tiny, plan):
    def verdict(prompt):
        if "item 4" in prompt:
            return "I cannot say."
        return "Fine.\nVerdict: 9" if "item 0" in prompt else "Poor.\nVerdict: 2"

    with serving(reads(tiny, verdict)) as (url, bodies):
        name = judge_file(plan, url=url, served_model="wise")
        report = quietly(replace(plan, graders=(name,)))
    assert len(bodies) == ROWS + 1  # one to try it
    assert bodies[1]["model"] == "wise"
    assert report.grades[name] == pytest.approx((9 + 4 * 2) / 5)
    assert (report.ungraded, report.grader_errors) == ({name: 1}, {name: 1})
    assert "mean points of wise, 1 to 10; 1 of 6 rows not graded; the grader failed for 1 row" in text_of(
        report
    )
    rows = graded(plan)
    assert rows[0]["said"] == {name: "Fine.\nVerdict: 9"}
    assert rows[4]["grades"] == {name: None}
    assert rows[4]["errors"] == {name: "the judge's verdict cannot be read"}


def test_two_scorings_are_judged_in_both_orders(tiny, plan, tmp_path):
    """The judge likes the longer answer; of row 1 it always takes the first; row 2 the other scoring does not have."""
    quietly(plan)
    other = tmp_path / "other"
    other.mkdir()
    lines = read_lines(answers(plan))
    for place, line in enumerate(lines):
        line["response"]["body"]["choices"][0]["message"]["content"] = "short" if place == 0 else "long " * 20
    del lines[2]
    write_lines(other / "answers.jsonl", lines)

    def verdict(prompt):
        if "item 1" in prompt or "Answer A:" not in prompt:
            return "Verdict: A"
        first = prompt.split("Answer A:")[1].split("Answer B:")[0]
        other_first, mine_better = "short" in first or "long long" in first, "short" in prompt
        return f"Verdict: {'A' if other_first != mine_better else 'B'}"

    with serving(reads(tiny, verdict)) as (url, bodies):
        name = judge_file(plan, url=url, verdict="prefer", against=other)
        report = quietly(replace(plan, graders=(name,)))
    assert [row["grades"][name] for row in graded(plan)] == [1.0, 0.5, None, 0.0, 0.0, 0.0]
    assert report.grades[name] == pytest.approx(1.5 / 5)
    assert len(graded(plan)[0]["said"][name]) == 2
    assert len(bodies) == 2 * (ROWS - 1) + 1


def test_a_damaged_scoring_to_compare_with_is_an_error_with_its_file_and_line(plan, tmp_path):
    quietly(plan)
    other = tmp_path / "other"
    other.mkdir()
    for damage, why in (
        (b'{"custom_id": 7}\n', "has no response"),
        (b'{"custom_id": "7", "response": 7}\n', "is not as it was written"),
    ):
        (other / "answers.jsonl").write_bytes(answers(plan).read_bytes() + damage)
        with serving(lambda body, before: said("Verdict: A")) as (url, _):
            name = judge_file(plan, url=url, verdict="prefer", against=other)
            with pytest.raises(RunDirectoryError, match=f"{other}: .*answers.*: line {ROWS + 1} {why}"):
                quietly(replace(plan, graders=(name,)))


class Killed(BaseException):
    pass


def test_killed_between_shards_and_asked_again_where_it_failed_each_answer_is_judged_once(
    tiny, plan, monkeypatch
):
    write, written = Shards.write_grades, []

    def write_one(shards, number, key, grades):
        write(shards, number, key, grades)
        written.append(number)
        if len(written) == 2:
            raise Killed

    broken = {"item 5"}

    def reply(body, before):
        prompt = tiny.tokenizer.decode(body["prompt"])
        if any(name in prompt for name in broken):
            return 400, b"no", {}
        return said("Verdict: yes" if "item 3" in prompt else "Verdict: no")

    with serving(reply) as (url, bodies):
        plan = replace(plan, graders=(judge_file(plan, url=url, verdict="yes_no"),))
        with monkeypatch.context() as patched:
            patched.setattr(Shards, "write_grades", write_one)
            with pytest.raises(Killed):
                quietly(plan)
        assert len(bodies) == 5  # two shards of two rows, and the one to try it
        report = quietly(plan)
        assert (report.ungraded, len(bodies)) == ({plan.graders[0]: 1}, 8)
        broken.clear()
        assert quietly(plan).ungraded == {}
        assert len(bodies) == 10  # the trial and the row that failed
        before = (Path(plan.output_dir) / "grades.jsonl").read_bytes()
        again = replace(plan, output_dir=f"{plan.output_dir}-undisturbed")
        assert quietly(again).grades == {plan.graders[0]: pytest.approx(1 / ROWS)}
    assert (Path(again.output_dir) / "grades.jsonl").read_bytes() == before
    changed = []
    (paired,) = paired_scores(Path(plan.output_dir), Path(again.output_dir), on_changed=changed.append)
    assert (paired.difference, changed) == (0.0, [])


def test_a_model_in_this_process_judges_too(plan, tmp_path):
    template = tmp_path / "ask.txt"
    template.write_text("{answer}?")
    name = judge_file(plan, max_new_tokens=4, template=template)
    report = quietly(replace(plan, graders=(name,)))
    assert report.ungraded == {name: ROWS}
    assert f"{name} –: mean points" in text_of(report)
    assert "graded no row" in write_score_page(Path(plan.output_dir)).read_text()
    assert "cut off at 4 tokens" in graded(plan)[0]["errors"][name]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"verdict": "stars"}, "judge.yaml: verdict = 'stars': must be 'points', 'yes_no' or 'prefer'"),
        ({"verdit": "points"}, "unknown key 'verdit'"),
        ({"verdict": "prefer"}, "verdict prefer with against ''"),
        ({"engine": "server"}, "judge.yaml': engine server needs --url"),
        ({"template": "/no/such"}, "template /no/such cannot be read"),
        ({"model": "''"}, "model is missing"),
    ],
)
def test_a_judge_that_is_not_described_well_is_refused(plan, keys, named):
    with pytest.raises(RecipeError, match=named):
        quietly(replace(plan, graders=(judge_file(plan, **keys),)))


def test_the_key_of_a_judge_follows_from_template_sampling_and_model(plan, tmp_path):
    template = tmp_path / "ask.txt"
    template.write_text("Is {answer} right?")

    def key(**change):
        (grader,) = open_graders((judge_file(plan, **change),))
        return grader.key

    changes = {"temperature": 0.5}, {"template": template}, {"verdict": "yes_no"}, {"chat_template": "chatml"}
    keys = {key(), *(key(**change) for change in changes)}
    template.write_text("Is {answer} good?")
    assert len({*keys, key(template=template)}) == 6
    for text, fault in (("Is {anser} good?", "{anser} is not known"), ("Is it good?", "{answer} is missing")):
        template.write_text(text)
        with pytest.raises(RecipeError, match=fault):
            key(template=template)
