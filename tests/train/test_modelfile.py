"""Ollama's Modelfile: a template in its language that says what the Jinja one says, or none."""

import re
import shutil

import pytest

import fitune
from data import tiny_tokenizers
from data.answer_templates import COHERE2, tokenizer_of
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import PLAIN_TEMPLATE, load_template
from fitune.train.export import modelfile, ollama_template

DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' -%}{{- '<|turn|>system\\nYou help.<|end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""
"""Qwen2.5's way: a system message of its own where there is none."""

SYSTEM_IN_QUESTION = """\
{{- bos_token -}}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
{{- '<|turn|>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
{{- (first if loop.first else '') + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>model\\n' -}}{%- endif -%}
"""
"""Gemma 3's way: the system message begins the first question."""

COUNTS_TURNS = """\
{%- for message in messages -%}
{{- '<|turn|>' ~ message.role ~ (loop.index if message.role == 'user' else '') + '\\n' + message.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}
"""

NO_SYSTEM = (tiny_tokenizers.NO_SYSTEM_STYLE, tiny_tokenizers.BRACKET_STYLE)
ROLES = ("user", "assistant", "user", "assistant", "user", "assistant", "user")
TALKS = [
    [*start, *(Message(role, f"{role} says {n}!") for n, role in enumerate(ROLES[:count]))]
    for start in ([], [Message("system", "Be kind.\nAlways.")]) for count in (1, 3, 7)
]  # fmt: skip


def executed(template, messages):
    """What Go's text/template makes of the few actions that are used here."""
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    tokens = re.split(r"\{\{ (.*?) \}\}", template)

    def run(place, on, scope, out):
        """Read on from ``place`` to the matching end or else; write where ``on``."""
        while place < len(tokens):
            if place % 2 == 0:
                out.append(tokens[place] if on else "")
                place += 1
                continue
            action = tokens[place]
            if action.startswith("range"):
                begin = place + 1
                for i, message in enumerate(messages):
                    place = run(begin, on, (i, message), out)
            elif action.startswith("if "):
                is_done, holds = False, holding(action[3:], scope)
                while True:
                    place = run(place + 1, on and holds and not is_done, scope, out)
                    is_done = is_done or holds
                    if tokens[place] == "end":
                        break
                    holds = tokens[place] == "else" or holding(tokens[place][8:], scope)
            elif action == ".Content":
                out.append(scope[1].content if on else "")
            else:
                return place
            place += 1
        return place

    def holding(condition, scope):
        if scope is None:
            return False
        i, message = scope
        role = re.fullmatch(r'eq \.Role "(\w+)"', condition)
        if role:
            return message.role == role[1]
        number = re.search(r"eq \$i (\d)", condition)
        return i == int(number[1]) and ("$.System" not in condition or bool(system))

    out = []
    run(0, True, None, out)
    return "".join(out)


@pytest.mark.parametrize("style", [
    PLAIN_TEMPLATE, DEFAULT_SYSTEM, SYSTEM_IN_QUESTION, tiny_tokenizers.HEADER_STYLE, tiny_tokenizers.THINKING_STYLE,
    *NO_SYSTEM, COHERE2,
])  # fmt: skip
def test_ollamas_words_give_the_prompts_of_the_template(style):
    tokenizer = byte_tokenizer(template=style) if isinstance(style, str) else tokenizer_of(style)
    template = load_template(tokenizer)
    said = ollama_template(tokenizer, template)
    assert said
    for messages in TALKS:
        if messages[0].role == "system" and style in NO_SYSTEM:
            continue  # refused or forgotten there, left out here
        assert executed(said, messages) == template.prompt_text(Conversation(tuple(messages), "t"))


def test_a_bos_that_the_tokenizer_adds_is_left_to_it():
    tokenizer = byte_tokenizer(template=tiny_tokenizers.HEADER_STYLE)
    assert "{{ if eq $i 0 }}<s><|turn|>user" in ollama_template(tokenizer, load_template(tokenizer))
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    said = ollama_template(tokenizer, load_template(tokenizer))
    assert "{{ if eq $i 0 }}<|turn|>user" in said
    assert "<s>" not in said


@pytest.mark.parametrize("style", [
    COUNTS_TURNS,
    DEFAULT_SYSTEM.replace("You help.", "Write {{ x }}.").replace("'<|turn|>system", "\"<|turn|>system").replace(
        "<|end|>\\n' -}}{%- endif", "<|end|>\\n\" -}}{%- endif", 1),
])  # fmt: skip
def test_what_its_language_does_not_say_is_left_out(style):
    tokenizer = byte_tokenizer(template=style)
    template = load_template(tokenizer)
    assert ollama_template(tokenizer, template) == ""
    text = modelfile("LlamaForCausalLM", tokenizer, template, has_vocabulary_file=False)
    assert 'TEMPLATE """' not in text
    assert text.startswith("FROM .\nPARAMETER stop ")


def test_what_ollama_does_not_import_has_no_modelfile():
    tokenizer = byte_tokenizer(template=PLAIN_TEMPLATE)
    template = load_template(tokenizer)
    assert modelfile("GPTNeoXForCausalLM", tokenizer, template, has_vocabulary_file=False) == ""
    assert modelfile("LlamaForCausalLM", tokenizer, template, has_vocabulary_file=False)
    words = tiny_tokenizers.prefixing_tokenizer(template=PLAIN_TEMPLATE)
    template = load_template(words)
    assert modelfile("LlamaForCausalLM", words, template, has_vocabulary_file=False) == ""
    assert modelfile("LlamaForCausalLM", words, template, has_vocabulary_file=True)


def test_a_whole_model_has_its_modelfile_and_vocabulary_and_an_adapter_none(settings, tmp_path):
    base = shutil.copytree(settings["model"], tmp_path / "base")
    (base / "tokenizer.model").write_bytes(b"sentences")
    fitune.train(**settings | {"model": str(base), "max_steps": 1})
    assert not (tmp_path / "run/adapter/Modelfile").exists()
    folder = fitune.export(tmp_path / "run").path
    assert (folder / "tokenizer.model").read_bytes() == b"sentences"
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == ["FROM .", 'PARAMETER stop "</s>"']
    assert lines[2].startswith('TEMPLATE """{{ range $i, $m := .Messages }}')
