"""An epoch is guessed from the first rows of the data, without torch and without tokenising."""

from pathlib import Path

import pytest

import fitune.data.sampling as sampling
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.sampling import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE, bytes_per_token, sample_rows
from fitune.errors import DataError
from fitune.spec.plan import Batch, DataPlan, DataSource
from jsonl import write_lines

NOWHERE = Path("no-model")


def rows_file(folder, sizes):
    file = folder / "rows.jsonl"
    write_lines(file, ({"prompt": "p" * n, "completion": "c" * n} for n in sizes))
    return file


def guessed(file, *, packing=False, seq_len=4096, **data):
    weight = data.pop("weight", 1.0)
    plan = DataPlan(sources=(DataSource(path=str(file), weight=weight),), **data)
    batch = Batch(micro_batch_size=2, accumulation=1, seq_len=seq_len, packing=packing)
    return sample_rows(plan, tokenizer_folder=NOWHERE).epoch(batch)


def tokens_of(size):
    """Both texts, two messages, one token at the start."""
    return round(2 * size / BYTES_PER_TOKEN) + 2 * TOKENS_PER_MESSAGE + 1


def test_a_short_file_is_counted_whole(tmp_path):
    sizes = [40, 80, 120, 400]
    epoch = guessed(rows_file(tmp_path, sizes))
    tokens = [tokens_of(size) for size in sizes]
    assert (epoch.rows, epoch.units, epoch.longest_row) == (4, 4, max(tokens))
    assert epoch.tokens == sum(tokens)
    assert epoch.usual.rows == 2
    assert epoch.usual.tokens == round(sum(tokens) / 2)
    assert epoch.usual.longest_row == round(sum(n * n for n in tokens) / sum(tokens))
    assert epoch.usual.supervised_tokens == pytest.approx(epoch.usual.tokens / 2, abs=2)
    assert "first" not in epoch.guess


def test_rows_behind_the_first_are_told_by_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_ROWS", 2_000)
    epoch = guessed(rows_file(tmp_path, [50 + n % 100 for n in range(9_000)]))
    assert epoch.rows == pytest.approx(9_000, rel=0.02)
    assert "from the first 2,000 rows" in epoch.guess


@pytest.mark.parametrize(
    ("policy", "rows", "longest"), [("truncate", 4, 100), ("drop", 3, 71), ("split", 6, 100)]
)
def test_long_rows_are_treated_as_training_treats_them(tmp_path, policy, rows, longest):
    file = rows_file(tmp_path, [40, 80, 120, 400])
    assert tokens_of(400) == 211
    epoch = guessed(file, seq_len=100, on_long_row=policy)
    assert (epoch.rows, epoch.longest_row) == (rows, longest)


def test_weights_and_held_out_rows_change_the_count(tmp_path):
    file = rows_file(tmp_path, [40] * 100)
    assert guessed(file, weight=2.0).rows == 200
    assert guessed(file, val_fraction=0.1).rows == 90
    assert guessed(f"{file}#30").rows == 30


def test_the_average_row_keeps_no_more_than_seq_len(tmp_path):
    file = rows_file(tmp_path, [40, 80, 400])
    sample = sample_rows(DataPlan(sources=(DataSource(path=str(file)),)), tokenizer_folder=NOWHERE)
    assert sample.mean_row_tokens(4096) == round((31 + 51 + 211) / 3)
    assert sample.mean_row_tokens(100) == round((31 + 51 + 100) / 3)


def test_packs_are_counted(tmp_path):
    file = rows_file(tmp_path, [40] * 100)
    each = 100 // tokens_of(40)
    assert guessed(file, packing=True, seq_len=100).units == -(-100 // each)


def test_the_models_own_tokenizer_counts(model_folder, data_file):
    plan = DataPlan(sources=(DataSource(path=str(data_file)),))
    batch = Batch(micro_batch_size=2, accumulation=1, seq_len=256, packing=False)
    epoch = sample_rows(plan, tokenizer_folder=model_folder).epoch(batch)
    assert epoch.rows == 56
    assert epoch.guess.endswith("bytes a token")


@pytest.mark.parametrize("content", ["[[[", "[]", '{"added_tokens": [{"id": 1, "content": "a"}]}'])
def test_a_damaged_tokenizer_is_left_to_training_to_refuse(tmp_path, data_file, content):
    (tmp_path / "tokenizer.json").write_text(content)
    plan = DataPlan(sources=(DataSource(path=str(data_file)),))
    batch = Batch(micro_batch_size=2, accumulation=1, seq_len=256, packing=False)
    epoch = sample_rows(plan, tokenizer_folder=tmp_path).epoch(batch)
    assert epoch.guess.endswith("(tokenizer.json cannot be read)")


def test_truncation_and_padding_saved_in_a_tokenizer_are_not_used(tmp_path):
    """Tokenizers of sentence models are saved with both; training encodes rows without."""
    tokenizer = byte_tokenizer().backend_tokenizer
    texts = ["hello world, what is two and two? " * 9, "ping"] * 20

    def guess():
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return bytes_per_token(texts, tmp_path)[0]

    right = guess()
    tokenizer.enable_truncation(8)
    assert guess() == right
    tokenizer.enable_padding(length=512)
    assert guess() == right


def test_what_lies_elsewhere_is_not_guessed():
    for path in ("owner/name", "s3://bucket/rows.jsonl"):
        data = DataPlan(sources=(DataSource(path=path),))
        assert sample_rows(data, tokenizer_folder=NOWHERE) is None


def test_a_missing_file_and_one_without_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        guessed(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no row"):
        guessed(rows_file(tmp_path, []))
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "completion": 7}\n')
    with pytest.raises(
        DataError, match=r"no row that can be trained on, from the first: .*other.jsonl:1: .*7"
    ):
        guessed(tmp_path / "other.jsonl")


def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path):
    file = rows_file(tmp_path, [40] * 5)
    with file.open("a") as lines:
        lines.write('{"prompt": "a", "completion": 7}\n{"prompt": \n[1, 2]\n{"prompt": "x"\n')
    epoch = guessed(file)
    assert epoch.rows == 5
    assert sum(epoch.bad_rows.values()) == 4
    assert epoch.bad_rows["not JSON"] == 2
    assert not guessed(rows_file(tmp_path, [40] * 5)).bad_rows
