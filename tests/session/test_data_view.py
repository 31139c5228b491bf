"""`fitune data` shows rows as training reads them: the same tokens, the same account."""

import json
import sys
from dataclasses import replace

import pytest

from cli.test_progress_lines import Terminal as Tty
from data.tiny_tokenizers import THINKING_STYLE
from fitune.recipe.recipe import parse_recipe
from fitune.session.data_view import explain_data, view_data, write_data_page
from fitune.session.events import Note
from jsonl import write_lines


def view(model, data, *, told=None, rows=2, **settings):
    recipe = parse_recipe({"model": str(model), "data": [str(data)], "seq_len": 64, **settings})
    return view_data(recipe, rows=rows, emit=(told if told is not None else []).append)


def test_what_is_learned_is_marked(model_folder, data_file, monkeypatch):
    shown = view(model_folder, data_file)
    first = shown.rows[0]
    assert [part.is_learned for part in first.parts] == [False, True]
    assert "What is 2 plus 3?" in first.parts[0].text
    assert sum(bar.rows for bar in shown.lengths) == shown.train.rows_kept == 56
    assert str(replace(shown.lengths[0], shortest=47, longest=47)) == "47"
    assert str(replace(shown.lengths[0], shortest=940, longest=1047)) == "940–1,047"
    text = explain_data(shown)
    assert "»2 plus 3 is 5, and that is all." in text
    assert f"{first.tokens:,} tokens, {first.learned:,} learned" in text
    monkeypatch.setattr(sys, "stdout", Tty())
    assert "\033[32m2 plus 3" in explain_data(shown)


def test_a_long_row_is_shown_by_its_beginning_and_its_end(model_folder, tmp_path):
    asked = " ".join(f"word{number}" for number in range(2_000))
    write_lines(tmp_path / "rows.jsonl", [{"question": asked, "answer": "2 plus 3 is 5"}] * 2)
    shown = view(model_folder, tmp_path / "rows.jsonl", seq_len=30_000, rows=1)
    text = explain_data(shown)
    assert len(text) < 4_000
    assert all(shown in text for shown in ("word7 ", "word1999", "»2 plus 3 is 5", "--html FILE or --json"))
    assert "word1000" not in text
    whole = max(len(part.text) for part in shown.rows[0].parts)
    assert f"… {whole - 2_000:,} characters more" in text


def test_cut_and_dropped_rows_are_shown_with_the_reason(model_folder, tmp_path):
    file, told = tmp_path / "rows.jsonl", []
    asked = "What is 2 plus 3?"
    pairs = (asked, "2 plus 3 is 5, and that is all. " * 9), (asked * 30, "5"), (asked, ""), (asked, "5")
    write_lines(file, [{"question": question, "answer": answer} for question, answer in pairs])
    file.write_text(f"{file.read_text()}torn\n")
    shown = view(model_folder, file, told=told, rows=5)
    stopped = [event.text for event in told if isinstance(event, Note)]
    assert any("rows.jsonl:3" in line for line in stopped), "training would stop at the empty answer"
    assert len(shown.rows) == 2
    cut, no_answer, empty, torn = shown.cut_or_dropped
    assert cut.kept == 64 < cut.tokens
    assert no_answer.why_not == "no answer left after truncation"
    assert empty.where.endswith("rows.jsonl:3")
    assert f"{empty.where}: dropped: " in explain_data(shown)
    assert f"{torn.where}: dropped: not JSON" in explain_data(shown)
    assert torn.where.endswith("rows.jsonl:5")


@pytest.mark.parametrize("learn", [False, True])
def test_reasoning_that_the_template_leaves_out_and_empty_blocks_are_told(model_folder, tmp_path, learn):
    (tmp_path / "thinking.jinja").write_text(THINKING_STYLE)
    turns = [("user", "What is 2 plus 3?"), ("assistant", "<think>two and three</think>5")]
    rows = [[*turns, ("user", "So?"), ("assistant", "5")], turns]
    talks = [[{"role": role, "content": text} for role, text in row] for row in rows]
    file = write_lines(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    own = {"chat_template": str(tmp_path / "thinking.jinja"), "train_on_empty_thinking": learn}
    shown = view(model_folder, file, seq_len=512, **own)
    left_out, empty = shown.notes
    assert left_out.startswith("1 answer of the first 2 rows: the template leaves out the reasoning")
    assert empty.startswith("1 answer of the first 2 rows: the template puts an empty thinking block there")
    assert ("it is learned" in empty) == learn
    assert ("<think>" in "".join(part.text for part in shown.rows[0].parts if part.is_learned)) == learn
    assert left_out in explain_data(shown)
    assert left_out in write_data_page(shown, tmp_path / "data.html").read_text()


def test_the_page_escapes_what_rows_say(model_folder, tmp_path):
    hostile = {"question": "<script>alert(1)</script>", "answer": "\x1b[2J<b>5</b>"}
    shown = view(model_folder, write_lines(tmp_path / "rows.jsonl", [hostile]), seq_len=256)
    page = write_data_page(shown, tmp_path / "data.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in explain_data(shown)


@pytest.mark.parametrize("packing", [False, True])
def test_packs_are_counted_as_training_counts_them(model_folder, data_file, packing):
    shown = view(model_folder, data_file, packing=packing, seq_len=128)
    each = 128 // shown.train.longest_row
    assert shown.packs == (-(-56 // each) if packing else 0)


@pytest.mark.parametrize(
    ("settings", "code"),
    [((), 2), (("--on-bad-row", "skip"), 0), (("--on-bad-row", "skip", "--on-long-row", "error"), 2)],
    ids=["a bad row", "skipped", "a long row"],
)
def test_the_command_fails_where_training_would_stop(call, model_folder, tmp_path, settings, code):
    rows = [{"question": "What is 2 plus 3?", "answer": answer} for answer in ("", "5", "5 " * 90)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    words = ("data", "--model", model_folder, "--data", file, "--seq-len", "64", *settings)
    for more in ((), ("--json",)):
        ended = call(*words, *more)
        assert ended.code == code
        assert "What is 2 plus 3?" in ended.out
    assert bool(json.loads(ended.out)["would_stop"]) == bool(code)


def test_where_no_row_is_left_the_row_that_training_stops_at_is_named(call, model_folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "caf\xe9"}\n')
    words = ("data", "--model", model_folder, "--data", file)
    call(*words).ends(2, "rows.jsonl:1: not UTF-8: byte 0xe9 at column 14")
