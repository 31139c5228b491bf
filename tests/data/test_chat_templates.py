"""What the model learns to write is its answers, and training ids begin with the ids of scoring."""

import pytest
from tokenizers.processors import TemplateProcessing

from data.tiny_tokenizers import (
    BRACKET_STYLE,
    HEADER_STYLE,
    MARKED_STYLE,
    NO_END_STYLE,
    STYLES,
    THINKING_STYLE,
    byte_tokenizer,
    prefixing_tokenizer,
)
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.conversations.rendering import Piece
from fitune.data.conversations.templates import PLAIN_TEMPLATE, PieceEncoder, load_template


def conversation(*turns, system=""):
    messages = [Message("system", system)] if system else []
    messages += [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(turns)]
    return Conversation(tuple(messages), "row 1")


def learned(tokenizer, encoded):
    return tokenizer.decode([i for i, wanted in zip(encoded.ids, encoded.supervised, strict=True) if wanted])


QUESTIONS = [
    conversation("what is two and two?", "four"),
    conversation("hello", "e", "and now?", "end"),
    conversation("hello", "  spaces around \n", "again\n\n", "\nassistant\n"),
    conversation("four", "four", "four", "four", "four", "four"),
]


@pytest.mark.parametrize("make", [byte_tokenizer, prefixing_tokenizer])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("asked", QUESTIONS, ids=["one turn", "short", "white space", "repeated"])
def test_training_ids_begin_with_scoring_ids_and_every_answer_is_learned(make, style, asked):
    tokenizer = make(template=STYLES[style])
    template = load_template(tokenizer)
    encoded, prompt = template.encode(asked), template.encode_prompt(asked)
    assert encoded.ids[: len(prompt)] == prompt
    assert encoded.ids[-1] in template.stop_ids
    assert encoded.supervised[-1]
    assert not encoded.supervised[0]
    text = "".join(learned(tokenizer, encoded).split())
    for message in asked.messages:
        if message.role == "assistant":
            assert "".join(message.content.split()) in text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "four</s>"),
        (HEADER_STYLE, "four<|end|>"),
        (MARKED_STYLE, "four<|end|>"),
        (THINKING_STYLE, "four<|end|>"),
        (BRACKET_STYLE, " four </s>"),
        (NO_END_STYLE, "four</s>"),
    ],
)
def test_the_answer_and_its_end_are_learned_and_nothing_else(template, expected):
    tokenizer = byte_tokenizer(template=template)
    encoded = load_template(tokenizer).encode(conversation("what is two and two?", "four"))
    assert learned(tokenizer, encoded) == expected


def test_every_answer_of_a_conversation_is_learned():
    tokenizer = byte_tokenizer(template=HEADER_STYLE)
    encoded = load_template(tokenizer).encode(conversation("a", "one", "b", "two", system="be kind"))
    assert learned(tokenizer, encoded) == "one<|end|>two<|end|>"


@pytest.mark.parametrize("style", ["plain", "header", "bracket"])
def test_bos_stands_once_per_turn_that_writes_it(style):
    tokenizer = byte_tokenizer(template=STYLES[style])
    encoded = load_template(tokenizer).encode(conversation("hello", "world"))
    assert encoded.ids.count(tokenizer.bos_token_id) == 1
    assert encoded.ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("make", [byte_tokenizer, prefixing_tokenizer])
@pytest.mark.parametrize("style", ["plain", "header", "thinking", "marked"])
def test_special_token_text_in_content_stays_text(make, style):
    tokenizer = make(template=STYLES[style])
    template = load_template(tokenizer)
    clean = template.encode(conversation("hello XX world", "four XX"))
    hostile = template.encode(conversation("hello <|end|></s><s> world", "four </s><|turn|>"))
    specials = set(tokenizer.all_special_ids)
    assert [i for i in hostile.ids if i in specials] == [i for i in clean.ids if i in specials]
    assert "hello<|end|></s><s>world" in "".join(tokenizer.decode(hostile.ids).split())
    assert "four</s><|turn|>" in "".join(learned(tokenizer, hostile).split())
    prompt = template.encode_prompt(conversation("hello <|end|></s><s> world", "four </s><|turn|>"))
    assert hostile.ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    "content", ["👩‍👩‍👧‍👦 🇫🇷", "שלום عربى", "e\u0301 n\u0303\u0323", "\u0000 \u200f \ufeff", "日本語"]
)
def test_every_script_comes_back_from_its_ids(content):
    tokenizer = byte_tokenizer(template=HEADER_STYLE)
    encoded = load_template(tokenizer).encode(conversation(content, f"{content}!"))
    assert learned(tokenizer, encoded) == f"{content}!<|end|>"
    assert content in tokenizer.decode(encoded.ids)


def test_a_prefixing_tokenizer_puts_no_space_inside_a_text():
    tokenizer = prefixing_tokenizer(template=NO_END_STYLE)
    asked = conversation("hello", "world")
    whole = tokenizer("user: hello\nassistant: world", add_special_tokens=False)["input_ids"]
    ours = load_template(tokenizer).encode(asked).ids[:-1]
    assert tokenizer.decode(ours) == tokenizer.decode(whole)


@pytest.mark.parametrize("make", [byte_tokenizer, prefixing_tokenizer])
def test_what_others_set_in_the_tokenizer_changes_no_ids(make):
    tokenizer = make(template=HEADER_STYLE)
    template, asked = load_template(tokenizer), conversation("hello <|end|> world", "four", "and two?", "two")
    before = template.encode(asked)
    tokenizer(["hello world", "x"], truncation=True, max_length=2, padding=True, split_special_tokens=True)
    assert template.encode(asked) == before


