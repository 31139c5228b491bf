"""From files to a dataset on disk: nothing is lost without being counted, and nothing is made twice."""

from dataclasses import replace

import numpy as np
import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data import cache
from fitune.data.conversations.templates import load_template
from fitune.data.dataset import DatasetWriter
from fitune.data.examples import examples_of
from fitune.data.ledger import describe_ledger
from fitune.data.loader import Loader, LoaderState
from fitune.data.reading.rows import BadRow
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError
from fitune.values.plan import Batch, DataSource
from jsonl import write_lines


@pytest.fixture
def rows(tmp_path):
    """A source of so many rows, whose answers have so many times four words."""

    def write(count, *, name="rows", start=0, length=1, **settings):
        lines = (
            {"prompt": f"what is {i}?", "completion": f"the answer is {i} " * length}
            for i in range(start, start + count)
        )
        return DataSource(path=str(write_lines(tmp_path / f"{name}.jsonl", lines)), **settings)

    return write


@pytest.fixture
def mixed(rows, tmp_path):
    """Sources of short and long rows, one that has no answer within the context, one null field, one torn line."""
    hard = tmp_path / "hard.jsonl"
    prompt = "why? " * 90
    hard.write_text(
        f'{{"prompt": "{prompt}", "completion": "so"}}\n{{"prompt": "hi", "completion": null}}\n{{"p'
    )
    return (
        *(rows(9, name=str(n), start=n, length=n) for n in (1, 3, 9, 30)), DataSource(path=str(hard))
    )  # fmt: skip


def texts(dataset):
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(dataset.row(i)[0]) for i in range(len(dataset))]


def test_a_row_is_stored_as_the_template_encodes_it(rows, prepare):
    prepared = prepare(rows(5))
    assert texts(prepared.train)[3] == "<s>### User\nwhat is 3?\n\n### Assistant\nthe answer is 3 </s>"
    ids, supervised = prepared.train.row(3)
    assert (ids.dtype, supervised.dtype) == (np.int32, np.bool_)
    assert byte_tokenizer().decode(ids[supervised]) == "the answer is 3 </s>"
    assert prepared.train.lengths.sum() == prepared.train_ledger.tokens_kept
    assert (prepared.eval, prepared.eval_ledger, prepared.eval_examples) == (None, None, [])


@pytest.mark.parametrize("policy", ["truncate", "drop", "split"])
@pytest.mark.parametrize("weight", [1.0, 0.5, 2.5])
def test_the_sums_of_the_ledger_balance(mixed, prepare, policy, weight):
    sources = [replace(source, weight=weight) for source in mixed]
    prepared = prepare(*sources, on_long_row=policy, on_bad_row="skip")
    ledger, made = prepared.train_ledger, prepared.train
    assert ledger.rows_read == ledger.rows_kept + sum(ledger.dropped.values())
    assert ledger.tokens_kept == made.lengths.sum()
    template, tokens_read = load_template(byte_tokenizer()), 0
    for source in mixed:
        read = (row.example for row in examples_of(source))
        for n, good in enumerate(each for each in read if not isinstance(each, BadRow)):
            places = int((n + 1) * weight) - int(n * weight)
            tokens_read += places * len(template.encode(good).ids)
    assert ledger.tokens_read == tokens_read
    assert ledger.tokens_supervised == made.labels_per_row.sum()
    assert made.lengths.max() <= 64
    assert made.labels_per_row.min() >= 1
    assert ledger.dropped["null field"] == ledger.dropped["torn last line"] == 1


def test_truncation_cuts_the_end_and_counts_it(rows, prepare):
    ledger = prepare(rows(6, length=20)).train_ledger
    assert (ledger.rows_kept, ledger.rows_cut, ledger.tokens_kept) == (6, 6, 6 * 64)
    assert ledger.tokens_cut == ledger.tokens_read - 6 * 64
    assert ledger.longest_row > 64


