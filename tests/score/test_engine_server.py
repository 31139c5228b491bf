"""A server is asked by token ids; what it spoils is tried again a bounded number of times, and no row hangs."""

import json
import threading
import time

import pytest

from fitune.errors import RecipeError, ScoringFailed
from fitune.score.engines.engine import Completion, Continuation, EngineDied, Request, Sampling
from fitune.score.engines.engine_server import ServerEngine, require_url
from fitune.score.plan import ScorePlan
from fitune.score.questions import Input, Question
from fitune.score.tasks import Task, to_answer, to_tasks
from fitune.values.plan import DataSource
from jsonl import write_lines
from score.scorings import quietly
from servers import said, serving


def engine_at(url, **more):
    return ServerEngine(
        url=url, model="m", to_text=lambda ids: " ".join(map(str, ids)), stop_ids=frozenset({2}),
        **{"pause_s": 0.01, "timeout_s": 60.0, **more},
    )  # fmt: skip


def ask(engine, *prompts, **sampling):
    requests = [
        Request(id=str(place), prompt_ids=prompt, sampling=Sampling(max_new_tokens=4, **sampling))
        for place, prompt in enumerate(prompts)
    ]
    found = list(engine.answer(requests))
    assert len(found) == len(requests)
    return {completion.id: completion for completion in found}


def test_prompts_go_as_ids_and_tokens_come_back_with_their_logprobs():
    tokens = {"token_ids": [7, 8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]}}
    with serving(lambda body, before: said("hello", **tokens)) as (url, bodies):
        found = ask(engine_at(url), (5, 6), (9,), temperature=0.5)
    assert found["0"].token_ids == (7, 8, 2)
    assert (found["0"].logprobs, found["0"].finish_reason) == ((-0.5, -0.25, -1.0), "stop")
    assert sorted(body["prompt"] for body in bodies) == [[5, 6], [9]]
    assert {(body["max_tokens"], body["temperature"], tuple(body["stop_token_ids"])) for body in bodies} == {
        (4, 0.5, (2,))
    }
    assert len({body["seed"] for body in bodies}) == 2, "each row has a seed of its own"


def test_a_server_without_ids_gets_the_text_and_nothing_it_refuses():
    def reply(body, before):
        if "stop_token_ids" in body:
            return 400, b'{"error": "Unknown field stop_token_ids"}', {}
        if not isinstance(body["prompt"], str):
            return 422, b'{"error": "prompt: expected a string"}', {}
        return said(body["prompt"])

    with serving(reply) as (url, bodies):
        found = ask(engine_at(url, batch_size=1), (5, 6), (7, 8))
    assert [found[key].text for key in "01"] == ["5 6", "7 8"]
    assert len(bodies) == 4, "what was refused once is not sent again"


def test_requests_that_are_refused_together_are_all_sent_again_as_text():
    all_are_there = threading.Barrier(3)

    def reply(body, before):
        if isinstance(body["prompt"], str):
            return said(body["prompt"])
        all_are_there.wait(60)
        return 400, b'{"detail": "prompt must be a string."}', {}

    with serving(reply) as (url, bodies):
        found = ask(engine_at(url, batch_size=3), (5,), (6,), (7,))
    assert [found[key].text for key in "012"] == ["5", "6", "7"]
    assert len(bodies) == 6


@pytest.mark.parametrize(
    "spoilt",
    [(429, b"slow down", {"Retry-After": "0"}), (200, b"<html>garbage", {}), (200, b'{"choices": []}', {}),
     (200, b'{"choices": [{"text": 5, "finish_reason": "stop"}]}', {})],
    ids=["429", "garbage", "no choices", "no text"],
)  # fmt: skip
def test_what_is_spoilt_is_tried_again_and_a_row_that_always_fails_fails_alone(spoilt):
    def reply(body, before):
        return spoilt if body["prompt"] == [6] or before < 2 else said("well")

    with serving(reply) as (url, bodies):
        found = ask(engine_at(url, tries=3), (5,), (6,))
    assert (found["0"].text, found["1"].code) == ("well", "server_failed")
    assert found["1"].error.endswith(", 3 times")
    assert len(bodies) == 6


