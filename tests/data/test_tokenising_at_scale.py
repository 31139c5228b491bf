"""Large data: the same rows over any number of processes, in bounded memory, and stopped at once when asked."""

import json
import os
import pickle
import select
import subprocess
import sys
import tracemalloc
from collections import deque

import numpy as np
import pytest

from data.test_tool_calls import AS_OBJECT, ASKED, CALLED, FOUND, SAID, TOOLS
from data.tiny_tokenizers import TOO_HARD, byte_tokenizer, panicking_tokenizer
from fitune.data import making, tokenising
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.errors import DataError
from fitune.values.plan import DataSource


def row(i):
    return {"prompt": f"what is {i}?", "completion": f"the answer is {i} " * (1 + i % 5)}


@pytest.fixture
def write(tmp_path):
    """A source of these rows, or lines."""

    def to(*rows, name="rows", **settings):
        lines = (each if isinstance(each, str) else json.dumps(each) for each in rows)
        (file := tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return DataSource(path=str(file), **settings)

    return to


class Here:
    """A process that tokenises, in this one: what is sent and answered is packed and unpacked as between two."""

    def __init__(self, _module, **_):
        self._tokenise, self._answers = None, deque()

    def send(self, message):
        if self._tokenise is None:
            self._tokenise = pickle.loads(message)
        else:
            self._answers.append(tokenising.answer_to(message, self._tokenise))

    def receive(self):
        return self._answers.popleft()

    def close(self):
        pass


@pytest.fixture
def in_processes(monkeypatch):
    """Small data, tokenised as large data is: in so many processes, none for 0, in small batches."""

    def use(count, process=tokenising.Child):
        monkeypatch.setattr(making, "_BATCH_ROWS", 16 if count else 1024)
        monkeypatch.setattr(tokenising, "_WORTH_A_START", 0 if count else 2**21)
        monkeypatch.setattr(tokenising, "_cores", lambda: count)
        monkeypatch.setattr(tokenising, "Child", process)

    return use


FUNCTION = {"name": "weather", "arguments": {"city": "Łódź"}}
THOUGHT = {"role": "assistant", "content": "<think>\nhm, é\n</think>\n\nsunny"}
CALL = json.dumps(FUNCTION)
KINDS_OF_ROWS = [
    {"messages": [ASKED, CALLED, FOUND, SAID], "tools": TOOLS},
    {"messages": [ASKED, CALLED, FOUND, CALLED, FOUND, SAID], "tools": json.dumps(TOOLS)},
    {"messages": [ASKED, {"role": "assistant", "content": "", "function_call": FUNCTION}], "functions": TOOLS},
    {
        "conversations": [
            {"from": "human", "value": "weather?"}, {"from": "function_call", "value": CALL},
            {"from": "observation", "value": "18 C"}, {"from": "gpt", "value": "mild"},
        ],
        "tools": TOOLS,
    },
    {"messages": [{"role": "system", "content": "Be kind."}, ASKED, SAID]},
    {"messages": [ASKED, THOUGHT, ASKED, THOUGHT]},
    {"messages": [ASKED, {**SAID, "thinking": "hm, é"}]},
    {"messages": [{"role": "user", "content": "<|end|></s>"}, SAID]},
    {"text": "some text, é and 中"},
    {"prompt": "Where?", "chosen": "Here.", "rejected": "There."},
    {"messages": [ASKED, CALLED, FOUND, SAID], "tools": [{"name": "<|end|>"}]},
    {"messages": [{"role": "user", "content": "refuse this"}, SAID]},
    {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},  # not readable
]  # fmt: skip
WITH_THOUGHTS = (
    "{%- if messages[0].content == 'refuse this' -%}{{- raise_exception('no') -}}{%- endif -%}"
    + AS_OBJECT.replace(
        "(message.content or '')",
        "('<think>' ~ message.thinking ~ '</think>' if message.thinking else '') ~ (message.content or '')",
    )
)


def test_any_number_of_processes_gives_the_same_rows_of_every_kind(write, prepare, in_processes):
    """The large part of a dataset is tokenised by other processes: calls and tools must go there with the text."""
    usual = [row(i) if i % 11 else '{"prompt": 1, "completion": "x"}' for i in range(200)]
    chosen = (("prompt", "prompt"), ("completion", "chosen"))
    kinds = [
        write(*[kind] * 3, name=f"kind-{number}", weight=2.0, columns=chosen if "chosen" in kind else ())
        for number, kind in enumerate(KINDS_OF_ROWS)
    ]
    found = []
    for count, process in ((0, None), (1, Here), (3, Here), (1, tokenising.Child)):
        in_processes(count, process)
        made = prepare(
            *kinds, write(*usual), cache=f"{count}", template=WITH_THOUGHTS, val_fraction=0.2,
            on_bad_row="skip", on_long_row="split",
        )  # fmt: skip
        found.append((
            made.train.fingerprint, made.eval.fingerprint, made.train_ledger, made.eval_ledger, made.eval_examples
        ))  # fmt: skip
    assert found == found[:1] * 4
    dropped = {"refused by the template": 3, "call of a tool cannot be read": 3, "wrong type": 19}
    assert made.train_ledger.dropped == dropped


@pytest.mark.parametrize("count", [0, 2])
def test_the_first_row_that_cannot_be_used_is_named(tmp_path, write, prepare, in_processes, count):
    """The row of line 40 is longer than the context, that of line 45 cannot be read; both are in one batch."""
    in_processes(count, Here)
    long = {"prompt": "a", "completion": "word " * 200}
    source = write(*[row(0)] * 39, long, *[row(0)] * 4, "{bad", *[row(0)] * 90)
    with pytest.raises(DataError, match=r"rows.jsonl:40: the row has .* tokens"):
        prepare(source, on_long_row="error")
    with pytest.raises(DataError, match=r"rows.jsonl:45: not JSON"):
        prepare(source)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


FAILS = {
    "panics": (panicking_tokenizer, TOO_HARD, "the tokenizer fails: .*retry-limit", "the tokenizer fails"),
    "makes its end of text": (
        lambda: byte_tokenizer(eos_token="stem"), "a stem", "the tokenizer makes its special token 'stem' of text",
        "a special token in its text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAILS)
@pytest.mark.parametrize("count", [0, 1])
def test_a_row_on_which_the_tokenizer_fails_is_named_with_the_cause(
    write, prepare, in_processes, count, fault
):
    """A panic of Rust is no Exception: it ended the run with a traceback, and other processes without a word."""
    in_processes(count, Here)
    make, text, said, reason = FAILS[fault]
    source = write(row(0), row(1), {"prompt": text, "completion": "x"}, row(2))
    tokenizer = make()
    with pytest.raises(DataError, match=f"rows.jsonl:3: {said}") as caught:
        prepare(source, tokenizer=tokenizer)
    assert "on_bad_row: skip" in caught.value.hint
    ledger = prepare(source, tokenizer=tokenizer, on_bad_row="skip").train_ledger
    assert (ledger.rows_kept, ledger.dropped) == (3, {reason: 1})


def test_a_prompt_or_a_given_answer_on_which_the_tokenizer_panics_is_its_own_error():
    """It ended a whole scoring of given answers, without a word on which row it was."""
    template, texts = load_template(panicking_tokenizer()), ("1", TOO_HARD, "1")
    asked = [Conversation((Message("user", text),), f"rows:{text[0]}") for text in texts]
    given = [Conversation((Message("user", "a"), Message("assistant", t)), f"rows:{t[0]}") for t in texts]
    for good, bad, last in (template.encode_prompts(asked), template.encode_each(given)):
        assert good == last
        assert bad.message.startswith("rows:q: the tokenizer fails: ")


@pytest.mark.parametrize("count", [0, 1])
def test_a_stop_leaves_no_process_and_no_half_entry(tmp_path, write, prepare, in_processes, count):
    started, real = [], tokenising.Child
    in_processes(count, lambda *a, **k: started.append(real(*a, **k)) or started[-1])

    def stop(reading):
        if reading.doing == "tokenising" and (not count or started):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(write(*map(row, range(100))), watch=stop)
    assert len(started) == count
    assert all(child._process.poll() is not None for child in started)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_process_that_dies_is_an_error_that_names_the_rows(write, prepare, in_processes):
    class KilledAfterABatch(tokenising.Child):
        sent = 0

        def send(self, message):
            super().send(message)
            self.sent += 1
            if self.sent == 2:  # the first is the job
                self._process.kill()

    in_processes(1, KilledAfterABatch)
    with pytest.raises(
        DataError, match=r"ended with signal SIGKILL at .*rows.jsonl:1 or in the 15 rows after"
    ):
        prepare(write(*map(row, range(100))))


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
    child = os.pidfd_open(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "sleeping\n"
    parent.kill()
    parent.communicate()
    assert select.select([child], [], [], 30)[0]
    os.close(child)


def test_memory_does_not_grow_with_the_rows(write, prepare, monkeypatch):
    monkeypatch.setattr(making, "_BATCH_ROWS", 16)

    def peak(count):
        source = write(*map(row, range(count)), name=str(count))
        tracemalloc.start()
        prepare(source, cache=str(count))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(64)
    assert peak(321) < 1.2 * peak(65)


def test_long_rows_are_tokenised_a_few_at_a_time(write, prepare, monkeypatch):
    seen, real = [], making.RowTokeniser.__call__

    def call(self, examples):
        seen.append(sum(map(tokenising.text_size, examples)))
        return real(self, examples)

    monkeypatch.setattr(making.RowTokeniser, "__call__", call)
    monkeypatch.setattr(making, "MOST_TEXT_AT_ONCE", 3000)
    long, longest = ({"prompt": "why?", "completion": "so " * times} for times in (400, 4000))
    prepare(write(*[long] * 20, longest), on_long_row="split")
    assert max(seen[:-1]) <= 3000
    assert len(seen) == 11


def test_a_repeated_row_is_stored_once(write, prepare):
    source = write(*map(row, range(10)))
    once = prepare(source, on_long_row="split", cache="once").train
    repeated = DataSource(path=source.path, weight=1000)
    often = prepare(write(row(99), name="one"), repeated, on_long_row="split").train
    assert len(often) == 1 + 1000 * len(once)
    assert len(often._ids) < 2 * len(once._ids)
    assert often.row(1)[0].tolist() == once.row(0)[0].tolist()
    assert often.lengths.sum() == often.row(0)[0].size + 1000 * once.lengths.sum()
    ids, supervised = map(np.concatenate, zip(*map(often.row, range(len(often))), strict=True))
    copied = type(often)(ids, supervised, np.concatenate([[0], np.cumsum(often.lengths)]))
    assert copied.fingerprint == often.fingerprint
    assert copied.labels_per_row.tolist() == often.labels_per_row.tolist()


def test_a_weight_that_no_memory_holds_is_refused(write, prepare):
    with pytest.raises(
        DataError, match=r"rows.jsonl:100 an epoch has 100,000,000 of them, and at most 50,000,000"
    ) as caught:
        prepare(write(*map(row, range(100)), weight=1e6))
    assert "divide all of them" in caught.value.hint


def test_the_watcher_is_told_bytes_rows_and_the_end(write, prepare, monkeypatch):
    monkeypatch.setattr(making, "_BATCH_ROWS", 100)
    seen, source = [], write(*map(row, range(300)))
    ledger = prepare(source, watch=seen.append).train_ledger
    size = os.path.getsize(source.path)
    assert seen[0].doing == "checking"
    assert (seen[-1].doing, seen[-1].bytes_read, seen[-1].bytes_in_all) == ("done", size, size)
    assert (seen[-1].rows, seen[-1].tokens) == (ledger.rows_read, ledger.tokens_read)
    assert {0, 100, 200, 300} == {reading.rows for reading in seen}
