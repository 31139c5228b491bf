"""Scoring from start to end: what is asked, what is written, what is an error."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.errors import DataError, FituneError, RecipeError, RunDirectoryError
from fitune.recipe.score_recipe import score_recipe
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.opening import rows_of_a_shard
from fitune.score.run import score
from fitune.session.results import text_of
from fitune.session.score.scoring import score_dataset, why_not_all
from fitune.units import counted
from fitune.values.plan import DataSource
from fitune.values.reports import ScoreReport
from fitune.values.serial import from_json
from jsonl import read_lines, write_lines
from score.scorings import ROWS, answers, quietly, write_data


def test_answers_are_openai_batch_lines_in_the_order_of_the_data(plan):
    quietly(replace(plan, batch_size=3))
    written = read_lines(answers(plan))
    assert [line["custom_id"] for line in written] == [f"train-{number:04d}" for number in range(1, ROWS + 1)]
    for line in written:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body = line["response"]["body"]
        assert (body["object"], body["model"]) == ("chat.completion", plan.model)
        (choice,) = body["choices"]
        assert (choice["index"], choice["message"]["role"]) == (0, "assistant")
        assert choice["finish_reason"] in ("stop", "length")
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 1 <= usage["completion_tokens"] == len(choice["token_ids"]) <= 8


def test_the_report_is_the_mean_of_the_grades(plan):
    said, tokens = [], []
    report = score(plan, say=said.append, on_tokens=tokens.append)
    assert said == ["graders: exact_match, contains (no reference is longer than 11 words)"]
    graded = read_lines(Path(plan.output_dir) / "grades.jsonl")
    lines = read_lines(answers(plan))
    assert [row["id"] for row in graded] == [line["custom_id"] for line in lines]
    for name, mean in report.grades.items():
        assert mean == pytest.approx(sum(row["grades"][name] for row in graded) / ROWS)
    assert (report.rows, report.answered, report.failed) == (ROWS, ROWS, 0)
    bodies = [line["response"]["body"] for line in lines]
    assert report.prompt_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert (
        report.generated_tokens == sum(body["usage"]["completion_tokens"] for body in bodies) == sum(tokens)
    )
    ends = [body["choices"][0]["finish_reason"] for body in bodies]
    assert report.cut_off == ends.count("length") > 0
    assert f"cut off at max_new_tokens: {counted(report.cut_off, 'answer')} (" in text_of(report)
    assert from_json(ScoreReport, (Path(plan.output_dir) / "report.json").read_text()) == report


def test_right_answers_score_one_and_wrong_ones_nothing(finished, tmp_path):
    lines = read_lines(answers(finished))
    said = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    rows = read_lines(Path(finished.sources[0].path))
    for row, text in zip(rows, said, strict=True):
        row["completion"] = text if text.strip() else "blank"
    spoken = [place for place, text in enumerate(said) if text.strip()]
    rows[spoken[0]]["completion"] += " and more"
    share = (len(spoken) - 1) / ROWS
    path = write_lines(tmp_path / "right.jsonl", rows)
    again = replace(finished, sources=(DataSource(path=str(path)),), output_dir=str(tmp_path / "again"))
    report = quietly(replace(again, graders=("exact_match", "contains")))
    assert report.grades["exact_match"] == pytest.approx(share) == report.grades["contains"]
    assert 0.3 < share < 1


def test_a_mistake_before_the_first_answer_does_not_claim_the_directory(plan):
    with pytest.raises(FituneError):
        quietly(replace(plan, adapter="not/there"))
    assert quietly(plan).answered == ROWS


def test_rows_that_cannot_be_asked_carry_an_error_and_the_others_an_answer(plan):
    good = {"prompt": "Where?", "completion": "Oslo"}
    rows = [good, good | {"prompt": ""}, good | {"prompt": "half \ud800"}, good]
    write_lines(Path(plan.sources[0].path), rows)
    report = quietly(plan)
    assert (report.answered, report.failed) == (2, 2)
    written = [line["error"] and line["error"]["message"] for line in read_lines(answers(plan))]
    assert written[0] is None is written[3]
    assert "rows.jsonl:2: field 'prompt' is empty" in written[1]
    assert "unpaired surrogate (U+D800" in written[2]


def test_data_of_which_no_row_can_be_asked_is_refused_and_claims_no_directory(plan):
    (source,) = plan.sources
    named = replace(source, columns=(("prompt", "nope"), ("completion", "completion")))
    with pytest.raises(DataError, match="none of 20 rows can be asked; the first: .*field 'nope' is missing"):
        quietly(replace(plan, sources=(named,)))
    assert not Path(plan.output_dir).exists()
    Path(source.path).write_text('{"prompt": "a", "completion": ')
    with pytest.raises(DataError, match="ends in the middle of a row") as caught:
        quietly(plan)
    assert "on_bad_row" not in f"{caught.value}", "a scoring has no such key"


def test_lines_of_openais_batch_input_are_answered_with_their_own_sampling(plan):
    def line(number, **body):
        messages = [{"role": "user", "content": "Where?"}]
        return {
            "custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "any", "messages": messages, **body},
        }  # fmt: skip

    faults = (
        ({"max_tokens": 10**9}, "max_new_tokens = 1000000000: must be at most 1000000"),
        ({"logit_bias": {"1": 2}}, "body.logit_bias is not supported"),
        ({"n": 5}, "body.n = 5: each line gets one whole answer"),
        ({"stream": True}, "body.stream = True: each line gets one whole answer"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "nothing is asked",
        ),
    )
    rows = [line(1), line(2, max_tokens=3, n=1, stream=False, store=True, stop=None)]
    rows += [line(place, **own) for place, (own, _) in enumerate(faults, 3)]
    write_lines(Path(plan.sources[0].path), rows)
    report = quietly(plan)
    assert (report.answered, report.failed, report.grades) == (2, 5, {})
    assert text_of(report).startswith("2 of 7 rows answered, 5 failed")
    found = read_lines(answers(plan))
    assert [row["custom_id"] for row in found] == [f"r-{number}" for number in range(1, 8)]
    tokens = [row["response"]["body"]["choices"][0]["token_ids"] for row in found[:2]]
    assert tokens[1] == tokens[0][:3]
    for row, (_, words) in zip(found[2:], faults, strict=True):
        assert words in row["error"]["message"]


def test_the_parquet_file_holds_what_the_lines_say(finished):
    import pyarrow.parquet as pq

    rows = pq.read_table(Path(finished.output_dir) / "answers.parquet").to_pylist()
    for row, line in zip(rows, read_lines(answers(finished)), strict=True):
        choice = line["response"]["body"]["choices"][0]
        assert (row["custom_id"], row["answer"]) == (line["custom_id"], choice["message"]["content"])
        assert (row["logprob"], row["error"]) == (choice["logprob"], None)
    given = [json.loads(line)["grades"] for line in (Path(finished.output_dir) / "grades.jsonl").open()]
    assert [{name: row[f"grade_{name}"] for name in ("exact_match", "contains")} for row in rows] == given


def test_a_prompt_that_is_too_long_fails_alone(plan):
    write_data(Path(plan.sources[0].path), changed="very " * 300 + "long")
    report = quietly(plan)
    assert (report.answered, report.failed) == (ROWS - 1, 1)
    line = read_lines(answers(plan))[3]
    assert line["response"] is None
    assert line["error"]["code"] == "prompt_too_long"
    assert "the model has room for 192" in line["error"]["message"]
    failed = why_not_all(report, Path(plan.output_dir))
    assert f"the first is train-0004: {line['error']['message']}" in str(failed)
    before = answers(plan).read_bytes()
    assert quietly(plan).failed == 1
    assert answers(plan).read_bytes() == before


def test_a_grader_that_fails_for_every_row_is_an_error_of_the_scoring(finished, tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text("def half(*, answer, expected, prompt): return 1 / 0")
    report = quietly(replace(finished, graders=(f"python:{rules}:half",)))
    assert report.answered == ROWS
    failed = why_not_all(report, Path(finished.output_dir))
    assert failed is not None
    assert failed.exit_code == 1
    assert "failed for every row" in failed.message
    assert failed.message.endswith("the first is train-0001: ZeroDivisionError: division by zero")
    one_fails = replace(report, grader_errors={name: 1 for name in report.grader_errors})
    assert why_not_all(one_fails, Path(finished.output_dir)) is None


def test_bad_ids_and_bad_graders_stop_everything_before_the_weights_are_read(plan, tiny):
    rows = [{"id": "a", "prompt": "p", "completion": "c"}] * 2
    write_lines(Path(plan.sources[0].path), rows)
    weights = tiny.folder / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        with pytest.raises(DataError, match="repeat an id"):
            quietly(plan)
        with pytest.raises(RecipeError, match="meteor"):
            quietly(replace(plan, graders=("meteor",)))
    finally:
        hidden.rename(weights)
    assert not Path(plan.output_dir).exists()


def test_an_engine_is_told_the_rows_of_the_next_shard_before_this_one_is_answered(plan, monkeypatch):
    """Not those that cannot be asked; and data that grew goes on in shards of its own."""
    told = []
    answer = TransformersEngine.answer

    def answered(engine, requests, ahead):
        told.extend(f"next {request.id}" for request in ahead)
        for completion in answer(engine, requests):
            told.append(completion.id)
            yield completion

    monkeypatch.setattr(TransformersEngine, "answer", answered)
    path = Path(plan.sources[0].path)
    rows = read_lines(path)
    first = [*rows[:11], {"id": "bad", "prompt": "", "completion": "1"}]
    write_lines(path, first)
    quietly(plan)
    ids = [row["id"] for row in rows]
    assert told[:3] == [f"next {id_}" for id_ in ids[8:11]]
    assert sorted(one for one in told if not one.startswith("next")) == ids[:11]
    del told[:]
    write_lines(path, [*first, *rows[11:14]])
    quietly(plan)
    assert sorted(told) == ids[11:14]


@pytest.mark.parametrize(
    ("engine", "dtype", "rows"),
    [("transformers", "", 64), ("vllm", "torch.float32", 64), ("vllm", "torch.bfloat16", 2048)],
)
def test_shards_are_as_large_as_suits_the_engine(plan, engine, dtype, rows):
    assert rows_of_a_shard(replace(plan, engine=engine, dtype=dtype, batch_size=4)) == rows


def test_a_score_to_compare_with_is_looked_at_before_the_first_row(plan, tmp_path):
    asked = score_recipe(model=plan.model, data=plan.sources[0].path, out=tmp_path / "a")
    for against, error, said in (
        ("nope", RunDirectoryError, "nope: has no grades that can be read"),
        ("b/../a", RecipeError, "is --out itself"),
    ):
        with pytest.raises(error, match=said):
            score_dataset(asked, emit=lambda event: None, against=f"{tmp_path}/{against}")
    assert not (tmp_path / "a").exists()
