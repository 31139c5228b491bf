"""Chat templates that reach for Python's internals, or fail on one row, end in an error for people. Those that do not
work at all: test_data_faults.py."""

import re
from datetime import datetime

import pytest

from data.tiny_tokenizers import HEADER_STYLE, MARKED_STYLE, byte_tokenizer
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.errors import DataError

ESCAPES = {
    "class": "''.__class__.__mro__",
    "globals": "cycler.__init__.__globals__.os.system('true')",
    "attr": "('' | attr('__class__')).mro()",
    "format": "'{0.__class__.__mro__}'.format('')",
    "format_map": "'{a.__class__.__mro__}'.format_map({'a': ''})",
    "format filter": "'{0.__class__}' | format('') | attr('__class__')",
    "map attribute": "[''] | map(attribute='__class__') | map(attribute='__mro__') | list | first | first",
    "item": "''['__class__']['__mro__']",
    "self": "self.__init__.__globals__",
    "context": "self._TemplateReference__context.environment",
    "namespace": "namespace.__init__.__globals__",
    "generator": "(messages | map('upper')).gi_frame.f_globals",
    "joiner": "joiner.__init__.__builtins__",
    "function": "raise_exception.__globals__",
    "method": "''.join.__self__.__class__",
    "range": "range.__init__.__objclass__",
    "append": "messages.append(1)",
    "generic alias": "dict['a'].mro()",
    "undefined": "nothing.__class__.__init__.__globals__",
}
"""Inside of raise_exception(…), so that what they would find is shown."""


@pytest.mark.parametrize("case", ESCAPES)
def test_pythons_internals_are_out_of_reach(case):
    with pytest.raises(DataError) as caught:
        load_template(byte_tokenizer(template="{{ raise_exception(" + ESCAPES[case] + ") }}"))
    assert re.search("unsafe|undefined|has no|not subscriptable|template failed", caught.value.message)
    assert not re.search("<class|<module|<slot|<built-in|0x", caught.value.message)


def with_turn(what):
    """HEADER_STYLE that does ``what`` first in every turn."""
    return HEADER_STYLE.replace("-%}\n{{-", "-%}" + what + "\n{{-", 1)


def row(number, text):
    return Conversation((Message("user", text), Message("assistant", "yo")), f"rows.jsonl:{number}")


def test_a_row_on_which_the_template_fails_is_named_with_it_and_the_others_are_laid_out():
    turn = "{% if message.content == 'bad' %}{{ message.nothing.at_all }}{% endif %}"
    template = load_template(byte_tokenizer(template=with_turn(turn)))
    good, bad, last = template.lay_out_rows([row(1, "hi"), row(2, "bad"), row(3, "hi")])
    assert good == last == load_template(byte_tokenizer(template=HEADER_STYLE)).lay_out(row(1, "hi"))
    assert bad.message.startswith(
        "rows.jsonl:2: the template failed: the tokenizer's chat template: 'dict object' has no attribute"
    )


def test_a_template_changes_nothing_for_those_that_transformers_renders():
    """They share one environment of transformers."""
    template = "{% generation %}{{ [strftime_now('%Y')] | random }}{% endgeneration %}"
    load_template(byte_tokenizer(template="{{ strftime_now('%Y') }}" + MARKED_STYLE))
    theirs = byte_tokenizer(template=template).apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False
    )
    assert theirs == str(datetime.now().year)