@pytest.mark.parametrize(
    "beside",
    [
        {"logprobs": [{"token": "a", "logprob": -1.0}]}, {"logprobs": {"token_logprobs": 3}},
        {"logprobs": {"token_logprobs": [10**400]}}, {"logprobs": {"token_logprobs": [1e29]}},
        {"token_ids": [-1]}, {"token_ids": [True]}, {"token_ids": [999, 5]}, {"token_ids": [5] * 6},
    ],
)  # fmt: skip
def test_what_stands_beside_a_text_and_is_of_another_shape_is_left_out(beside):
    """Too many ids or ids of no token, too: decoded, they would replace the text that the server answered."""
    with serving(lambda body, before: said("well", **beside)) as (url, _):
        found = ask(engine_at(url, vocabulary=100), (5,))["0"]
        (likelihood,) = engine_at(url).loglikelihoods([Continuation(id="a", prompt_ids=(5,), token_ids=(7,))])
    assert (found.text, found.token_ids, found.logprobs) == ("well", (), ())
    assert likelihood.error.startswith("the server does not tell log-probabilities of the prompt; vLLM's")


def test_a_server_that_never_answers_is_not_waited_for():
    is_given_up = threading.Event()

    def reply(body, before):
        is_given_up.wait(60)
        return said("late")

    with serving(reply) as (url, _):
        found = ask(engine_at(url, tries=1, timeout_s=0.5), (5,))
        is_given_up.set()
    assert (found["0"].code, "timed out" in found["0"].error) == ("server_failed", True)


def test_nobody_listening_is_an_error_of_each_row():
    with serving(lambda body, before: said("")) as (url, _):
        pass
    found = ask(engine_at(url, tries=2), (5,))
    assert (found["0"].code, "refused" in found["0"].error) == ("server_failed", True)


@pytest.mark.parametrize(
    ("reply", "most"),
    [
        ((500, b"oops", {}), 4),  # two that fail, and what each thread had begun meanwhile
        ((400, b"no extra fields, and no model m", {}), 8),  # each with vLLM's fields first, and without
    ],
)
def test_a_server_that_never_answered_is_not_asked_for_every_row(reply, most):
    with (
        serving(lambda body, before: reply) as (url, bodies),
        pytest.raises(EngineDied, match=f"answered {reply[0]} .*{reply[1].decode()}") as died,
    ):
        ask(engine_at(url, tries=1 + (reply[0] == 400), batch_size=2), *((n,) for n in range(1, 40)))
    assert "check that the server runs" in died.value.hint
    assert len(bodies) <= most


@pytest.mark.parametrize(("usage", "tokens"), [({"completion_tokens": 3}, 3), ({"completion_tokens": -1}, 0)])
def test_tokens_are_those_that_the_server_counted_where_it_tells_no_ids(usage, tokens):
    answered = json.dumps({"choices": [{"text": "well", "finish_reason": "stop"}], "usage": usage})
    with serving(lambda body, before: (200, answered.encode(), {})) as (url, _):
        found = ask(engine_at(url), (5,))["0"]
    assert (found.text, found.tokens) == ("well", tokens)