def test_split_keeps_every_token_that_is_learned(rows, prepare):
    source = rows(6, length=40)
    whole = prepare(source, seq_len=4096).train.lengths
    split = prepare(source, on_long_row="split")
    assert (split.train_ledger.rows_kept, split.train_ledger.tokens_cut) == (6, 0)
    assert len(split.train) == sum(-(-length // 64) for length in whole)
    assert split.train.lengths.sum() == whole.sum()


def test_a_part_whose_only_token_has_nothing_before_it_is_cut(rows, prepare):
    source = rows(1, length=20)
    most = prepare(source, seq_len=4096).train_ledger.tokens_read - 1
    split = prepare(source, seq_len=most, on_long_row="split")
    assert len(split.train) == 1
    assert (split.train_ledger.tokens_kept, split.train_ledger.tokens_cut) == (most, 1)


def test_rows_too_long_are_dropped_or_refused(rows, prepare):
    source = rows(6, length=20, weight=2.0)
    ledger = prepare(source, rows(2, name="short"), on_long_row="drop").train_ledger
    assert (ledger.rows_kept, ledger.dropped) == (2, {"longer than the context": 12}), (
        "each as often as it is"
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has .* tokens, seq_len is 64: .* too many"):
        prepare(source, on_long_row="error")


def test_training_on_the_prompt_learns_every_token_but_the_first(rows, prepare):
    prepared = prepare(rows(5), train_on_prompt=True)
    assert prepared.train_ledger.tokens_supervised == prepared.train_ledger.tokens_kept - 5
    batch = Batch(micro_batch_size=5, accumulation=1, seq_len=64, packing=False)
    step = Loader(prepared.train, batch, seed=0).batch_at(LoaderState())
    assert step.supervised_tokens == step.tokens - 5


def test_held_out_rows_stay_held_out_when_others_are_added(rows, prepare):
    small = prepare(rows(100), val_fraction=0.2)
    large = prepare(rows(160, start=-60), val_fraction=0.2)
    assert set(texts(small.eval)) <= set(texts(large.eval))
    assert not set(texts(large.eval)) & set(texts(large.train))
    assert len(small.eval) + len(small.train) == 100
    assert 8 <= len(small.eval) <= 35
    other = prepare(rows(100), val_fraction=0.2, seed=2)
    assert texts(other.eval) != texts(small.eval)


@pytest.mark.parametrize("count", [2, 15, 99])
def test_a_number_of_rows_is_held_out_the_same_each_time(rows, prepare, count):
    prepared = prepare(rows(60), rows(40, name="other", start=60, weight=2.0), val_fraction=count)
    assert len(prepared.eval) == count
    assert len(set(texts(prepared.eval)) | set(texts(prepared.train))) == 100
    assert not set(texts(prepared.eval)) & set(texts(prepared.train))
    again = prepare(rows(100), val_fraction=count)
    assert sorted(texts(again.eval)) == sorted(texts(prepared.eval))


def test_equal_rows_are_on_the_same_side(rows, prepare):
    prepared = prepare(rows(50), rows(50), val_fraction=0.3)
    assert not set(texts(prepared.eval)) & set(texts(prepared.train))
    assert len(prepared.eval) + len(prepared.train) == 100


def test_evaluation_rows_may_come_from_another_file(rows, prepare):
    prepared = prepare(rows(5), eval_sources=(rows(70, name="test", start=500),))
    assert (len(prepared.train), len(prepared.eval), len(prepared.eval_examples)) == (5, 70, 64)
    assert prepared.eval_examples[0].messages[0].content == "what is 500?"
    assert prepared.eval_ledger.rows_kept == 70
    with pytest.raises(DataError, match=r"eval_data .*test.jsonl: weight 2 is not used"):
        prepare(rows(5), eval_sources=(rows(7, name="test", weight=2.0),))


@pytest.mark.parametrize(("weight", "places"), [(2.0, 20), (1.5, 15), (0.1, 1)])
def test_a_weight_gives_a_source_its_share(rows, prepare, weight, places):
    prepared = prepare(rows(10, weight=weight), rows(3, name="other", start=50))
    assert len(prepared.train) == places + 3
    ledger = prepared.train_ledger
    assert ledger.rows_read == ledger.rows_kept + sum(ledger.dropped.values())


def test_the_second_time_nothing_is_tokenised(rows, prepare, monkeypatch):
    first = prepare(rows(30), val_fraction=0.2)
    monkeypatch.setattr(RowTokeniser, "__call__", lambda self, _: pytest.fail("tokenised again"))
    second = prepare(rows(30), val_fraction=0.2)
    assert texts(first.train) == texts(second.train)
    assert texts(first.eval) == texts(second.eval)
    assert (first.train_ledger, first.eval_ledger) == (second.train_ledger, second.eval_ledger)
    assert first.eval_examples == second.eval_examples
    assert isinstance(second.train._ids, np.memmap)


def test_a_full_disk_leaves_no_entry(tmp_path, rows, prepare, monkeypatch):
    def full(self, *arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DatasetWriter, "add", full)
    with pytest.raises(DataError, match=r"the cache for tokenised data cannot be written: .*: No space left"):
        prepare(rows(30))
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "here"))
    for given, folder in (("", tmp_path / "here"), (str(tmp_path / "there"), tmp_path / "there")):
        assert cache.folder_of(given) == folder / "tokens"


def test_the_ledger_reads_well(mixed, rows, prepare):
    lines = describe_ledger(prepare(*mixed, on_bad_row="skip").train_ledger).splitlines()
    assert lines[0] == "39 rows read as prompt_completion, 36 kept"
    assert lines[1] == "3 dropped: 1 no answer left after truncation, 1 null field, 1 torn last line"
    assert any("rows longer than the context" in line for line in lines)
    assert any(line.endswith("%)") and "learned" in line for line in lines)
    lines = describe_ledger(prepare(rows(1, length=99)).train_ledger).splitlines()
    assert lines[0] == "1 row read as prompt_completion, 1 kept"
    assert any(line.startswith("1 row longer than the context: ") for line in lines)
