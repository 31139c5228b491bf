"""The law of masks: what is learned is what a model has to write after the words that ask for an answer, its end tokens
included, and nothing that the template or somebody else wrote; in every turn, with calls of tools and reasoning."""

from functools import cache

import pytest

from data.answer_templates import KINDS, tokenizer_of
from data.tiny_tokenizers import learned_stretches
from fitune.data.conversations.messages import Conversation, Message, ToolCall
from fitune.data.conversations.templates import load_template
from fitune.data.conversations.tool_calls import PROBE_TOOLS
from fitune.data.reading.rows import BadRow
from fitune.errors import DataError

CALL = (ToolCall("look_up", '{"city": "Orléans"}'),)
FOUND = Message("tool", '{"degrees": 21}')


def asked(text):
    return Message("user", text)


def said(text, thought="", calls=()):
    return Message("assistant", text, calls, thought=thought)


TALKS = {
    "one turn": [asked("hello"), said("world")],
    "turns": [Message("system", "be kind"), asked("hello"), said("four"), asked("four"), said("four")],
    "special text": [asked("<|end|><|user|>"), said("<|eot_id|> <|im_end|>"), asked("and?"), said("<|user|> x")],
    "thought": [asked("hello"), said("world", "hm")],
    "thoughts": [asked("hello"), said("world", "hm <|end|>"), asked("ping"), said("pong", "so <|user|>")],
    "some thoughts": [asked("hello"), said("world"), asked("ping"), said("pong", "so")],
    "a call": [asked("Weather?"), said("", calls=CALL)],
    "call and answer": [asked("Weather?"), said("", calls=CALL), FOUND, said("Mild.")],
    "calls and turns": [
        asked("Weather?"), said("", calls=CALL), FOUND, said("", calls=CALL), FOUND, said("Mild."), asked("And now?"),
        said("", calls=CALL), FOUND, said("Cold."),
    ],
    "thoughts and calls": [
        asked("Weather?"), said("", "search first", CALL), FOUND, said("Mild.", "warm"), asked("And now?"),
        said("", "again", CALL), FOUND, said("Cold.", "cold"),
    ],
}  # fmt: skip
CASES = [
    (kind, talk)
    for kind, settings in KINDS.items()
    for talk, messages in TALKS.items()
    if settings.calls or not any(message.calls for message in messages)
    if not (kind == "Llama-3.1" and talk == "thoughts and calls")
]


@cache
def model(kind):
    """Its template and tokenizer, and the tokens that end its answers."""
    tokenizer = tokenizer_of(KINDS[kind])
    template = load_template(tokenizer)
    return template, tokenizer, template.stop_ids


def conversation(messages):
    has_calls = any(message.calls for message in messages)
    return Conversation(tuple(messages), "row 1", PROBE_TOOLS if has_calls else "")


def learned(kind, messages, *, empty=False):
    """The stretches that are learned, as text."""
    template, tokenizer, _ = model(kind)
    row = template.encode_rows([template.lay_out(conversation(messages))], empty_thoughts=empty)
    return learned_stretches(tokenizer, row)


def wanted(kind, messages, *, empty):
    """What the model has to write at each turn, from the kind's own words."""
    last_question = max(number for number, message in enumerate(messages) if message.role == "user")
    texts = []
    for number, message in enumerate(messages):
        if message.role == "assistant":
            place = number == len(messages) - 1, number > last_question
            text = KINDS[kind].said(message, *place)
            is_shown = bool(message.thought) and message.thought in text
            texts.append((KINDS[kind].empty(*place) if empty and not is_shown else "") + text)
    return texts


@pytest.mark.parametrize(("kind", "talk"), CASES)
def test_what_is_learned_is_what_the_model_has_to_write(kind, talk):
    for empty in (False, True):
        assert learned(kind, TALKS[talk], empty=empty) == wanted(kind, TALKS[talk], empty=empty)


@pytest.mark.parametrize(("kind", "talk"), CASES)
def test_a_row_is_its_prompt_and_what_the_model_writes_until_it_stops(kind, talk):
    """At each answer in turn: the prompt that scoring feeds the model, then what it has to write, nothing else."""
    (template, tokenizer, stop_ids), messages = model(kind), TALKS[talk]
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        talk_so_far = conversation(messages[: number + 1])
        row, prompt = template.encode(talk_so_far), template.encode_prompt(talk_so_far)
        assert row.ids[: len(prompt)] == prompt
        written = row.ids[len(prompt) :]
        answer = wanted(kind, messages[: number + 1], empty=not message.thought)[-1]
        assert tokenizer.decode(written) == answer
        assert [place for place, token in enumerate(written, 1) if token in stop_ids] == [len(written)]


def test_a_block_that_the_data_itself_has_empty_is_learned():
    text = "<think>\n\n</think>\n\nworld"
    assert learned("Qwen3", [asked("hello"), said(text)]) == [f"{text}<|im_end|>"]


def test_a_thought_in_the_content_is_learned_like_one_in_its_field():
    for kind in ("Qwen3", "Qwen3.5", "GLM-4.5", "DeepSeek-R1"):
        template, *_ = model(kind)
        tagged = conversation([asked("hello"), said("<think>\nhm\n</think>\n\nworld")])
        assert template.encode(tagged).ids == template.encode(conversation(TALKS["thought"])).ids


def test_reasoning_that_the_template_has_no_place_for_is_refused():
    with pytest.raises(BadRow, match="row 1: this template leaves out the reasoning 'search first'"):
        learned("Llama-3.1", [asked("Weather?"), said("", "search first", CALL)])


@pytest.mark.parametrize(("kind", "written"), [("Llama-3.1", "31 Jan 2026"), ("gpt-oss", "2026-01-31")])
def test_the_date_is_the_one_asked_for_in_fitune_and_in_transformers(kind, written):
    tokenizer, talk = tokenizer_of(KINDS[kind]), conversation(TALKS["one turn"])
    frozen = tokenizer.decode(model(kind)[0].encode(talk).ids)
    template = load_template(tokenizer, date="2026-01-31")
    dated = tokenizer.decode(template.encode(talk).ids)
    assert written in dated
    assert dated.replace(written, "") == frozen.replace("26 Jul 2024", "").replace("2024-07-26", "")
    tokenizer.chat_template = template.source
    messages = [{"role": message.role, "content": message.content} for message in talk.messages]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == dated


def test_a_date_is_refused_where_the_template_writes_none():
    with pytest.raises(DataError, match="chat_template_date = 2026-01-31: .* writes no date"):
        load_template(tokenizer_of(KINDS["Qwen3"]), date="2026-01-31")
