"""The label mask is the one that transformers makes of ``{% generation %}`` blocks."""

import itertools

import pytest
from tokenizers import AddedToken

from data.tiny_tokenizers import (
    HEADER_STYLE,
    MARKED_STYLE,
    as_messages,
    byte_tokenizer,
    learned,
    prefixing_tokenizer,
    talk,
    word_tokenizer,
)
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


def written(answer, *, other="message.content ~ '<|end|>\\n'", opening="'<|turn|>' ~ message.role ~ '\\n'"):
    return (
        _HEADERS.replace("OPEN", opening).replace("ANSWER", answer).replace("OTHER", f"{{{{- {other} -}}}}")
    )


def marked(inside, behind="", **settings):
    """The template whose answers are this expression in a generation block, and one behind it."""
    block = f"{{%- generation -%}}{{{{- {inside} -}}}}{{%- endgeneration -%}}"
    return written(block + (f"{{{{- {behind} -}}}}" if behind else ""), **settings)


END, LINE = "message.content ~ '<|end|>'", "'\\n'"
TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "end inside": marked(END, LINE),
    "no line break": marked(END, other=END),
    "line break inside": marked("message.content ~ '<|end|>\\n'"),
    "space before the end": marked("message.content ~ ' <|end|>'", LINE),
    "end is EOS": marked("message.content ~ eos_token", other="message.content ~ '\\n'"),
    "BOS first": "{{- bos_token -}}" + marked(END, LINE),
    "trimmed": marked("message.content.strip() ~ '<|end|>'", LINE),
    "trimmed thought": marked("message.content.split('</think>')[-1].lstrip('\\n') ~ '<|end|>'", LINE),
    "empty thought": marked(END).replace("{%- generation", "{{- '<think></think>' -}}{%- generation"),
    "another end last": marked("message.content ~ ('</s>' if loop.last else '<|end|>')"),
    "end, then EOS": marked(END, "eos_token"),
    "header inside": marked(
        "'<|turn|>assistant\\n' ~ message.content ~ '<|end|>\\n'",
        other="'<|turn|>' ~ message.role ~ '\\n' ~ message.content ~ '<|end|>\\n'", opening="''",
    ),
    "in a macro": "{%- macro said(text) -%}{{- text ~ '<|end|>' -}}{%- endmacro -%}"
    + marked("said(message.content)"),
}  # fmt: skip
"""Every answer ends inside of its block."""

OPEN_ENDED = {
    "marked": (MARKED_STYLE, "<|end|>"),
    "space between": (marked("message.content", "' <|end|>'"), "<|end|>"),
    "EOS": (marked("message.content", "eos_token"), "</s>"),
}
"""The end token stands behind the block."""

TALKS = [
    talk(" hello ", " world ", "ping\n", "pong "),
    talk("what is two and two?", "four"),
    talk("hello", "world", "ping", "pong", "what is the answer?", "the answer is four."),
    talk("four", "four", "four", "four"),
    talk("hello", "<think>user</think>\n\nworld", "ping", "<think>two</think>\n\npong"),
    talk("hello", "world", "ping", "pong", system="be kind"),
]
TOKENIZERS = {"bytes": byte_tokenizer, "sentencepiece": prefixing_tokenizer, "wordpiece": word_tokenizer}


def transformers_mask(tokenizer, conversation):
    encoded = tokenizer.apply_chat_template(
        as_messages(conversation), return_assistant_tokens_mask=True, return_dict=True
    )
    return encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]


LOOSE = {
    ("sentencepiece", "line break inside"), ("sentencepiece", "header inside"),
    ("wordpiece", "line break inside"), ("wordpiece", "header inside"),
}  # fmt: skip
"""A block that ends with a line break: these tokenizers map it to two tokens, or to none, and transformers, which
asks for the token of the block's last character, marks too few tokens or too many."""


@pytest.mark.parametrize(
    ("tokenizer", "case"), [pair for pair in itertools.product(TOKENIZERS, TEMPLATES) if pair not in LOOSE]
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
    # white space has no token in WordPiece: transformers finds no beginning and marks nothing
    for turns in TALKS[name == "wordpiece" :]:
        yield ours.encode(turns), *transformers_mask(tokenizer, turns)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("case", OPEN_ENDED)
def test_where_the_block_leaves_out_the_end_it_is_learned_too_and_nothing_else(tokenizer, case):
    template, end = OPEN_ENDED[case]
    for encoded, ids, mask in both(tokenizer, template):
        assert encoded.ids == ids[: len(encoded.ids)]
        more = [a and not b for a, b in zip(encoded.supervised, mask, strict=False)]
        tokens = TOKENIZERS[tokenizer]().convert_ids_to_tokens(encoded.ids)
        learned = "".join(itertools.compress(tokens, more))
        answers = sum(begins and not before for before, begins in zip([False, *mask], mask, strict=False))
        assert learned.replace("\u2581", "").replace("\u0120", "") == end * answers
        assert all(a or not b for a, b in zip(encoded.supervised, mask, strict=False))


BARE = "message.content"


@pytest.mark.parametrize(
    "template", [written("{{- message.content -}}", other=BARE), marked(BARE, other=BARE)]
)
def test_the_opening_of_the_next_turn_is_no_end(template):
    """Behind an answer stands at once the next question's opening: only the last answer is ended, with EOS."""
    assert of_two_answers(template) == "worldpong</s>"


def of_two_answers(template):
    tokenizer = byte_tokenizer(template=template)
    return learned(tokenizer, load_template(tokenizer).encode(talk("hello", "world", "ping", "pong")))


def test_each_answer_is_learned_with_its_own_end_where_the_last_one_ends_differently():
    other = "('</s>' if loop.last and message.role == 'assistant' else '<|end|>') -"
    assert of_two_answers(HEADER_STYLE.replace("'<|end|>' -", other)) == "world<|end|>pong</s>"


def test_the_demo_learns_its_answers_and_their_ends_only():
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    tokenizer = byte_tokenizer(template=DEMO_TEMPLATE, **names)
    tokenizer.add_special_tokens({"extra_special_tokens": list(ROLE_TOKENS)})
    for turns in TALKS:
        encoded = load_template(tokenizer).encode(turns)
        assert (encoded.ids, encoded.supervised) == transformers_mask(tokenizer, turns)


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
