"""Rows in every shape, files with bytes damaged, chat templates of any pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.conftest import settings_of
from fuzz.hostile import TEXTS, as_json, changed, damaged, nested_json

pytestmark = pytest.mark.fuzz

ROWS = (
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello there"}]},
    {"instruction": "say", "input": "hi", "output": "hello there"},
    {"prompt": "hi", "completion": "hello there"},
    {"question": "hi", "answer": "hello there"},
    {"text": "hello there"},
)


@given(st.sampled_from(ROWS).flatmap(changed), st.sampled_from(ROWS))
def test_odd_rows(
    orderly,
    model_folder,
    tmp_path_factory,
    odd,
    right,
):
    lines = [as_json(row).encode() for row in (right, odd, right)]
    _train(orderly, model_folder, tmp_path_factory, "rows.jsonl", b"\n".join(lines))


@given(st.sampled_from(ROWS), st.data())
def test_damaged_rows(
    orderly,
    model_folder,
    tmp_path_factory,
    row,
    data,
):
    suffix = data.draw(st.sampled_from(["jsonl", "json", "csv"]))
    whole = {
        "jsonl": b"\n".join([json.dumps(row).encode()] * 4),
        "json": json.dumps([row] * 4).encode(),
        "csv": "\n".join([",".join(row), *[",".join(f'"{value}"' for value in row.values())] * 4]).encode(),
    }[suffix]
    content = data.draw(st.one_of(damaged(whole), st.just(nested_json(100_000).encode())))
    _train(orderly, model_folder, tmp_path_factory, f"rows.{suffix}", content)


PIECES = st.sampled_from(
    [
        "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0]['content'] }}",
        "{{ eos_token }}", "{% generation %}", "{% endgeneration %}", "{% set x = x ~ x %}", "{% set x = messages %}",
        "{{ x|join }}", "{{ messages|tojson(indent=4) }}",
        "{{ messages|map(attribute='content')|join }}", "{{ ''.__class__.__mro__ }}", "{{ x|attr('__class__') }}",
        "{{ cycler.__init__.__globals__ }}", "{{ '%d' % 'a' }}",
        "{{ dict(a=1)|dictsort|pprint }}", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}", "{{ f(1) }}",
        "{% include 'x' %}",
        "{{ raise_exception('no') }}", "{% set ns = namespace(x=[]) %}", "{% if x %}", "{% endif %}",
        "{% set ns.x = ns.x + ns.x + [1] %}", "{{ x|groupby(0)|list }}", "{% call f(1) %}{% endcall %}",
        "{{ strftime_now('%Y') }}", "{{ 'x'|urlize }}", "{{ messages|xmlattr }}",
    ]
)  # fmt: skip


@given(st.lists(st.one_of(PIECES, TEXTS), min_size=1, max_size=8).map("".join))
def test_odd_templates(
    orderly,
    model_folder,
    data_file,
    tmp_path_factory,
    template,
):
    base = tmp_path_factory.getbasetemp()
    file = base / "template.jinja"
    file.write_bytes(template.encode("utf-8", "surrogatepass"))
    words = settings_of(model_folder, data_file, base / "template-run", max_steps=1, chat_template=file)
    orderly("train", "--overwrite", *words)


def _train(orderly, model, tmp_path_factory, name, content):
    base = tmp_path_factory.getbasetemp()
    (base / name).write_bytes(content)
    words = settings_of(model, base / name, base / "data-run", max_steps=1)
    orderly("train", "--overwrite", *words)