def test_likelihoods_that_nobody_takes_any_more_are_not_asked_for():
    logprobs = {"token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0}]}
    asked = [Continuation(id=str(id_), prompt_ids=(5,), token_ids=(7,)) for id_ in range(40)]

    def reply(body, before):
        threading.Event().wait(0.1)  # some work: the rest cannot all be done before it is given up
        return said("", logprobs=logprobs)

    with serving(reply) as (url, bodies):
        found = engine_at(url, batch_size=2).loglikelihoods(asked)
        assert not next(found).error
        found.close()
    assert len(bodies) < len(asked)


def test_a_redirection_is_not_followed_and_the_key_stays_here():
    with serving(lambda body, before: said("elsewhere")) as (other, bodies):
        moved = {"Location": f"{other}/completions"}
        with (
            serving(lambda body, before: (302, b"", moved)) as (url, _),
            pytest.raises(EngineDied, match="answered 302"),
        ):
            ask(engine_at(url, key="secret"), (5,), (6,))
    assert not bodies


def test_a_prompt_that_the_server_finds_too_long_is_an_error_of_its_row():
    words = b"This model's maximum context length is 8 tokens"
    refusing = serving(lambda body, before: (400, words, {}) if len(body["prompt"]) > 3 else said("ok"))
    with refusing as (url, _):
        found = ask(engine_at(url), (1, 2, 3, 4), (5,), ())
    assert [found[key].code for key in "012"] == ["prompt_too_long", "", "empty_prompt"]


def test_likelihoods_are_those_the_server_tells_of_the_prompt():
    def reply(body, before):
        told = {
            "token_logprobs": [None, -3.0, -0.5, -0.75, -9.0],
            "top_logprobs": [None, {"a": -1}, {"b": -0.5}, {"c": -0.75}],
        }
        return said("", logprobs=told if body.get("echo") else None)

    with serving(reply) as (url, _):
        (found,) = engine_at(url).loglikelihoods([Continuation(id="a", prompt_ids=(5, 6), token_ids=(7, 8))])
    assert (found.logprobs, found.is_greedy, found.error) == ((-0.5, -0.75), True, "")


def test_a_pause_that_the_server_asks_for_is_said_once(monkeypatch, caplog):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def reply(body, before):
        return said("well") if before else (429, b"slow down", {"Retry-After": "300"})

    with serving(reply) as (url, _):
        ask(engine_at(url, batch_size=1), (5,), (6,))
    assert slept == [60.0, 60.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"{url} asks for a pause of 300 s: the next try is in 60 s"
    ]


def test_an_answer_of_which_no_tokens_are_known_has_no_likelihood(tiny):
    task = Task(question=Question(id="a", where=""), prompt_ids=(5,))
    completions = (
        Completion(id="a", token_ids=(5,), logprobs=(-0.5,), tokens=1), Completion(id="a", text="well"),
    )  # fmt: skip
    answers = [to_answer(task, one, tiny.template.decode, frozenset()) for one in completions]
    assert [answer.logprob for answer in answers] == [-0.5, None]


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_key_that_the_server_sends_back_is_in_no_answer_and_no_error(status):
    key = "my-own-secret-key-of-the-server"
    reply = (status, f'{{"error": "Authorization: Bearer {key}"}}'.encode(), {})
    if status == 200:
        reply = said(f"You sent {key}.")
    with serving(lambda body, before: reply) as (url, _):
        engine, shown = engine_at(url, key=key, tries=2), ""
        given = [Continuation(id="a", prompt_ids=(5,), token_ids=(7,))]
        for question in (lambda: ask(engine, (5,)), lambda: list(engine.loglikelihoods(given))):
            try:
                shown += str(question())
            except EngineDied as death:
                shown += str(death)
    assert key not in shown
    assert "[hidden]" in shown


def test_an_address_with_credentials_is_refused_without_them():
    url = "http://user:password@host/v1"
    with pytest.raises(RecipeError, match="url holds .*saved with the answers") as caught:
        require_url(url)
    assert url not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", "http://host:port/v1"])
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(RecipeError, match="no address of a server"):
        require_url(url)


def plan_through(url, tiny, data, folder, **words):
    return ScorePlan(
        model=str(tiny.folder), sources=(data,), output_dir=str(folder / "out"), engine="server", url=url, **words
    )  # fmt: skip


def test_a_scoring_through_a_server_asks_again_for_the_rows_it_refused(tiny, tmp_path):
    """Prompts are training's ids; the second run asks for the failed row alone."""
    rows = [{"id": f"r{n}", "prompt": f"question {n}", "completion": f"{n}"} for n in range(4)]
    data = DataSource(path=str(write_lines(tmp_path / "rows.jsonl", rows)))
    questions = list(Input(sources=(data,)).questions())
    tasks = to_tasks(questions, template=tiny.template, sampling=Sampling())
    prompts = [list(task.prompt_ids) for task in tasks]
    is_healthy = False

    def reply(body, before):
        if body["prompt"] == prompts[2] and not is_healthy:
            return 400, b"not this one", {}
        return said(str(prompts.index(body["prompt"])))

    with serving(reply) as (url, bodies):
        plan = plan_through(url, tiny, data, tmp_path, served_model="m")
        first = quietly(plan)
        asked, is_healthy = len(bodies), True
        second = quietly(plan)
    assert (first.answered, first.failed, first.grades) == (3, 1, {"number": 0.75})
    assert (second.answered, second.failed, second.grades) == (4, 0, {"number": 1.0})
    assert (asked, len(bodies), bodies[-1]["prompt"]) == (4, 5, prompts[2])


@pytest.mark.parametrize(
    ("reply", "graders", "together", "words"),
    [
        ((401, b"no such key", {}), ("contains",), 32, "answered 401 Unauthorized: no such key"),
        (said("x"), ("choice", "perplexity"), 1, "the server does not tell log-probabilities of the prompt"),
    ],
)
def test_a_server_of_which_no_row_can_be_asked_ends_the_scoring_at_once(
    tiny, tmp_path, reply, graders, together, words
):
    """One no of a server to a key is enough, however many rows are under way."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "choices": ["x", "y"], "answer": "y"}\n' * 9)
    with serving(lambda body, before: reply) as (url, bodies):
        data = DataSource(path=str(rows))
        plan = plan_through(url, tiny, data, tmp_path, graders=graders, batch_size=together)
        with pytest.raises(ScoringFailed, match=words) as failed:
            quietly(plan)
    assert "OPENAI_API_KEY" in str(failed.value.hint)
    assert len(bodies) <= (9 if together > 1 else 2)
