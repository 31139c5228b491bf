"""From files to a dataset on disk: nothing is lost without being counted, and nothing is made twice."""

import json

import numpy as np
import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data import cache, making
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.templates import load_template
from fitune.data.dataset import DatasetWriter
from fitune.data.ledger import describe_ledger
from fitune.data.loader import Loader, LoaderState
from fitune.data.preparing import prepare_data
from fitune.data.reading.sources import read_rows
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError
from fitune.spec.plan import Batch, DataPlan, DataSource
from jsonl import write_lines


def write_rows(path, count, *, start=0, length=1):
    lines = [
        {"prompt": f"what is {i}?", "completion": f"the answer is {i} " * length}
        for i in range(start, start + count)
    ]
    write_lines(path, lines)
    return DataSource(path=str(path))


@pytest.fixture
def prepare(tmp_path):
    def run(*sources, seq_len=64, seed=1, tokenizer=None, **settings):
        data = DataPlan(sources=sources, cache_dir=str(tmp_path / "cache"), **settings)
        tokenizer = tokenizer or byte_tokenizer()
        return prepare_data(data, tokenizer=tokenizer, tokenizer_path="tiny", seq_len=seq_len, seed=seed)

    return run


def texts(dataset):
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(dataset.row(i)[0]) for i in range(len(dataset))]


def test_a_row_is_stored_as_the_template_encodes_it(tmp_path, prepare):
    prepared = prepare(write_rows(tmp_path / "rows.jsonl", 5))
    assert texts(prepared.train)[3] == "<s>### User\nwhat is 3?\n\n### Assistant\nthe answer is 3 </s>"
    ids, supervised = prepared.train.row(3)
    assert ids.dtype == np.int32
    assert supervised.dtype == np.bool_
    assert byte_tokenizer().decode(ids[supervised]) == "the answer is 3 </s>"
    assert prepared.train.lengths.sum() == prepared.train_ledger.tokens_kept
    assert prepared.eval is None
    assert prepared.eval_ledger is None
    assert prepared.eval_examples == []


def mixed_lengths(tmp_path):
    long = [write_rows(tmp_path / f"{n}.jsonl", 9, start=n, length=n) for n in (1, 3, 9, 30)]
    lines = [{"prompt": "why? " * 90, "completion": "so"}, {"prompt": "hi", "completion": None}]
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt":')
    return (*long, DataSource(path=str(tmp_path / "hard.jsonl")))


def tokens_counted_from_outside(tmp_path, template):
    rows = [row for source in mixed_lengths(tmp_path) for row in read_rows(source, on_bad_row="skip")]
    good = [row for row in rows if row.fields["completion"] is not None]
    return sum(len(template.encode(to_example(row, format="prompt_completion")).ids) for row in good)


@pytest.mark.parametrize("policy", ["truncate", "drop", "split"])
@pytest.mark.parametrize("weight", [1.0, 0.5, 2.5])
def test_the_sums_of_the_ledger_balance(tmp_path, prepare, policy, weight):
    sources = [DataSource(path=source.path, weight=weight) for source in mixed_lengths(tmp_path)]
    prepared = prepare(*sources, on_long_row=policy, on_bad_row="skip")
    ledger, rows = prepared.train_ledger, prepared.train
    assert ledger.rows_read == ledger.rows_kept + sum(ledger.dropped.values())
    assert ledger.tokens_kept == rows.lengths.sum()
    if weight == 1.0:
        assert ledger.tokens_read == tokens_counted_from_outside(tmp_path, load_template(byte_tokenizer()))
    assert ledger.tokens_supervised == rows.labels_per_row.sum()
    assert rows.lengths.max() <= 64
    assert rows.labels_per_row.min() >= 1
    assert ledger.dropped["null field"] == 1
    assert ledger.dropped["torn last line"] == 1


def test_truncation_cuts_the_end_and_counts_it(tmp_path, prepare):
    ledger = prepare(write_rows(tmp_path / "rows.jsonl", 6, length=20)).train_ledger
    assert (ledger.rows_kept, ledger.rows_cut) == (6, 6)
    assert ledger.tokens_kept == 6 * 64
    assert ledger.tokens_cut == ledger.tokens_read - 6 * 64
    assert ledger.longest_row > 64


