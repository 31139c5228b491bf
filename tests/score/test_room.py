"""Rows answered together: what is said, else as many as fit, at most 32."""

from dataclasses import replace

import pytest

from fitune.estimate.answering import memory_of_answering
from fitune.score.engines import opening
from fitune.score.engines.engine import Continuation, Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.opening import room_for
from fitune.score.plan import ScorePlan
from fitune.values.answering import Answering, Questions, answering_precision
from fitune.values.model.model_config import load_model_spec
from plans import gpu

LONG = Questions(rows=1_000, prompt_tokens=3_000_000, longest_prompt=3_000, new_tokens=256)


@pytest.fixture
def small_card(monkeypatch):
    hardware = gpu("rtx-4090")
    monkeypatch.setattr(opening, "resolve_hardware", lambda *, gpus: hardware)
    return hardware


def plan(batch_size=0):
    return ScorePlan(model="llama-3.1-8b", output_dir="", batch_size=batch_size)


def test_as_many_rows_as_fit_and_not_one_more(small_card):
    rows = room_for(plan())(LONG)
    asked = Answering(
        engine="transformers", model=load_model_spec("llama-3.1-8b"), hardware=small_card,
        precision=answering_precision(small_card), batch_size=rows,
    )  # fmt: skip
    assert 1 < rows < 32
    assert memory_of_answering(asked, LONG).fits
    assert not memory_of_answering(replace(asked, batch_size=rows + 1), LONG).fits


def test_at_most_32_and_at_least_one(small_card):
    assert room_for(plan())(replace(LONG, longest_prompt=100)) == 32
    assert room_for(plan())(replace(LONG, longest_prompt=10**6)) == 1


def test_a_number_that_is_said_is_taken(small_card):
    assert plan(400).rows_at_once == 400
    assert room_for(plan(400))(replace(LONG, longest_prompt=10**6)) >= 400


def test_a_model_that_no_plan_knows_is_asked_by_32(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    assert room_for(ScorePlan(model=str(tmp_path), output_dir=""))(LONG) == 32


def test_the_engine_takes_no_more_than_fit_together(tiny):
    """It asks by rows and lengths: of prompts with the tokens of an answer, of given texts without."""
    asked = []
    rows = []

    def room(questions):
        asked.append(questions)
        return 3

    class Watched:
        def __init__(self, moment, alive):
            rows.append(moment.rows)

        def __enter__(self): ...

        def __exit__(self, *error): ...

    engine = TransformersEngine(
        model=tiny.model, tokenizer=tiny.tokenizer, template=tiny.template, room=room, watch=Watched
    )  # fmt: skip
    requests = [
        Request(id=str(place), prompt_ids=(5,) * (3 + place), sampling=Sampling(max_new_tokens=4))
        for place in range(8)
    ]
    assert len(list(engine.answer(requests))) == 8
    list(engine.loglikelihoods([Continuation(id="0", prompt_ids=(5, 6), token_ids=(7, 8, 9))]))
    assert max(rows) == 3
    assert asked == [
        Questions(rows=8, prompt_tokens=52, longest_prompt=10, new_tokens=4),
        Questions(rows=1, prompt_tokens=4, longest_prompt=4, new_tokens=1),
    ]
