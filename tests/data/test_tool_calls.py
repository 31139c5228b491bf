"""Calls of tools: every way of writing them is one conversation, which the model's own template shows and learns."""

import json

import pytest

from data.tiny_tokenizers import BRACKET_STYLE, byte_tokenizer, learned_stretches
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Message, ToolCall
from fitune.data.conversations.templates import load_template
from fitune.data.reading.rows import BadRow, Row

FUNCTION = {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"city": "Orléans", "days": 2}
ASKED, SAID = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Mild."}


def called(*calls, **message):
    return {"role": "assistant", **message, "tool_calls": [*calls]}


CALL = {"id": "a12345678", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = called(CALL, content=None)
FOUND = {"role": "tool", "tool_call_id": "a12345678", "content": '{"degrees": 21}'}
ROW = {"messages": [ASKED, CALLED, FOUND, SAID], "tools": TOOLS}

AS_OBJECT = """\
{%- if tools -%}{{- '<|turn|>tools ' ~ (tools | tojson) ~ '<|end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|turn|>' ~ message.role ~ '\\n' ~ (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<call>' ~ ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) ~ '</call>' -}}
{%- endfor -%}
{{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""
INSTEAD_OF_CONTENT = AS_OBJECT.replace(
    "(message.content or '')",
    "('' if message.tool_calls else message.content | tojson if message.role == 'tool' else message.content)",
)
"""As Llama's: calls stand in the place of the content, and a tool's answer is JSON text."""
AS_TEXT = AS_OBJECT.replace(
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson)",
    "call.function.name ~ ' ' + call.function.arguments",
).replace("(message.content or '')", "('' if message.content is none else message.content)")
"""As DeepSeek's: the arguments are joined to other text."""
WITH_IDS = AS_OBJECT.replace(
    "{%- for call in message.tool_calls or [] -%}",
    "{%- for call in message.tool_calls or [] -%}"
    "{%- if not call.id or call.id | length != 9 -%}{{- raise_exception('ids of nine letters') -}}{%- endif -%}",
)
"""As Mistral's."""
OTHER_END = AS_OBJECT.replace(
    "{{- '<|end|>\\n' -}}\n{%- endfor -%}",
    "{{- ('</s>' if message.tool_calls else '<|end|>') ~ '\\n' -}}\n{%- endfor -%}",
)
"""As Llama's with tools of its own: an answer with calls ends in a way of its own."""
MARKED = AS_OBJECT.replace(
    "{{- '<|turn|>' ~ message.role ~ '\\n' ~ (message.content or '') -}}",
    "{{- '<|turn|>' ~ message.role ~ '\\n' -}}"
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content or '' -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<call>' ~ (call.function | tojson) ~ '</call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}{%- continue -%}{%- endif -%}"
    "{{- message.content -}}",
)
STYLES = {
    "object": AS_OBJECT, "instead": INSTEAD_OF_CONTENT, "text": AS_TEXT, "ids": WITH_IDS, "other end": OTHER_END,
    "marked": MARKED,
}  # fmt: skip


def example(fields, format="messages", **columns):
    return to_example(Row("f:1", fields), format=format, columns=tuple(columns.items()))


@pytest.mark.parametrize("style", STYLES)
def test_calls_and_answers_are_learned_as_the_template_writes_them(style):
    tokenizer = byte_tokenizer(template=STYLES[style])
    template = load_template(tokenizer)
    again = [{"role": "user", "content": "And now?"}, CALLED]
    for messages in ([ASKED, CALLED, FOUND, SAID], [ASKED, CALLED, FOUND, SAID, *again], [ASKED, CALLED]):
        conversation = example({"messages": messages, "tools": TOOLS})
        parts = learned_stretches(tokenizer, template.encode(conversation))
        answers = [message for message in messages if message["role"] == "assistant"]
        for part, answer in zip(parts, answers, strict=True):
            assert ("weather" in part and "Orléans" in part) == bool(answer.get("tool_calls"))
            assert ("Mild." in part) == (answer is SAID)
            assert part.rstrip("\n").endswith(("<|end|>", "</s>"))
            assert "degrees" not in part
            assert "<|turn|>" not in part


@pytest.mark.parametrize("style", ["object", "instead", "ids"])
def test_the_text_is_the_one_that_transformers_makes(style):
    tokenizer = byte_tokenizer(template=STYLES[style])
    ids = load_template(tokenizer).encode(example(ROW)).ids
    text = tokenizer.apply_chat_template([ASKED, CALLED, FOUND, SAID], tools=TOOLS, tokenize=False)
    assert tokenizer.decode(ids) == text.rstrip("\n")


TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
DEGREES = '{"degrees": 21}'
SAME = {
    "OpenAI, arguments as text": {
        "messages": [
            ASKED, called({"function": {"name": "weather", "arguments": TEXT}}, content=""),
            {"role": "tool", "content": DEGREES}, SAID,
        ],
        "tools": json.dumps(TOOLS),
    },
    "OpenAI before 2024": {
        "messages": [
            ASKED, {"role": "assistant", "function_call": {"name": "weather", "arguments": TEXT}},
            {"role": "function", "name": "weather", "content": DEGREES}, SAID,
        ],
        "functions": [FUNCTION],
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text} for text in ("Wea", "ther?")]},
            called({"name": "weather", "parameters": ARGUMENTS}), {"role": "tool", "content": {"degrees": 21}}, SAID,
        ],
        "tools": TOOLS,
    },
    "turns of function_call and observation": {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": f'{{"name": "weather", "arguments": {TEXT}}}'},
            {"from": "observation", "value": DEGREES}, {"from": "gpt", "value": "Mild."},
        ],
        "tools": json.dumps([FUNCTION]),
    },
}  # fmt: skip


def without_ids(conversation):
    return [(m.role, m.content, [(c.name, c.arguments) for c in m.calls]) for m in conversation.messages]


@pytest.mark.parametrize("name", SAME)
def test_every_way_of_writing_calls_is_one_conversation(name):
    made, wanted = example(SAME[name], format="auto"), example(ROW)
    assert without_ids(made) == without_ids(wanted)
    assert json.loads(made.tools) == TOOLS == json.loads(wanted.tools)


def test_a_column_of_messages_and_one_of_tools_can_be_named():
    fields = {"chosen": ROW["messages"], "rejected": [], "functions_of": TOOLS, "who": "Be kind."}
    made = example(fields, "columns", messages="chosen", tools="functions_of", system="who")
    assert made.messages[0] == Message("system", "Be kind.")
    assert without_ids(made)[1:] == without_ids(example(ROW))
    assert json.loads(made.tools) == TOOLS


def test_special_tokens_inside_arguments_stay_text():
    tokenizer = byte_tokenizer(template=AS_OBJECT)
    call = called({"name": "weather", "arguments": {"city": "<|end|>"}})
    row = load_template(tokenizer).encode(example({"messages": [ASKED, call], "tools": TOOLS}))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert '"city": "<|end|>"' in tokenizer.decode(row.ids)
    assert row.ids.count(end) == 3, "those of the tools, the question and the answer"


def test_a_template_that_shows_no_tools_is_refused():
    template = load_template(byte_tokenizer(template=BRACKET_STYLE))
    with pytest.raises(
        BadRow, match="this template (leaves out the tool 'weather'|failed)|the template failed"
    ):
        template.encode(example(ROW))


def with_call(*calls):
    return {"messages": [ASKED, called(*calls)], "tools": TOOLS}


UNREADABLE = [
    (r"'messages\[1\].tool_calls\[0\]' names no tool", with_call({"function": {"arguments": "{}"}})),
    (r"tool_calls\[0\].arguments' is not JSON .*: '\{city'", with_call({"name": "f", "arguments": "{city"})),
    (
        r"arguments' are not named: a JSON object is expected: \[1\]",
        with_call({"name": "f", "arguments": [1]}),
    ),
    ("is not a list of calls", {"messages": [ASKED, SAID | {"tool_calls": {"name": "f"}}]}),
    ("holds the noncharacter", with_call({"name": "f", "arguments": {"a": "\ufdd0"}})),
    ("'tools' is not JSON", ROW | {"tools": "[{"}),
    (r"'tools\[0\]' names no tool", ROW | {"tools": [{"description": "d"}]}),
    ("message 3 is from assistant, expected tool", ROW | {"messages": [ASKED, CALLED, SAID]}),
    ("does not end with an answer", ROW | {"messages": [ASKED, CALLED, FOUND]}),
    (
        r"messages\[0\].content\[0\]' is image_url, expected text",
        {"messages": [ASKED | {"content": [{"type": "image_url", "image_url": "x"}]}, SAID]},
    ),
]


@pytest.mark.parametrize(("said", "fields"), UNREADABLE)
def test_calls_that_cannot_be_read_are_named(said, fields):
    with pytest.raises(BadRow, match=f"^f:1: field .*{said}") as caught:
        example(fields)
    assert caught.value.hint
    assert caught.value.reason


def test_a_call_says_itself():
    message = Message("assistant", "Well.", (ToolCall("f", '{"a": 1}'),))
    assert message.text == 'Well.\n{"name": "f", "arguments": {"a": 1}}'
