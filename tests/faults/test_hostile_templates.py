"""Chat templates that take all time or memory, or reach for Python's internals, end in an error for people."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import psutil
import pytest

from data.tiny_tokenizers import HEADER_STYLE, byte_tokenizer
from fitune.data.conversations import template_process
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.errors import DataError

_N = "{% set n = namespace(x='aa', y='bb') %}"
_L = "{% set n = namespace(x=[1]) %}"
_LONG = "('a' * 10**7)"

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "condition": "{% for i in range(99999) if (range(99999) | sum) < 0 %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "tree": "{% for x in [1, 1] recursive %}{% if loop.depth < 80 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "call": "{% macro m(n) %}{% if n %}{{ caller() }}{{ caller() }}{% endif %}{% endmacro %}"
    "{% macro k(n) %}{% if n %}{% call m(n) %}{{ k(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ k(50) }}",
    "power": "{{ 9**(9**9) }}",
    "power of a message": "{{ (messages | length + 9)**(9**9) }}",
    "sums": "{% for i in range(99999) %}{{ range(99999) | map('string') | map('length') | sum }}{% endfor %}",
    "sort": "{% for i in range(99999) %}{{ range(99999) | map('string') | sort | length }}{% endfor %}",
    "unique": "{% for i in range(99999) %}{{ range(99999) | unique | list | length }}{% endfor %}",
    "groupby": "{% for i in range(9999) %}{{ range(99999) | map('string') | groupby(0) | length }}{% endfor %}",
    "select in": "{{ range(99999) | select('in', range(99999) | list | reverse | list) | list | length }}",
    "equal trees": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "hash of a tree": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
    "{{ {n.x: 1} | length }}",
    "count": "{% for i in range(99999) %}{{ ('a' * (9999999 + i)).count('a') }}{% endfor %}",
    "urlize": "{% for i in range(9999) %}{{ ('http://a.b/(' * (9999 + i)) | urlize | length }}{% endfor %}",
    "striptags": "{% for i in range(9999) %}{{ ('<!--' * (99999 + i)) | striptags | length }}{% endfor %}",
    "wordwrap": "{% for i in range(9999) %}{{ ('a b ' * (99999 + i)) | wordwrap(3) | length }}{% endfor %}",
    "wordcount": "{% for i in range(9999) %}{{ ('a b ' * (99999 + i)) | wordcount }}{% endfor %}",
    "title": "{% for i in range(9999) %}{{ ('a b ' * (99999 + i)) | title | length }}{% endfor %}",
    "cycle": "{% for i in range(99999) %}{% for j in range(9999) %}{% set x = loop.cycle(1, 2) %}{% endfor %}"
    "{% endfor %}",
}

HUGE = {
    "text": "{{ 'a' * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "joined": _N + "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added": _N + "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "added lists": _L + "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "replaced": _N + "{% for i in 'abcde' %}{% set n.x = n.x.replace('', n.x) %}{% endfor %}",
    "replace": _N + "{% for i in 'abcde' %}{% set n.x = n.x | replace('', n.x) %}{% endfor %}",
    "captured": _N
    + "{% for i in range(99) %}{% set b %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = b %}{% endfor %}",
    "kept in lists": _L + "{% for i in range(99999) %}{% set n.x = n.x + [" + _LONG + " ~ i] %}{% endfor %}",
    "written": "{% for i in range(999) %}{{ " + _LONG + " }}{% endfor %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "format filter": "{{ '%0999999999d' | format(1) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "tojson": "{{ {'a': 1} | tojson(indent=10**10) }}",
    "tojson of a tree": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "text of a tree": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | string }}",
    "text of namespaces": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "pprint": "{{ (['a'] * 10**8) | pprint }}",
    "xmlattr": "{{ {'a': 'b' * 10**9} | xmlattr }}",
    "join": "{{ range(99999) | join('a' * 10**6) }}",
    "join method": "{{ ('a' * 10**6).join(['b'] * 99999) }}",
    "split": "{{ ('a ' * 10**8).split() }}",
    "map": "{{ range(99999) | map('string') | map('center', 10**5) | list }}",
    "dict": "{% set n = namespace(x={}) %}{% for i in range(99999) %}{% set n.x = dict(n.x, **{i | string: "
    + _LONG
    + " ~ i}) %}"
    "{% endfor %}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "escape": "{{ ('<' * 10**9) | escape | forceescape }}",
    "urlencode": "{{ ('<' * 10**9) | urlencode }}",
    "encode": "{{ ('a' * 10**9).encode('utf-32') | length }}",
}

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
    "undefined": "nothing.__class__.__init__.__globals__",
}
"""Inside of raise_exception(…), so that what they would find is shown."""

QUICK = {
    "loops", "power", "equal trees", "urlize", "text", "joined", "kept in lists", "batch", "slice", "xmlattr",
    "tojson of a tree",
}  # fmt: skip
"""One of each kind; the others run with -m slow."""


def cases(attacks: dict[str, str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in attacks]


@pytest.fixture(autouse=True, scope="module")
def little_memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "MEMORY_LIMIT_BYTES", 300 * 1024**2)
        template_process.end_child()
        yield
    template_process.end_child()


@pytest.fixture
def little_time(monkeypatch):
    """Too little on a slow machine for a template that ends."""
    monkeypatch.setattr(template_process, "CPU_LIMIT_S", 0.1)
    template_process.end_child()
    yield
    template_process.end_child()


@pytest.mark.parametrize("case", cases(ENDLESS))
def test_a_template_that_never_ends_is_stopped(case, little_time):
    with pytest.raises(DataError, match="was still running after 0.1 s|needs more than 300.0 MiB"):
        load_template(byte_tokenizer(template=ENDLESS[case]))


@pytest.mark.parametrize("case", cases(HUGE))
def test_a_template_that_grows_without_end_is_stopped(case, little_time):
    with pytest.raises(DataError, match="needs more than 300.0 MiB|was still running after 0.1 s"):
        load_template(byte_tokenizer(template=HUGE[case]))


@pytest.mark.parametrize("case", ESCAPES)
def test_pythons_internals_are_out_of_reach(case):
    with pytest.raises(DataError) as caught:
        load_template(byte_tokenizer(template="{{ raise_exception(" + ESCAPES[case] + ") }}"))
    assert re.search("unsafe|undefined|has no|template failed", caught.value.message)
    assert not re.search("<class|<module|<slot|<built-in|0x", caught.value.message)


def test_a_row_that_makes_the_template_endless_is_named_and_the_next_template_works(monkeypatch):
    monkeypatch.setattr(template_process, "CPU_LIMIT_S", 0.4)
    template_process.end_child()
    turn = "{% if 'spin' in message.content %}{{ (message.content | length)**(9**9) }}{% endif %}"
    template = load_template(
        byte_tokenizer(template=HEADER_STYLE.replace("-%}\n{{-", "-%}" + turn + "\n{{-", 1))
    )
    good, bad = (
        Conversation((Message("user", text), Message("assistant", "yo")), f"rows.jsonl:{number}")
        for number, text in ((1, "hi"), (2, "spin"))
    )
    rows = template.lay_out_rows([good, good, bad, good])
    assert next(rows) == next(rows)
    with pytest.raises(DataError, match=r"^rows.jsonl:2: the tokenizer's chat template was still running"):
        next(rows)
    assert template.encode(good) == load_template(byte_tokenizer(template=HEADER_STYLE)).encode(good)


def test_the_process_of_templates_knows_no_secret_and_has_its_limits(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    template_process.end_child()
    load_template(byte_tokenizer(template=HEADER_STYLE))
    children = [
        each
        for each in psutil.Process().children()
        if "fitune.data.conversations.template_process" in each.cmdline()
    ]
    assert len(children) == 1
    assert "SECRET_TOKEN" not in children[0].environ()
    assert children[0].rlimit(psutil.RLIMIT_AS)[1] == 300 * 1024**2
    assert children[0].rlimit(psutil.RLIMIT_FSIZE)[1] == 0


def test_a_child_that_was_killed_is_started_anew():
    template = load_template(byte_tokenizer(template=HEADER_STYLE))
    row = Conversation((Message("user", "hi"), Message("assistant", "yo")), "row 1")
    before = template.encode(row)
    for each in psutil.Process().children():
        if "fitune.data.conversations.template_process" in each.cmdline():
            each.kill()
    assert template.lay_out_rows([row, row])
    assert template.encode(row) == before


_ALL = """
import json, resource, sys
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations import template_process
from fitune.data.conversations.templates import load_template
from fitune.errors import DataError
template_process.CPU_LIMIT_S = 0.5
load_template(byte_tokenizer())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for template in json.load(sys.stdin):
    try:
        load_template(byte_tokenizer(template=template))
    except DataError:
        pass
    else:
        sys.exit(f"accepted: {template}")
template_process.end_child()
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(own * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_all_of_them_stay_within_a_gigabyte():
    attacks = [*ENDLESS.values(), *HUGE.values(), *ESCAPES.values()]
    done = subprocess.run(
        [sys.executable, "-c", _ALL], input=json.dumps(attacks), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    own, childs = map(int, done.stdout.split())
    assert childs < 10**9
    assert own < 10**9
