"""References that are calls of tools: scored and compared as training renders them."""

import json

import pytest

from data.test_tool_calls import ARGUMENTS, CALLED, ROW
from data.test_tool_calls import STYLES as OTHER_STYLES
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Conversation
from fitune.data.conversations.templates import load_template
from fitune.data.reading.rows import Row
from fitune.score.engines.engine import Sampling
from fitune.score.grades.graders import References, open_graders
from fitune.score.grades.grading import compared_calls, grade_line
from fitune.score.questions import Input
from fitune.score.tasks import to_given_tasks, to_tasks
from fitune.values.plan import DataSource

AS_TEXT = OTHER_STYLES["object"].replace(
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson)",
    "call.function.name ~ ' ' ~ (call.function.arguments + '')",
)
"""As DeepSeek's: the name stands in front of the arguments, which must be text."""
STYLES = OTHER_STYLES | {"text": AS_TEXT}
CALLING = {"messages": ROW["messages"][:2], "tools": ROW["tools"]}


def asked(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(CALLING) + "\n" + json.dumps(ROW) + "\n")
    return list(Input(sources=(DataSource(path=str(path)),)).questions())


def trained(template, fields):
    example = to_example(Row("f:1", fields), format="messages")
    assert isinstance(example, Conversation)
    return template.encode(example).ids


def graded(name, answer, task):
    body = {"object": "chat.completion", "choices": [{"message": {"content": answer}}]}
    return grade_line(open_graders((name,))[0], {"response": {"body": body}}, task)["grade"]


@pytest.mark.parametrize("style", STYLES)
def test_references_with_calls_have_log_likelihoods_of_trainings_own_ids(style, tmp_path):
    template = load_template(byte_tokenizer(template=STYLES[style]))
    calling, said = to_given_tasks(asked(tmp_path), template=template)
    for task, fields in ((calling, CALLING), (said, ROW)):
        (given,) = task.given
        assert [*task.prompt_ids, *given.token_ids] == trained(template, fields)
    assert "weather" in calling.given[0].text
    assert "<|end|>" not in calling.given[0].text
    assert said.given[0].text == "Mild."


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_with_the_references_calls_is_right_however_its_json_is_written(style, tmp_path):
    template = load_template(byte_tokenizer(template=STYLES[style]))
    task, _ = to_tasks(asked(tmp_path), template=template, sampling=Sampling())
    assert task.expected == template.decode(trained(template, CALLING)[len(task.prompt_ids) :])
    line = {"expected": task.expected, "calls": [call.text for call in task.question.calls]}
    written = json.dumps(ARGUMENTS, ensure_ascii="\\u" in task.expected)
    assert written in task.expected
    other_order = task.expected.replace(written, json.dumps(dict(reversed(ARGUMENTS.items())), indent=1))
    for name in ("exact_match", "contains"):
        assert graded(name, task.expected, line) == graded(name, other_order, line) == 1.0
        for wrong in (task.expected.replace("weather", "get_weather"), task.expected.replace("2", "3"), ""):
            assert graded(name, wrong, line) == 0.0


CALL = json.dumps({"name": "f", "arguments": {"x": 1}})
OTHER = json.dumps({"arguments": {"y": [1, {"z": None}]}, "name": "g"})


@pytest.mark.parametrize(
    ("answer", "exact", "holds"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>", 1, 1),
        (f"I look it up. {OTHER} {CALL}", 1, 1),
        (f"[{CALL}, {OTHER}]", 1, 1),
        (f'{{"name": "f", "parameters": {{"x": 1}}}}; {OTHER}', 1, 1),
        (f"{CALL}{OTHER}{CALL}", 0, 1),
        (CALL, 0, 0),
        (CALL.replace("1", "true") + OTHER, 0, 0),
        ("[" * 50_000 + CALL, 0, 0),
        ("", 0, 0),
    ],
)
def test_calls_are_compared_by_name_and_arguments_in_any_order(answer, exact, holds):
    found, wanted = compared_calls(answer, f"<call>{CALL}</call><call>{OTHER}</call>", [CALL, OTHER])
    assert (found == wanted, found >= wanted) == (bool(exact), bool(holds))


def test_a_reference_that_the_template_cannot_show_is_a_problem_of_its_row(tmp_path):
    template = load_template(
        byte_tokenizer(template="{% for m in messages %}{{ m.role ~ (m.content or '') }}{% endfor %}")
    )
    calling, _ = to_tasks(asked(tmp_path), template=template, sampling=Sampling())
    assert "leaves out the tool" in calling.problem


def test_calls_are_graded_by_exact_match_where_no_grader_is_named():
    seen = References()
    seen.add(CALLED["tool_calls"][0]["function"]["name"] + " word" * 50, has_calls=True)
    assert seen.graders() == (("exact_match", "contains"), "references are calls")
