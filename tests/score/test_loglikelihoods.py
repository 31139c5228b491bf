"""Log-likelihoods of given answers are of training's ids, behind prompts that count nowhere."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fitune.data.conversations.messages import Conversation, Message
from fitune.data.reading.rows import BadRow, Row
from fitune.errors import RecipeError
from fitune.measure.memory import LiveTensors
from fitune.score.engines.engine import Continuation, sorted_out
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.grades.graders import GRADERS
from fitune.score.grades.intervals import paired_scores
from fitune.score.plan import ScorePlan
from fitune.score.questions import has_choices, read_choices
from fitune.score.run import score
from fitune.session.results import text_of
from fitune.values.plan import DataSource
from fitune.values.predictions import Phase
from jsonl import read_lines, write_lines
from score.scorings import quietly

QUESTIONS = ("Which city?", "What colour is the lamp?", "How many?")
CHOICES = (["Oslo", "a town by the sea", "no"], ["red", "green, I think"], ["1", "12", "two", "none at all"])
RIGHT = (1, 0, 3)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"question": "q", "choices": ["x", "y", "z"], "answer": 2}, 2),
        ({"question": "q", "choices": ["x", "y", "z"], "answer": "b"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, 1),
        ({"question": "q", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"}, 1),
        ({"question_stem": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "1"}, 0),
        ({"ctx": "q", "endings": ["x", "y", "z", "w"], "label": "3"}, 3),
        ({"question": "q", "options": {"A": "x", "B": "y"}, "answer_idx": "B", "answer": "y"}, 1),
        ({"goal": "q", "sol1": "x", "sol2": "y", "label": 1}, 1),
    ],
)  # fmt: skip
def test_choices_are_read_as_people_write_them(fields, right):
    question, system, choices, found = read_choices(Row("f:1", fields), columns=())
    assert (question, system, found) == ("q", "", right)
    assert choices in (("x", "y"), ("x", "y", "z"), ("x", "y", "z", "w"))


@pytest.mark.parametrize(
    ("answer", "choices", "named"),
    [
        (3, ["x", "y"], "answer = 3 names no choice"),
        (True, ["x", "y"], "answer = True names no choice"),
        ("1", ["1", "2"], "answer = '1' may be one choice or another"),
        (0, ["x"], "1 choices, there must be 2 to 26"),
        (0, ["x", ""], "is not a list of texts"),
    ],
)
def test_a_row_that_does_not_say_which_is_right_is_refused(answer, choices, named):
    with pytest.raises(BadRow, match=named):
        read_choices(Row("f:1", {"question": "q", "choices": choices, "answer": answer}), columns=())


def test_a_column_mapping_names_the_choices_and_other_rows_have_none():
    columns = (("prompt", "frage"), ("choices", "wahl"), ("completion", "nummer"))
    found = read_choices(Row("f:1", {"frage": "q", "wahl": ["x", "y"], "nummer": 1}), columns)
    assert found == ("q", "", ("x", "y"), 1)
    assert not has_choices(Row("f:1", {"question": "q", "answer": "#### 3"}), columns=())


def write_rows(path, rows):
    return DataSource(path=str(write_lines(path, rows)))


@pytest.fixture
def plan(tiny, tmp_path):
    rows = [
        {"question": q, "choices": c, "answer": a}
        for q, c, a in zip(QUESTIONS * 4, CHOICES * 4, RIGHT * 4, strict=True)
    ]
    return ScorePlan(
        model=str(tiny.folder), sources=(write_rows(tmp_path / "rows.jsonl", rows),), output_dir=str(tmp_path / "out"),
        graders=("choice", "choice_norm", "choice_norm_tokens", "perplexity", "byte_perplexity", "loglikelihood"),
        batch_size=2, shard_rows=5,
    )  # fmt: skip


def lines(plan, name="answers.jsonl"):
    return read_lines(Path(plan.output_dir) / name)


@torch.no_grad()
def by_hand(tiny, question, answer):
    """Log-probabilities of the answer's tokens in training's own ids, and how many of them end it."""
    row = tiny.template.encode(
        Conversation((Message("user", question), Message("assistant", answer)), "here")
    )
    start = row.supervised.index(True)
    logits = tiny.model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
    end = sum(id_ in tiny.template.stop_ids for id_ in row.ids[start:])
    return [float(logits[at - 1, row.ids[at]]) for at in range(start, len(row.ids))], end


def test_grades_follow_from_the_softmax_of_trainings_own_ids(tiny, plan):
    report = quietly(plan)
    grades = lines(plan, "grades.jsonl")
    nats = tokens = size = 0.0
    for place, (line, graded) in enumerate(zip(lines(plan), grades, strict=True)):
        question, texts, right = QUESTIONS[place % 3], CHOICES[place % 3], RIGHT[place % 3]
        texts_alone = [by_hand(tiny, question, text) for text in texts]
        sums = [sum(logprobs[: len(logprobs) - end]) for logprobs, end in texts_alone]
        counts = [len(logprobs) - end for logprobs, end in texts_alone]
        body = line["response"]["body"]
        assert [choice["logprob"] for choice in body["choices"]] == pytest.approx(sums, abs=1e-4)
        assert [choice["tokens"] for choice in body["choices"]] == counts
        assert body["usage"]["weighed_tokens"] == sum(len(logprobs) for logprobs, _ in texts_alone)
        per_character = [total / len(text) for total, text in zip(sums, texts, strict=True)]
        per_token = [total / count for total, count in zip(sums, counts, strict=True)]
        wanted = {"choice": sums, "choice_norm": per_character, "choice_norm_tokens": per_token}
        for name, scores in wanted.items():
            assert graded["grades"][name] == float(scores.index(max(scores)) == right)
        nats -= sum(texts_alone[right][0])
        tokens += len(texts_alone[right][0])
        size += len(texts[right].encode())
    assert report.grades["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert report.grades["byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-4)
    assert report.grades["loglikelihood"] == pytest.approx(-nats / 12, rel=1e-4)
    low, high = report.intervals["perplexity"]
    assert low < report.grades["perplexity"] < high
    assert (report.generated_tokens, report.cut_off, report.answered) == (0, 0, 12)
    assert "tokens of given answers, none generated" in text_of(report)


def test_the_normalised_choices_differ_where_lengths_do():
    """-4 over 2 characters and 1 token; -6 over 12 characters and 2 tokens; -5 over 4 characters and 4 tokens."""
    choices = [
        {"text": "ab", "logprob": -4.0, "end_logprob": -1.0, "tokens": 1, "end_tokens": 1},
        {"text": "abcdefghijkl", "logprob": -6.0, "end_logprob": -1.0, "tokens": 2, "end_tokens": 1},
        {"text": "äöüß", "logprob": -5.0, "end_logprob": -1.0, "tokens": 4, "end_tokens": 1},
    ]
    graders = [GRADERS[name].grade_likelihoods for name in ("choice", "choice_norm", "choice_norm_tokens")]
    bodies = [{"choices": choices, "right": right} for right in range(3)]
    assert [grader(body)["grade"] for grader in graders for body in bodies] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert GRADERS["perplexity"].grade_likelihoods(bodies[2])["grade"] == pytest.approx(math.exp(6 / 5))
    assert GRADERS["byte_perplexity"].grade_likelihoods(bodies[2])["grade"] == pytest.approx(math.exp(6 / 8))


def test_graders_follow_from_rows_with_choices_and_references_alone_have_a_perplexity(plan, tmp_path):
    told = []
    report = score(replace(plan, graders=()), say=told.append)
    assert list(report.grades) == ["choice", "choice_norm"]
    assert "the first row has choices" in told[0]
    rows = [{"text": "item: lamp | city: Oslo"}, {"text": "item: lamp"}, {"text": "item " * 300}]
    texts = write_rows(tmp_path / "texts.jsonl", rows)
    report = quietly(
        replace(plan, sources=(texts,), graders=("perplexity",), output_dir=str(tmp_path / "texts"))
    )
    assert (report.answered, report.failed, report.ungraded) == (2, 1, {"perplexity": 1})
    (paired,) = paired_scores(tmp_path / "texts", tmp_path / "texts", scales=report.scales)
    assert (paired.rows, paired.difference, paired.scale) == (2, 0.0, "perplexity")
    assert (paired.better, paired.worse) == (0, 0)
    assert paired.mean == pytest.approx(report.grades["perplexity"])


def test_what_does_not_go_together_is_refused_before_anything_is_computed(plan, tmp_path):
    with pytest.raises(RecipeError, match="choice: log-likelihoods of given answers; number: answers that"):
        quietly(replace(plan, graders=("choice", "number")))
    data = write_rows(tmp_path / "plain.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(RecipeError, match="choice: 1 row of .* without choices"):
        quietly(replace(plan, sources=(data,), graders=("choice",)))


@pytest.mark.parametrize(("rows", "tokens", "prompts"), [(2, 1_000, 1), (120, 20, 120)])
def test_logits_exist_for_some_tokens_at_a_time(tiny, rows, tokens, prompts):
    """2,000 or 2,400 tokens, 30,000 words: whole logits would take 229 MiB, a chunk of 256 tokens takes 29 MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=30_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=2_048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    engine = TransformersEngine(model=model, tokenizer=tiny.tokenizer, template=tiny.template, batch_size=64)
    asked = [
        Continuation(id=str(n), prompt_ids=(1 + n % prompts,), token_ids=(7,) * (tokens + n % 2))
        for n in range(rows)
    ]
    with LiveTensors(model.parameters()) as live:
        live.enter(Phase.FORWARD)
        assert len(list(engine.loglikelihoods(asked))) == rows
        peak = max(live.peaks.values())
    chunk = 256 * 30_000 * 4
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert weights < peak < weights + 4 * chunk < weights + rows * tokens * 30_000 * 4


@pytest.mark.parametrize(("engine", "longest"), [("transformers", 6), ("vllm", 4)])
def test_the_embedded_engine_has_room_for_the_token_that_it_does_not_read(engine, longest):
    asked = [Continuation(id=str(n), prompt_ids=(1,) * 5, token_ids=(2,) * n) for n in range(1, 9)]
    asked.append(Continuation(id="none", prompt_ids=(), token_ids=(2,)))
    fitting, refused, _ = sorted_out(asked, context=10, engine=engine)
    assert [len(one.token_ids) for one in fitting] == list(range(1, longest + 1))
    assert [one.code for one in refused] == ["prompt_too_long"] * (8 - longest) + ["empty_prompt"]
    assert " = 11 tokens" in refused[0].error
    assert sorted_out(asked[:8], context=0, engine=engine) == (asked[:8], [], 2)
