"""The label mask is the one that transformers makes of ``{% generation %}`` blocks."""

import itertools

import pytest
from tokenizers import AddedToken

from data.tiny_tokenizers import (
    HEADER_STYLE,
    MARKED_STYLE,
    byte_tokenizer,
    prefixing_tokenizer,
    word_tokenizer,
)
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import PLAIN_TEMPLATE, load_template
from fitune.demo.files import BOS, EOS, PAD, ROLE_TOKENS
from fitune.demo.files import CHAT_TEMPLATE as DEMO_TEMPLATE

_HEADERS = """\
{%- for message in messages -%}
{{- OPEN -}}
{%- if message.role == 'assistant' -%}ANSWER{%- else -%}OTHER{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""


def written(answer, *, other="message.content ~ '<|end|>\\n'", opening=""):
    opening = opening or "'<|turn|>' ~ message.role ~ '\\n'"
    return (
        _HEADERS.replace("OPEN", opening).replace("ANSWER", answer).replace("OTHER", "{{- " + other + " -}}")
    )


TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "end inside": written(
        "{%- generation -%}{{- message.content ~ '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    ),
    "no line break": written(
        "{%- generation -%}{{- message.content ~ '<|end|>' -}}{%- endgeneration -%}",
        other="message.content ~ '<|end|>'",
    ),
    "line break inside": written(
        "{%- generation -%}{{- message.content ~ '<|end|>\\n' -}}{%- endgeneration -%}"
    ),
    "space before the end": written(
        "{%- generation -%}{{- message.content ~ ' <|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    ),
    "end is EOS": written(
        "{%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}",
        other="message.content ~ '\\n'",
    ),
    "BOS first": "{{- bos_token -}}"
    + written("{%- generation -%}{{- message.content ~ '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"),
    "trimmed": written(
        "{%- generation -%}{{- message.content.strip() ~ '<|end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
    ),
    "trimmed thought": written(
        "{%- generation -%}{{- message.content.split('</think>')[-1].lstrip('\\n') ~ '<|end|>' -}}"
        "{%- endgeneration -%}{{- '\\n' -}}"
    ),
    "empty thought": written(
        "{{- '<think></think>' -}}{%- generation -%}{{- message.content ~ '<|end|>' -}}{%- endgeneration -%}"
    ),
    "another end last": written(
        "{%- generation -%}{{- message.content ~ ('</s>' if loop.last else '<|end|>') -}}{%- endgeneration -%}"
    ),
    "end, then EOS": written(
        "{%- generation -%}{{- message.content ~ '<|end|>' -}}{%- endgeneration -%}{{- eos_token -}}"
    ),
    "header inside": written(
        "{%- generation -%}{{- '<|turn|>assistant\\n' ~ message.content ~ '<|end|>\\n' -}}{%- endgeneration -%}",
        other="'<|turn|>' ~ message.role ~ '\\n' ~ message.content ~ '<|end|>\\n'",
        opening="''",
    ),
    "in a macro": "{%- macro said(text) -%}{{- text ~ '<|end|>' -}}{%- endmacro -%}"
    + written("{%- generation -%}{{- said(message.content) -}}{%- endgeneration -%}"),
}
"""Every answer ends inside of its block."""

OPEN_ENDED = {
    "marked": (MARKED_STYLE, "<|end|>"),
    "space between": (
        written("{%- generation -%}{{- message.content -}}{%- endgeneration -%}{{- ' <|end|>' -}}"),
        "<|end|>",
    ),
    "EOS": (
        written("{%- generation -%}{{- message.content -}}{%- endgeneration -%}{{- eos_token -}}"),
        "</s>",
    ),
}
"""The end token stands behind the block."""

TALKS = {
    "one turn": ("what is two and two?", "four"),
    "turns": ("hello", "world", "ping", "pong", "what is the answer?", "the answer is four."),
    "repeated": ("four", "four", "four", "four"),
    "white space": (" hello ", " world ", "ping\n", "pong "),
    "thought": ("hello", "<think>user</think>\n\nworld", "ping", "<think>two</think>\n\npong"),
    "system": ("SYSTEM be kind", "hello", "world", "ping", "pong"),
}
TOKENIZERS = {"bytes": byte_tokenizer, "sentencepiece": prefixing_tokenizer, "wordpiece": word_tokenizer}


def talk(*turns):
    system = [Message("system", turns[0])] if turns[0].startswith("SYSTEM") else []
    spoken = turns[len(system) :]
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(spoken)]
    return Conversation((*system, *messages), "row 1")


def transformers_mask(tokenizer, conversation):
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]


LOOSE = {
    ("sentencepiece", "line break inside"), ("sentencepiece", "header inside"),
    ("wordpiece", "line break inside"), ("wordpiece", "header inside"),
}  # fmt: skip
"""A block that ends with a line break: these tokenizers map it to two tokens, or to none, and transformers, which
asks for the token of the block's last character, marks too few tokens or too many."""


