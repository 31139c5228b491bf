"""Large data: the same rows over any number of processes, in bounded memory, and stopped at once when asked."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from data.test_tool_calls import AS_OBJECT, ASKED, CALLED, FOUND, SAID, TOOLS
from data.tiny_tokenizers import HEADER_STYLE, TOO_HARD, byte_tokenizer, panicking_tokenizer
from fitune.data import making, tokenising
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.data.preparing import prepare_data
from fitune.errors import DataError
from fitune.spec.plan import DataPlan, DataSource


def row(i):
    return {"prompt": f"what is {i}?", "completion": f"the answer is {i} " * (1 + i % 5)}


def write(path, rows):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return DataSource(path=str(path))


@pytest.fixture
def prepare(tmp_path):
    def run(*sources, cache="cache", watch=None, template=None, tokenizer=None, seq_len=64, **settings):
        data = DataPlan(sources=sources, cache_dir=str(tmp_path / cache), **settings)
        told = {} if watch is None else {"watch": watch}
        tokenizer = tokenizer or byte_tokenizer(template=template)
        return prepare_data(data, tokenizer=tokenizer, tokenizer_path="tiny", seq_len=seq_len, seed=1, **told)

    return run


@pytest.fixture
def in_processes(monkeypatch):
    """Small data, tokenised as large data is: in so many processes, in small batches."""

    def use(count):
        monkeypatch.setattr(making, "_BATCH_ROWS", 16)
        monkeypatch.setattr(tokenising, "_WORTH_A_START", 0)
        monkeypatch.setattr(tokenising, "_cores", lambda: count)

    return use


def test_any_number_of_processes_gives_the_same_rows(tmp_path, prepare, in_processes):
    rows = [row(i) if i % 11 else '{"prompt": 1, "completion": "x"}' for i in range(200)]
    sources = [
        write(tmp_path / "rows.jsonl", rows),
        write(tmp_path / "more.jsonl", [{"text": "some text"}] * 9),
    ]
    settings = {"on_bad_row": "skip", "val_fraction": 0.2, "on_long_row": "split", "template": HEADER_STYLE}
    alone = prepare(*sources, cache="alone", **settings)
    for count in (1, 3):
        in_processes(count)
        many = prepare(*sources, cache=f"{count}", **settings)
        assert many.train.fingerprint == alone.train.fingerprint
        assert many.eval.fingerprint == alone.eval.fingerprint
        assert (many.train_ledger, many.eval_ledger) == (alone.train_ledger, alone.eval_ledger)
        assert many.eval_examples == alone.eval_examples


FUNCTION = {"name": "weather", "arguments": {"city": "Łódź"}}
THOUGHT = {"role": "assistant", "content": "<think>\nhm, é\n</think>\n\nsunny"}
KINDS_OF_ROWS = {
    "tools": {"messages": [ASKED, CALLED, FOUND, SAID], "tools": TOOLS},
    "a call last": {"messages": [ASKED, CALLED], "tools": TOOLS},
    "two calls in a row": {"messages": [ASKED, CALLED, FOUND, CALLED, FOUND, SAID], "tools": TOOLS},
    "tools as text": {"messages": [ASKED, CALLED, FOUND, SAID], "tools": json.dumps(TOOLS)},
    "functions": {
        "messages": [ASKED, {"role": "assistant", "content": "", "function_call": FUNCTION}], "functions": TOOLS,
    },
    "ShareGPT with calls": {
        "conversations": [
            {"from": "human", "value": "weather?"}, {"from": "function_call", "value": json.dumps(FUNCTION)},
            {"from": "observation", "value": "18 C"}, {"from": "gpt", "value": "mild"},
        ],
        "tools": TOOLS,
    },
    "messages": {"messages": [ASKED, SAID]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, ASKED, SAID]},
    "thinking": {"messages": [ASKED, THOUGHT, ASKED, THOUGHT]},
    "thinking in a field": {"messages": [ASKED, {**SAID, "thinking": "hm, é"}]},
    "special tokens in the text": {"messages": [{"role": "user", "content": "<|end|></s>"}, SAID]},
    "prompt and completion": row(3),
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "Alpaca": {"instruction": "Add.", "input": "1 2", "output": "3"},
    "question and answer": {"question": "Where?", "answer": "Here."},
    "text": {"text": "some text, é and 中"},
    "the chosen of pairs": {"prompt": "Where?", "chosen": "Here.", "rejected": "There."},
    "refused by the template": {"messages": [ASKED, CALLED, FOUND, SAID]} | {"tools": [{"name": "<|end|>"}]},
    "not readable": {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
}  # fmt: skip
WITH_THOUGHTS = AS_OBJECT.replace(
    "(message.content or '')",
    "('<think>' ~ message.thinking ~ '</think>' if message.thinking else '') ~ (message.content or '')",
)
COLUMNS = {"the chosen of pairs": (("prompt", "prompt"), ("completion", "chosen"))}


@pytest.mark.parametrize("kind", KINDS_OF_ROWS)
def test_rows_of_every_kind_are_the_same_by_other_processes(tmp_path, prepare, in_processes, kind):
    """The large part of a dataset is tokenised by other processes: calls and tools must go there with the text."""
    usual = [{"messages": [ASKED, SAID]}] if "messages" in KINDS_OF_ROWS[kind] else []
    written = write(tmp_path / "rows.jsonl", [KINDS_OF_ROWS[kind]] * 20 + usual)
    source = replace(written, columns=COLUMNS.get(kind, ()))
    settings = {"template": WITH_THOUGHTS, "seq_len": 1024, "on_bad_row": "skip"}
    alone = prepare(source, cache="alone", **settings)
    in_processes(1)
    others = prepare(source, cache="others", **settings)
    assert others.train.fingerprint == alone.train.fingerprint
    assert others.train_ledger == alone.train_ledger


@pytest.mark.parametrize("count", [0, 1])
def test_pairs_without_columns_are_refused_by_every_number_of_processes(
    tmp_path, prepare, in_processes, count
):
    if count:
        in_processes(count)
    rows = [row(0) | KINDS_OF_ROWS["the chosen of pairs"]] * 20
    with pytest.raises(DataError, match="rows.jsonl:1: the row has chosen and rejected"):
        prepare(write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize("count", [0, 2])
def test_the_first_row_that_cannot_be_used_is_named(tmp_path, prepare, in_processes, count):
    """The row of line 40 is longer than the context, that of line 45 cannot be read; both are in one batch."""
    if count:
        in_processes(count)
    rows = (
        [row(0)] * 39
        + [{"prompt": "a", "completion": "word " * 200}]
        + [row(0)] * 4
        + ["{bad"]
        + [row(0)] * 90
    )
    with pytest.raises(DataError, match=r"rows.jsonl:40: the row has .* tokens"):
        prepare(write(tmp_path / "rows.jsonl", rows), on_long_row="error")
    with pytest.raises(DataError, match=r"rows.jsonl:45: not JSON"):
        prepare(write(tmp_path / "rows.jsonl", rows))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


@pytest.mark.parametrize("count", [0, 1])
def test_a_row_on_which_the_tokenizer_panics_is_named_with_the_cause(tmp_path, prepare, in_processes, count):
    """A panic of Rust is no Exception: it ended the run with a traceback, and other processes without a word."""
    if count:
        in_processes(count)
    rows = [row(0), row(1), {"prompt": TOO_HARD, "completion": "x"}, row(2)]
    source, tokenizer = write(tmp_path / "rows.jsonl", rows), panicking_tokenizer()
    with pytest.raises(DataError, match=r"rows.jsonl:3: the tokenizer fails: .*retry-limit") as caught:
        prepare(source, tokenizer=tokenizer)
    assert "on_bad_row: skip" in caught.value.hint
    ledger = prepare(source, tokenizer=tokenizer, on_bad_row="skip").train_ledger
    assert (ledger.rows_kept, ledger.dropped) == (3, {"the tokenizer fails": 1})


def test_a_prompt_on_which_the_tokenizer_panics_is_its_own_error():
    template = load_template(panicking_tokenizer())
    good, bad, last = template.encode_prompts(
        [Conversation((Message("user", text),), f"rows.jsonl:{text[0]}") for text in ("1", TOO_HARD, "1")]
    )
    assert good == last
    assert bad.message.startswith("rows.jsonl:q: the tokenizer fails: ")


@pytest.mark.parametrize("count", [0, 1])
def test_a_stop_leaves_no_process_and_no_half_entry(tmp_path, prepare, in_processes, count, monkeypatch):
    started = []
    real = tokenising.Child
    monkeypatch.setattr(tokenising, "Child", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    if count:
        in_processes(count)

    def stop(reading):
        if reading.doing == "tokenising" and (not count or started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(write(tmp_path / "rows.jsonl", [row(i) for i in range(100)]), watch=stop)
    assert len(started) == count
    assert all(child._process.poll() is not None for child in started)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_process_that_dies_is_an_error_that_names_the_rows(tmp_path, prepare, in_processes, monkeypatch):
    in_processes(1)

    class KilledAfterABatch(tokenising.Child):
        sent = 0

        def send(self, message):
            super().send(message)
            self.sent += 1
            if self.sent == 2:  # the first is the job
                self._process.kill()

    monkeypatch.setattr(tokenising, "Child", KilledAfterABatch)
    with pytest.raises(
        DataError, match=r"ended with signal SIGKILL at .*rows.jsonl:1 or in the 15 rows after"
    ):
        prepare(write(tmp_path / "rows.jsonl", [row(i) for i in range(100)]))


def test_processes_end_with_their_parent():
    """Even when it is killed, and whatever they do: here one sleeps for a minute."""
    code = (
        "from fitune.child import Child; import time\n"
        "child = Child('data.sleeping_child'); print(child._process.pid, flush=True)\n"
        "child.send(b'sleep'); child.receive(); print('sleeping', flush=True); time.sleep(60)"
    )
    here = os.path.dirname(os.path.dirname(__file__))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, here])}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True
    )
    pid = int(parent.stdout.readline())
    child = os.pidfd_open(pid)
    assert parent.stdout.readline() == "sleeping\n"
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    import select

    assert select.select([child], [], [], 30)[0]
    os.close(child)


def test_memory_does_not_grow_with_the_rows(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(making, "_BATCH_ROWS", 64)

    def peak(count):
        source = write(tmp_path / f"{count}.jsonl", [row(i) for i in range(count)])
        prepare(source, cache="warm")
        tracemalloc.start()
        prepare(source, cache=f"{count}")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    prepare(write(tmp_path / "first.jsonl", [row(0)]))
    assert peak(1500) < 1.2 * peak(300)


def test_long_rows_are_tokenised_a_few_at_a_time(tmp_path, prepare, monkeypatch):
    seen = []
    real = making.RowTokeniser.__call__

    def call(self, examples):
        seen.append(sum(map(tokenising.text_size, examples)))
        return real(self, examples)

    monkeypatch.setattr(making.RowTokeniser, "__call__", call)
    monkeypatch.setattr(making, "MOST_TEXT_AT_ONCE", 3000)
    long = [{"prompt": "why?", "completion": "so " * 400}] * 20 + [
        {"prompt": "why?", "completion": "so " * 4000}
    ]
    prepare(write(tmp_path / "rows.jsonl", long), on_long_row="split")
    assert max(seen[:-1]) <= 3000
    assert len(seen) == 11


def test_a_repeated_row_is_stored_once(tmp_path, prepare):
    source = write(tmp_path / "rows.jsonl", [row(i) for i in range(10)])
    once = prepare(source, on_long_row="split", cache="once").train
    often = prepare(
        write(tmp_path / "one.jsonl", [row(99)]),
        DataSource(path=source.path, weight=1000),
        on_long_row="split",
    ).train
    assert len(often) == 1 + 1000 * len(once)
    assert len(often._ids) < 2 * len(once._ids)
    assert often.row(1)[0].tolist() == once.row(0)[0].tolist()
    assert often.lengths.sum() == often.row(0)[0].size + 1000 * once.lengths.sum()
    copied = type(often)(
        np.concatenate([often.row(i)[0] for i in range(len(often))]),
        np.concatenate([often.row(i)[1] for i in range(len(often))]),
        np.concatenate([[0], np.cumsum(often.lengths)]),
    )
    assert copied.fingerprint == often.fingerprint
    assert copied.labels_per_row.tolist() == often.labels_per_row.tolist()


def test_a_weight_that_no_memory_holds_is_refused(tmp_path, prepare):
    source = write(tmp_path / "rows.jsonl", [row(i) for i in range(100)])
    with pytest.raises(
        DataError, match=r"rows.jsonl:100 an epoch has 100,000,000 of them, and at most 50,000,000"
    ) as caught:
        prepare(DataSource(path=source.path, weight=1e6))
    assert "divide all of them" in caught.value.hint


def test_the_watcher_is_told_bytes_rows_and_the_end(tmp_path, prepare):
    seen = []
    source = write(tmp_path / "rows.jsonl", [row(i) for i in range(3000)])
    ledger = prepare(source, watch=seen.append).train_ledger
    size = os.path.getsize(source.path)
    assert seen[0].doing == "checking"
    assert (seen[-1].doing, seen[-1].bytes_read, seen[-1].bytes_in_all) == ("done", size, size)
    assert (seen[-1].rows, seen[-1].tokens) == (ledger.rows_read, ledger.tokens_read)
    assert len([reading for reading in seen if 0 < reading.rows < 3000]) >= 2
