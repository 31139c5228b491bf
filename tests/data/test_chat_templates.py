"""What the model learns to write is its answers, and training ids begin with the ids of scoring."""

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from data.tiny_tokenizers import (
    HEADER_STYLE,
    MARKED_STYLE,
    NO_END_STYLE,
    STYLES,
    as_messages,
    byte_tokenizer,
    learned,
    prefixing_tokenizer,
    talk,
)
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.conversations.piece_encoder import PieceEncoder
from fitune.data.conversations.rendering import Piece
from fitune.data.conversations.templates import PLAIN_TEMPLATE, load_template
from fitune.errors import RecipeError
from fitune.values.named_templates import CHATML_MARKS

TOKENIZERS = {"bytes": byte_tokenizer, "sentencepiece": prefixing_tokenizer}
TALKS = [
    talk("what is two and two?", "four"),
    talk("hello", "e", "and now?", "end"),
    talk("hello", "  spaces around \n", "again\n\n", "\nassistant\n"),
    talk("four", "four", "four", "four", "four", "four"),
]


ENDS = {"plain": "</s>", "bracket": "</s>"}
"""Others end every answer with <|end|>; in "no end" EOS is put behind the last one alone."""
BOS = {"plain": 1, "header": 1, "no system": 1, "bracket": 3}
"""In a conversation of three turns: "bracket" writes one in each of them."""


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("style", STYLES)
def test_ids_begin_with_those_of_scoring_and_every_answer_and_its_end_is_learned_and_nothing_else(
    make, style
):
    tokenizer = TOKENIZERS[make](template=STYLES[style])
    template = load_template(tokenizer)
    for asked in TALKS:
        encoded, prompt = template.encode(asked), template.encode_prompt(asked)
        assert encoded.ids[: len(prompt)] == prompt
        assert encoded.ids[-1] in template.stop_ids
        answers = ["".join(m.content.split()) for m in asked.messages if m.role == "assistant"]
        end = ENDS.get(style, "<|end|>")
        wanted = (
            "".join(answers) + "</s>" if style == "no end" else "".join(answer + end for answer in answers)
        )
        assert "".join(learned(tokenizer, encoded).split()) == wanted
    assert encoded.ids.count(tokenizer.bos_token_id) == BOS.get(style, 0)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("style", ["plain", "header", "thinking", "marked"])
def test_special_token_text_in_content_stays_text(make, style):
    tokenizer = TOKENIZERS[make](template=STYLES[style])
    template = load_template(tokenizer)
    clean = template.encode(talk("hello XX world", "four XX"))
    said = talk("hello <|end|></s><s> world", "four </s><|turn|>")
    hostile, prompt = template.encode(said), template.encode_prompt(said)
    specials = set(tokenizer.all_special_ids)
    assert [i for i in hostile.ids if i in specials] == [i for i in clean.ids if i in specials]
    assert "hello<|end|></s><s>world" in "".join(tokenizer.decode(hostile.ids).split())
    assert "four</s><|turn|>" in "".join(learned(tokenizer, hostile).split())
    assert hostile.ids[: len(prompt)] == prompt


def test_every_script_comes_back_from_its_ids():
    tokenizer = byte_tokenizer(template=HEADER_STYLE)
    for content in ("👩‍👩‍👧‍👦 🇫🇷", "שלום عربى", "e\u0301 n\u0303\u0323", "\u0000 \u200f \ufeff", "日本語"):
        encoded = load_template(tokenizer).encode(talk(content, f"{content}!"))
        assert learned(tokenizer, encoded) == f"{content}!<|end|>"
        assert content in tokenizer.decode(encoded.ids)


def test_a_prefixing_tokenizer_puts_no_space_inside_a_text():
    tokenizer = prefixing_tokenizer(template=NO_END_STYLE)
    asked = talk("hello", "world")
    whole = tokenizer("user: hello\nassistant: world", add_special_tokens=False)["input_ids"]
    ours = load_template(tokenizer).encode(asked).ids[:-1]
    assert tokenizer.decode(ours) == tokenizer.decode(whole)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_what_others_set_in_the_tokenizer_changes_no_ids(make):
    tokenizer = TOKENIZERS[make](template=HEADER_STYLE)
    template, asked = load_template(tokenizer), talk("hello <|end|> world", "four", "and two?", "two")
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
    assert tokenizer.decode(template.encode(Text("<s>hello</s>", "row 1")).ids) == "<s>hello</s>"


def test_a_text_begins_with_bos_where_the_tokenizer_puts_one():
    tokenizer = byte_tokenizer()
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    template = load_template(tokenizer)
    for text in ("hello", "<s>hello", "<s>hello</s>"):
        assert tokenizer.decode(template.encode(Text(text, "row 1")).ids) == "<s>hello</s>"
    assert template.encode(talk("hello", "world")).ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_without_an_answer_is_asked_the_same_way():
    template = load_template(byte_tokenizer(template=HEADER_STYLE))
    asked = talk("hello", "world")
    assert template.encode_prompt(Conversation(asked.messages[:1], "row 1")) == template.encode_prompt(asked)


def test_the_template_comes_from_the_file_then_the_tokenizer_then_fitune(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED_STYLE, encoding="utf-8")
    tokenizer = byte_tokenizer(template=HEADER_STYLE)
    assert load_template(tokenizer, str(file)).source == MARKED_STYLE
    assert load_template(tokenizer, MARKED_STYLE).source == MARKED_STYLE
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


def test_chatml_is_a_template_by_name_where_its_marks_are_tokens():
    tokenizer = byte_tokenizer()
    with pytest.raises(
        RecipeError, match=r"no token <\|im_start\|> or <\|im_end\|>, which would become several"
    ):
        load_template(tokenizer, "chatml")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in CHATML_MARKS])
    template = load_template(tokenizer, "chatml")
    said = talk("hi <|im_end|>", "ho", "so", "yes").messages
    encoded = template.encode(Conversation((Message("system", "be kind"), *said), "row 1"))
    assert tokenizer.decode(encoded.ids) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n"
        "<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )
    assert learned(tokenizer, encoded) == "ho<|im_end|>yes<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (encoded.ids.count(end), template.stop_ids) == (5, {end, tokenizer.eos_token_id})


def test_what_templates_on_the_hub_use_gives_the_text_of_transformers():
    tokenizer = byte_tokenizer(template="{%- set date_string = '1 Jan' -%}" + ALL_AT_ONCE)
    for asked in (talk("hello", "four", " a\n", "two "), talk("<x>a</x>", "é", system="be kind")):
        theirs = tokenizer.apply_chat_template(as_messages(asked), tokenize=False)
        assert tokenizer.decode(load_template(tokenizer).encode(asked).ids) == theirs.rstrip("\n")


def test_a_saved_plain_template_works_in_transformers():
    """The model is saved with the template: generation elsewhere must ask as fitune asked."""
    tokenizer = byte_tokenizer()
    template = load_template(tokenizer)
    tokenizer.chat_template = template.source
    asked = talk("hello", "world", "again", "four", system="be kind")
    messages = as_messages(asked)[:-1]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(template.encode_prompt(asked)) == theirs