@pytest.mark.parametrize(
    ("tokenizer", "case"),
    [pair for pair in itertools.product(TOKENIZERS, TEMPLATES) if pair not in LOOSE],
)
def test_the_mask_equals_that_of_transformers(tokenizer, case):
    for encoded, ids, mask in both(tokenizer, TEMPLATES[case]):
        assert encoded.ids == ids[: len(encoded.ids)]
        assert encoded.supervised == mask[: len(encoded.ids)]
        assert not any(mask[len(encoded.ids) :])


def both(name, template):
    """Ours, and the ids and the mask of transformers, for every talk that it can mark."""
    tokenizer = TOKENIZERS[name](template=template)
    ours = load_template(tokenizer)
    for turns in TALKS.values():
        if name == "wordpiece" and turns == TALKS["white space"]:
            continue  # white space has no token: transformers finds no beginning and marks nothing
        yield ours.encode(talk(*turns)), *transformers_mask(tokenizer, talk(*turns))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("case", OPEN_ENDED)
def test_where_the_block_leaves_out_the_end_it_is_learned_too_and_nothing_else(tokenizer, case):
    template, end = OPEN_ENDED[case]
    for encoded, ids, mask in both(tokenizer, template):
        assert encoded.ids == ids[: len(encoded.ids)]
        more = [a and not b for a, b in zip(encoded.supervised, mask, strict=False)]
        learned = "".join(
            token for token, wanted in zip(tokens_of(tokenizer, encoded.ids), more, strict=True) if wanted
        )
        answers = sum(begins and not before for before, begins in zip([False, *mask], mask, strict=False))
        assert learned.replace("\u2581", "").replace("\u0120", "") == end * answers
        assert all(a or not b for a, b in zip(encoded.supervised, mask, strict=False))


def tokens_of(name, ids):
    return TOKENIZERS[name]().convert_ids_to_tokens(ids)


BARE = written("{{- message.content -}}", other="message.content")
BARE_MARKED = written(
    "{%- generation -%}{{- message.content -}}{%- endgeneration -%}", other="message.content"
)


@pytest.mark.parametrize("template", [BARE, BARE_MARKED], ids=["found", "marked"])
def test_the_opening_of_the_next_turn_is_no_end(template):
    """Behind an answer stands at once the next question's opening: only the last answer is ended, with EOS."""
    tokenizer = byte_tokenizer(template=template)
    encoded = load_template(tokenizer).encode(talk("hello", "world", "ping", "pong"))
    learned = [token for token, wanted in zip(encoded.ids, encoded.supervised, strict=True) if wanted]
    assert tokenizer.decode(learned) == "worldpong</s>"


def test_each_answer_is_learned_with_its_own_end_where_the_last_one_ends_differently():
    template = HEADER_STYLE.replace(
        "'<|end|>' -", "('</s>' if loop.last and message.role == 'assistant' else '<|end|>') -"
    )
    tokenizer = byte_tokenizer(template=template)
    encoded = load_template(tokenizer).encode(talk("hello", "world", "ping", "pong"))
    learned = [token for token, wanted in zip(encoded.ids, encoded.supervised, strict=True) if wanted]
    assert tokenizer.decode(learned) == "world<|end|>pong</s>"


def test_the_demo_learns_its_answers_and_their_ends_only():
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    tokenizer = byte_tokenizer(template=DEMO_TEMPLATE, **names)
    tokenizer.add_special_tokens({"extra_special_tokens": list(ROLE_TOKENS)})
    for turns in TALKS.values():
        encoded = load_template(tokenizer).encode(talk(*turns))
        assert (encoded.ids, encoded.supervised) == transformers_mask(tokenizer, talk(*turns))


def test_special_tokens_that_the_tokenizer_does_not_name_are_special_all_the_same():
    """Llama-3's headers and Gemma-3's <end_of_turn> are only among the added tokens."""
    tokenizer = byte_tokenizer(template=written("{{- message.content ~ '<|stop|>' -}}"))
    tokenizer.add_tokens([AddedToken("<|stop|>", special=True)], special_tokens=True)
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    assert stop not in tokenizer.all_special_ids
    template = load_template(tokenizer)
    encoded = template.encode(talk("hello <|stop|>", "world <|stop|>", "ping", "pong"))
    assert encoded.ids.count(stop) == 2
    assert encoded.ids[-1] == stop
    assert stop in template.stop_ids
    assert tokenizer.decode(encoded.ids).count("<|stop|>") == 4