def test_split_keeps_every_token_that_is_learned(tmp_path, prepare):
    source = write_rows(tmp_path / "rows.jsonl", 6, length=40)
    whole = prepare(source, seq_len=4096)
    split = prepare(source, on_long_row="split")
    assert split.train_ledger.rows_kept == 6
    assert len(split.train) == sum(-(-length // 64) for length in whole.train.lengths)
    assert split.train_ledger.tokens_cut == 0
    assert split.train.lengths.sum() == whole.train.lengths.sum()


def test_a_part_whose_only_token_has_nothing_before_it_is_cut(tmp_path, prepare):
    source = write_rows(tmp_path / "rows.jsonl", 1, length=20)
    tokens = prepare(source, seq_len=4096).train_ledger.tokens_read
    split = prepare(source, seq_len=tokens - 1, on_long_row="split")
    assert len(split.train) == 1
    assert (split.train_ledger.tokens_kept, split.train_ledger.tokens_cut) == (tokens - 1, 1)


def test_rows_too_long_are_dropped_or_refused(tmp_path, prepare):
    source = write_rows(tmp_path / "rows.jsonl", 6, length=20)
    short = write_rows(tmp_path / "short.jsonl", 2)
    ledger = prepare(source, short, on_long_row="drop").train_ledger
    assert ledger.dropped == {"longer than the context": 6}
    assert ledger.rows_kept == 2
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has .* tokens, seq_len is 64: .* too many"):
        prepare(source, on_long_row="error")


def test_training_on_the_prompt_learns_every_token_but_the_first(tmp_path, prepare):
    prepared = prepare(write_rows(tmp_path / "rows.jsonl", 5), train_on_prompt=True)
    assert prepared.train_ledger.tokens_supervised == prepared.train_ledger.tokens_kept - 5
    step = Loader(
        prepared.train, Batch(micro_batch_size=5, accumulation=1, seq_len=64, packing=False), seed=0
    ).batch_at(LoaderState())
    assert step.supervised_tokens == step.tokens - 5


def test_held_out_rows_stay_held_out_when_others_are_added(tmp_path, prepare):
    small = prepare(write_rows(tmp_path / "rows.jsonl", 100), val_fraction=0.2)
    large = prepare(write_rows(tmp_path / "rows.jsonl", 160, start=-60), val_fraction=0.2)
    assert set(texts(small.eval)) <= set(texts(large.eval))
    assert not set(texts(large.eval)) & set(texts(large.train))
    assert len(small.eval) + len(small.train) == 100
    assert 8 <= len(small.eval) <= 35
    other = prepare(write_rows(tmp_path / "rows.jsonl", 100), val_fraction=0.2, seed=2)
    assert texts(other.eval) != texts(small.eval)


def test_equal_rows_are_on_the_same_side(tmp_path, prepare):
    source = write_rows(tmp_path / "rows.jsonl", 50)
    prepared = prepare(source, source, val_fraction=0.3)
    assert not set(texts(prepared.eval)) & set(texts(prepared.train))
    assert len(prepared.eval) + len(prepared.train) == 100


def test_evaluation_rows_may_come_from_another_file(tmp_path, prepare):
    held_out = write_rows(tmp_path / "test.jsonl", 70, start=500)
    prepared = prepare(write_rows(tmp_path / "rows.jsonl", 5), eval_sources=(held_out,))
    assert (len(prepared.train), len(prepared.eval), len(prepared.eval_examples)) == (5, 70, 64)
    assert prepared.eval_examples[0].messages[0].content == "what is 500?"
    assert prepared.eval_ledger.rows_kept == 70


@pytest.mark.parametrize(("weight", "places"), [(1.0, 10), (2.0, 20), (0.5, 5), (1.5, 15), (0.1, 1)])
def test_a_weight_gives_a_source_its_share(tmp_path, prepare, weight, places):
    source = write_rows(tmp_path / "rows.jsonl", 10)
    other = write_rows(tmp_path / "other.jsonl", 3, start=50)
    prepared = prepare(DataSource(path=source.path, weight=weight), other)
    assert len(prepared.train) == places + 3
    ledger = prepared.train_ledger
    assert ledger.rows_read == ledger.rows_kept + sum(ledger.dropped.values())


def test_the_second_time_nothing_is_tokenised(tmp_path, prepare, monkeypatch):
    source = write_rows(tmp_path / "rows.jsonl", 30)
    first = prepare(source, val_fraction=0.2)
    monkeypatch.setattr(RowTokeniser, "__call__", lambda self, _: pytest.fail("tokenised again"))
    second = prepare(source, val_fraction=0.2)
    assert texts(first.train) == texts(second.train)
    assert texts(first.eval) == texts(second.eval)
    assert (first.train_ledger, first.eval_ledger) == (second.train_ledger, second.eval_ledger)
    assert first.eval_examples == second.eval_examples
    assert isinstance(second.train._ids, np.memmap)


def test_a_full_disk_leaves_no_entry(tmp_path, prepare, monkeypatch):
    def full(self, *arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DatasetWriter, "add", full)
    with pytest.raises(DataError, match=r"the cache for tokenised data cannot be written: .*: No space left"):
        prepare(write_rows(tmp_path / "rows.jsonl", 30))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "here"))
    assert cache.folder_of("") == tmp_path / "here" / "tokens"
    assert cache.folder_of(str(tmp_path / "there")) == tmp_path / "there" / "tokens"


def test_batches_of_the_tokenizer_change_nothing(tmp_path, prepare, monkeypatch):
    source = write_rows(tmp_path / "rows.jsonl", 30)
    whole = texts(prepare(source).train)
    monkeypatch.setattr(making, "_BATCH_ROWS", 7)
    monkeypatch.setattr(cache, "_CODE_VERSION", 0)
    assert texts(prepare(source).train) == whole


def test_the_ledger_reads_well(tmp_path, prepare):
    ledger = prepare(*mixed_lengths(tmp_path), on_bad_row="skip").train_ledger
    lines = describe_ledger(ledger).splitlines()
    assert lines[0] == "39 rows read as prompt_completion, 36 kept"
    assert lines[1] == "3 dropped: 1 no answer left after truncation, 1 null field, 1 torn last line"
    assert any("rows longer than the context" in line for line in lines)
    assert any(line.endswith("%)") and "learned" in line for line in lines)
