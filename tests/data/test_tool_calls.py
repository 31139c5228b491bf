"""Calls of tools: every way of writing them is one conversation, which the model's own template shows and learns."""

import json

import pytest

from data.tiny_tokenizers import BRACKET_STYLE, byte_tokenizer
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Message, ToolCall
from fitune.data.conversations.templates import load_template
from fitune.data.reading.rows import BadRow, Row

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Now",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
ARGUMENTS = {"city": "Orléans", "days": 2}
ASKED, SAID = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Mild."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a12345678", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    ],
}
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


def learned(template, tokenizer, conversation):
    """The stretches that are learned, as text."""
    row = template.encode(conversation)
    runs = [[]]
    for token, wanted in zip(row.ids, row.supervised, strict=True):
        if wanted:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("style", STYLES)
def test_calls_and_answers_are_learned_as_the_template_writes_them(style):
    tokenizer = byte_tokenizer(template=STYLES[style])
    template = load_template(tokenizer)
    again = [{"role": "user", "content": "And now?"}, CALLED]
    for messages in ([ASKED, CALLED, FOUND, SAID], [ASKED, CALLED, FOUND, SAID, *again], [ASKED, CALLED]):
        conversation = example({"messages": messages, "tools": TOOLS})
        parts = learned(template, tokenizer, conversation)
        answers = [message for message in messages if message["role"] == "assistant"]
        assert len(parts) == len(answers)
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


AS_TEXT_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
SAME = {
    "OpenAI, arguments as text": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": AS_TEXT_ARGUMENTS}}],
            },
            {"role": "tool", "content": '{"degrees": 21}'},
            SAID,
        ],
        "tools": json.dumps(TOOLS),
    },
    "OpenAI before 2024": {
        "messages": [
            ASKED,
            {"role": "assistant", "function_call": {"name": "weather", "arguments": AS_TEXT_ARGUMENTS}},
            {"role": "function", "name": "weather", "content": '{"degrees": 21}'},
            SAID,
        ],
        "functions": [TOOLS[0]["function"]],
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
            {"role": "assistant", "tool_calls": [{"name": "weather", "parameters": ARGUMENTS}]},
            {"role": "tool", "content": {"degrees": 21}},
            SAID,
        ],
        "tools": TOOLS,
    },
}


def without_ids(conversation):
    return [(m.role, m.content, [(c.name, c.arguments) for c in m.calls]) for m in conversation.messages]


@pytest.mark.parametrize("name", SAME)
def test_every_way_of_writing_calls_is_one_conversation(name):
    made, wanted = example(SAME[name]), example(ROW)
    assert without_ids(made) == without_ids(wanted)
    assert json.loads(made.tools) == TOOLS == json.loads(wanted.tools)


def test_turns_from_function_call_and_observation_are_calls_and_answers():
    call = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
    turns = [
        ("human", "Weather?"),
        ("function_call", call),
        ("observation", '{"degrees": 21}'),
        ("gpt", "Mild."),
    ]
    fields = {
        "conversations": [{"from": who, "value": what} for who, what in turns],
        "tools": json.dumps([TOOLS[0]["function"]]),
    }
    made = example(fields, "sharegpt")
    assert without_ids(made) == without_ids(example(ROW))
    assert json.loads(made.tools) == TOOLS


def test_a_column_of_messages_and_one_of_tools_can_be_named():
    fields = {"chosen": ROW["messages"], "rejected": [], "functions_of": TOOLS, "who": "Be kind."}
    made = example(fields, "columns", messages="chosen", tools="functions_of", system="who")
    assert made.messages[0] == Message("system", "Be kind.")
    assert without_ids(made)[1:] == without_ids(example(ROW))
    assert json.loads(made.tools) == TOOLS


def test_special_tokens_inside_arguments_stay_text():
    tokenizer = byte_tokenizer(template=AS_OBJECT)
    call = {"name": "weather", "arguments": {"city": "<|end|>"}}
    conversation = example({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}], "tools": TOOLS})
    row = load_template(tokenizer).encode(conversation)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert '"city": "<|end|>"' in tokenizer.decode(row.ids)
    assert row.ids.count(end) == 3, "those of the tools, the question and the answer"


def test_a_template_that_shows_no_tools_is_refused():
    template = load_template(byte_tokenizer(template=BRACKET_STYLE))
    with pytest.raises(
        BadRow, match="this template (leaves out the tool 'weather'|failed)|the template failed"
    ):
        template.encode(example(ROW))


def with_call(call):
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": call}], "tools": TOOLS}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (with_call([{"function": {"arguments": "{}"}}]), r"'messages\[1\].tool_calls\[0\]' names no tool"),
        (
            with_call([{"name": "f", "arguments": "{city"}]),
            r"tool_calls\[0\].arguments' is not JSON .*: '\{city'",
        ),
        (
            with_call([{"name": "f", "arguments": [1]}]),
            r"arguments' are not named: a JSON object is expected: \[1\]",
        ),
        (with_call({"name": "f"}), "is not a list of calls"),
        (with_call([{"name": "f", "arguments": {"a": "\ufdd0"}}]), "holds the noncharacter"),
        ({**ROW, "tools": "[{"}, "'tools' is not JSON"),
        ({**ROW, "tools": [{"description": "d"}]}, r"'tools\[0\]' names no tool"),
        ({**ROW, "messages": [ASKED, CALLED, SAID]}, "message 3 is from assistant, expected tool"),
        ({**ROW, "messages": [ASKED, FOUND, SAID]}, "message 2 is from tool, expected assistant"),
        ({**ROW, "messages": [ASKED, CALLED, FOUND]}, "does not end with an answer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, SAID]},
            r"messages\[0\].content\[0\]' is image_url, expected text",
        ),
    ],
)
def test_calls_that_cannot_be_read_are_named(fields, said):
    with pytest.raises(BadRow, match=f"^f:1: field .*{said}") as caught:
        example(fields)
    assert caught.value.hint
    assert caught.value.reason


def test_a_call_says_itself():
    message = Message("assistant", "Well.", (ToolCall("f", '{"a": 1}'),))
    assert message.text == 'Well.\n{"name": "f", "arguments": {"a": 1}}'
