"""What changes the tokens changes the name of their entry in the cache; what does not, does not."""

import json
import threading
from dataclasses import dataclass, fields
from typing import Any

import pytest
from transformers import CTRLTokenizer

from data.tiny_tokenizers import HEADER_STYLE, byte_tokenizer
from fitune.data import preparing
from fitune.data.preparing import contents_of
from fitune.engine.ranks import Ranks
from fitune.errors import DataError, RankFailed
from fitune.train import start
from fitune.values.plan import DataPlan, DataSource
from jsonl import write_lines

ROWS = [{"text": f"what is {i}?", "other": f"the answer is {i}"} for i in range(24)]


def write(file, rows=ROWS):
    file.parent.mkdir(exist_ok=True)
    write_lines(file, rows)


def ctrl(folder, *merges):
    """A tokenizer without a backend; its vocabulary does not say which letters it joins first."""
    folder.mkdir()
    words = ["a@@", "b@@", "c", "ab@@", "bc", "abc", "p@@", "o@@", "n@@", "g", "<unk>", "end"]
    (folder / "vocab.json").write_text(json.dumps({word: id for id, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return CTRLTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), unk_token="<unk>", eos_token="end"
    )


def mistaken(setting, *words, **named):
    """A tokenizer as others leave it, or as its file was saved: rows are encoded without these settings."""
    tokenizer = byte_tokenizer()
    getattr(tokenizer.backend_tokenizer, setting)(*words, **named)
    return tokenizer


def renamed(folder, old, new):
    (folder / old).rename(folder / new)
    return {}


def template(folder, text, name="a.jinja"):
    (folder.parent / name).write_text(text)
    return {"chat_template": str(folder.parent / name)}


def rewritten(folder, rows, name="rows.jsonl"):
    write(folder / name, rows)
    return {}


OTHER = {
    "a row more": lambda folder: rewritten(folder, [*ROWS, ROWS[0]]),
    "rows in another order": lambda folder: rewritten(folder, ROWS[::-1]),
    "a name that is read as text": lambda folder: renamed(folder, "rows.jsonl", "rows.txt"),
    "a file more": lambda folder: rewritten(folder, ROWS, "z.jsonl"),
    "evaluation": lambda folder: {"eval_sources": (DataSource(path=str(folder)),)},
}
OTHER_SETTINGS = {
    "train_on_prompt": True, "train_on_empty_thinking": True, "on_long_row": "split", "on_bad_row": "skip",
    "val_fraction": 0.5, "seq_len": 65, "format": "text", "columns": (("text", "other"),), "sample": 3, "weight": 2.0,
    "tokenizer": byte_tokenizer(eos_token="<|end|>"),
}  # fmt: skip
SAME = {
    "another seed, no rows held out": lambda _: {"seed": 2},
    "a file's name": lambda folder: renamed(folder, "rows.jsonl", "others.jsonl"),
    "another name of the same layout": lambda folder: renamed(folder, "rows.jsonl", "rows.ndjson"),
    "the folder's place": lambda folder: {"path": str(folder.rename(folder.parent / "moved"))},
    "addresses that may be opened": lambda _: {"allow_https": True, "allow_private_addresses": True},
    "the file instead of its folder": lambda folder: {"path": str(folder / "rows.jsonl")},
    "a split nothing is named for": lambda _: {"split": "test"},
    "truncation in the tokenizer": lambda _: {"tokenizer": mistaken("enable_truncation", 8)},
    "padding in the tokenizer": lambda _: {"tokenizer": mistaken("enable_padding", length=512)},
}


@pytest.fixture
def entries(tmp_path, prepare):
    """The entries of the cache after data in tmp_path/data was prepared so: settings of its source, and others."""

    def of(**settings):
        of_source = {each.name for each in fields(DataSource)}
        source = {"path": str(tmp_path / "data")} | {k: v for k, v in settings.items() if k in of_source}
        prepare(DataSource(**source), **{k: v for k, v in settings.items() if k not in of_source})
        return len(list((tmp_path / "cache" / "tokens").iterdir()))

    write(tmp_path / "data" / "rows.jsonl")
    assert of() == 1
    return of


def test_what_changes_the_tokens_has_an_entry_of_its_own(entries):
    for number, (name, value) in enumerate(OTHER_SETTINGS.items(), start=2):
        assert (entries(**{name: value}), entries(**{name: value})) == (number, number), name


@pytest.mark.parametrize("change", OTHER)
def test_other_content_has_an_entry_of_its_own(tmp_path, entries, change):
    changed = OTHER[change](tmp_path / "data")
    assert (entries(**changed), entries(**changed)) == (2, 2)


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_token_finds_the_entry(tmp_path, entries, change):
    assert entries(**SAME[change](tmp_path / "data")) == 1


def test_the_seed_counts_where_rows_are_held_out(entries):
    assert [entries(val_fraction=0.5, seed=seed) for seed in (1, 2, 1)] == [2, 3, 3]


def test_the_words_of_a_template_count_and_its_name_does_not(tmp_path, entries):
    data = tmp_path / "data"
    texts = [("a", HEADER_STYLE), ("b", HEADER_STYLE), ("b", HEADER_STYLE + " ")]
    assert [entries(**template(data, text, name)) for name, text in texts] == [2, 2, 3]


def test_a_tokenizer_without_a_backend_is_known_by_all_that_it_saves(tmp_path, entries):
    first, same, other = (
        ctrl(tmp_path / name, *merges)
        for name, merges in (("a", ("a b", "ab c</w>")), ("b", ("a b", "ab c</w>")), ("c", ("b c</w>",)))
    )
    assert first.get_vocab() == other.get_vocab()
    assert first("abc")["input_ids"] != other("abc")["input_ids"]
    assert [entries(tokenizer=each) for each in (first, same, other)] == [2, 2, 3]


def test_a_row_of_a_sample_by_path_is_one_by_setting(tmp_path, entries):
    path = str(tmp_path / "data" / "rows.jsonl")
    assert entries(path=f"{path}#3") == entries(path=path, sample=3) == 2


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    """Ranks that are threads; two machines of two, told apart by their names."""

    values: list[Any]
    barrier: threading.Barrier

    def gathered(self, value):
        self.values[self.rank] = value
        self.barrier.wait(30)
        everyones = list(self.values)
        self.barrier.wait(30)  # before the next values come
        return everyones

    def from_first(self, make):
        return self.gathered(make() if self.is_first else None)[0]


def on_two_machines(monkeypatch, make, *, how=Ranks.once_a_node):
    """What ``make`` of a rank gives, or its error, on ranks 0 and 2 of one machine and 1 and 3 of another."""
    values, barrier, found = [None] * 4, threading.Barrier(4), [None] * 4
    monkeypatch.setattr("socket.gethostname", lambda: f"host{threading.current_thread().name}")

    def run(rank):
        ranks = ThreadRanks(rank=rank, world=4, local=rank // 2, values=values, barrier=barrier)
        try:
            found[rank] = how(ranks, lambda: make(rank))
        except (DataError, RankFailed) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank % 2)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_rank_of_a_node_reads_the_sources_and_the_frozen_base(monkeypatch, make_plan):
    plan, read, hashed = make_plan(tuning="lora"), [], []
    assert on_two_machines(monkeypatch, lambda rank: read.append(rank) or rank) == [0, 1, 0, 1]
    assert sorted(read) == [0, 1]
    monkeypatch.setattr(start, "weights_identity", lambda path: hashed.append(path) or "hash")
    of_base = on_two_machines(monkeypatch, None, how=lambda ranks, _: start.base_identity(plan, ranks))
    assert (of_base, hashed) == (["hash"] * 4, [plan.model_path] * 2)


@pytest.mark.parametrize("how", [Ranks.once_a_node, Ranks.in_turn])
def test_an_error_on_one_machine_ends_every_rank(monkeypatch, how):
    def make(rank):
        if rank == 1:
            raise DataError("no such file")
        return rank

    found = on_two_machines(monkeypatch, make, how=how)
    assert [type(each) for each in found] == [RankFailed, DataError, RankFailed, RankFailed]
    assert found[3].message == "rank 1 stopped: no such file"


def test_files_are_hashed_once_and_held_out_ones_that_are_trained_on_too_are_named(
    tmp_path, prepare, entries, monkeypatch
):
    """A corpus of many GiB is read from end to end each time."""
    hashed, real = [], preparing.content_key
    monkeypatch.setattr(
        preparing, "content_key", lambda source, **told: hashed.append(source.path) or real(source, **told)
    )
    write(tmp_path / "copy.jsonl")
    source, copy = (DataSource(path=str(tmp_path / name)) for name in ("data", "copy.jsonl"))
    contents = contents_of(DataPlan(sources=(source,), eval_sources=(copy,)))
    assert contents.size == 2 * (tmp_path / "copy.jsonl").stat().st_size
    for known, times in ((contents, 1), (None, 2), (None, 3)):
        assert prepare(source, eval_sources=(copy,), contents=known).also_trained == (copy.path,)
        assert hashed == [source.path, copy.path] * times