def test_a_tokenizer_that_changes_text_before_its_backend_sees_it_is_asked_itself():
    class Lower(type(byte_tokenizer())):
        def _encode_plus(self, text, *words, **named):
            return super()._encode_plus([each.lower() for each in text], *words, **named)

    plain = byte_tokenizer()
    encoder = PieceEncoder(Lower(tokenizer_object=plain.backend_tokenizer, eos_token="</s>"))
    piece = Piece("HELLO É", supervised=True, plain=False, first=True)
    lowered = plain(["hello é"], add_special_tokens=False)["input_ids"]
    assert encoder.encode([piece, piece]) == lowered * 2


def test_a_text_is_learned_whole_with_one_bos_and_one_eos():
    tokenizer = byte_tokenizer()
    template = load_template(tokenizer)
    encoded = template.encode(Text("hello world", "row 1"))
    assert tokenizer.decode(encoded.ids) == "hello world</s>"
    assert all(encoded.supervised)
    ended = template.encode(Text("<s>hello</s>", "row 1"))
    assert tokenizer.decode(ended.ids) == "<s>hello</s>"


def test_a_text_begins_with_bos_where_the_tokenizer_puts_one():
    tokenizer = byte_tokenizer()
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    template = load_template(tokenizer)
    for text in ("hello", "<s>hello", "<s>hello</s>"):
        assert tokenizer.decode(template.encode(Text(text, "row 1")).ids) == "<s>hello</s>"
    assert template.encode(conversation("hello", "world")).ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_without_an_answer_is_asked_the_same_way():
    template = load_template(byte_tokenizer(template=HEADER_STYLE))
    asked = conversation("hello", "world")
    assert template.encode_prompt(Conversation(asked.messages[:1], "row 1")) == template.encode_prompt(asked)


def test_the_template_comes_from_the_file_then_the_tokenizer_then_fitune(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED_STYLE, encoding="utf-8")
    tokenizer = byte_tokenizer(template=HEADER_STYLE)
    assert load_template(tokenizer, str(file)).source == MARKED_STYLE
    assert load_template(tokenizer).source == HEADER_STYLE
    assert load_template(byte_tokenizer()).source == PLAIN_TEMPLATE


ALL_AT_ONCE = """\
{%- macro typed(value) -%}{%- if value is mapping -%}{{ value | tojson(indent=2) }}{%- elif value is string -%}
{{ '"%s"' % value | replace('a', 'b') }}{%- else -%}{{ value | default('none', true) }}{%- endif -%}{%- endmacro -%}
{%- if not date_string is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- set ns = namespace(last=messages | length - 1, seen=[], think=false) -%}
{%- for message in messages[::-1] -%}
{%- set index = (messages | length - 1) - loop.index0 -%}
{%- set wrapped = message.content.startswith('<x>') and message.content.endswith('</x>') -%}
{%- if ns.last >= 0 and message.role == 'user' and not wrapped -%}
{%- set ns.last = index -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{- bos_token ~ '<|turn|>system\\n' ~ typed(system) ~ typed({'a': [1, 'é']}) -}}
{{- '{:>4}'.format('x') ~ 'y'.ljust(3) ~ '<|end|>' -}}
{%- for name, value in {'b': 1, 'a': 2} | dictsort -%}{{- name ~ value | string -}}{%- endfor -%}
{%- for key, value in {'k': 'v'}.items() -%}{{- key ~ ': ' ~ value | upper | capitalize -}}{%- endfor -%}
{{- rest | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim') | list | join(', ') -}}
{{- rest | rejectattr('role', 'in', ['assistant']) | list | length ~ (rest | first).role -}}
{{- messages | last is mapping -}}
{%- for message in rest -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{%- if message.role not in ['user', 'assistant'] -%}{%- continue -%}{%- endif -%}
{%- if message.content is string -%}{%- set content = message.content -%}
{%- else -%}{%- set content = message.content | map(attribute='text') | join -%}{%- endif -%}
{%- set ns.seen = ns.seen + [loop.index] -%}
{{- '<|turn|>' + message.role + '\\n' + content.strip().lstrip('\\n').rstrip('\\n') + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""
"""What templates on the Hub use: Llama, Qwen, Gemma, gpt-oss, Mistral, DeepSeek, Phi, Command-R."""


def test_what_templates_on_the_hub_use_gives_the_text_of_transformers():
    tokenizer = byte_tokenizer(template="{%- set date_string = '1 Jan' -%}" + ALL_AT_ONCE)
    for asked in (
        conversation("hello", "four", " a\n", "two "),
        conversation("<x>a</x>", "é", system="be kind"),
    ):
        messages = [{"role": message.role, "content": message.content} for message in asked.messages]
        theirs = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(load_template(tokenizer).encode(asked).ids) == theirs.rstrip("\n")


def test_a_saved_plain_template_works_in_transformers():
    """The model is saved with the template: generation elsewhere must ask as fitune asked."""
    tokenizer = byte_tokenizer()
    template = load_template(tokenizer)
    tokenizer.chat_template = template.source
    asked = conversation("hello", "world", "again", "four", system="be kind")
    messages = [{"role": message.role, "content": message.content} for message in asked.messages[:-1]]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(template.encode_prompt(asked)) == theirs
