"""An epoch is guessed from the first rows of the data, without torch and without tokenising."""

from pathlib import Path

import pytest

import fitune.data.sampling as sampling
from data.tiny_tokenizers import byte_tokenizer
from fitune.data.sampling import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE, bytes_per_token, sample_rows
from fitune.errors import DataError
from fitune.values.plan import Batch, DataPlan, DataSource
from jsonl import write_lines

NOWHERE = Path("no-model")


@pytest.fixture
def rows(tmp_path):
    """A file of rows whose two texts have so many letters each."""

    def write(*sizes):
        return write_lines(
            tmp_path / "rows.jsonl", ({"prompt": "p" * n, "completion": "c" * n} for n in sizes)
        )

    return write


def sampled(file, *, tokenizer_folder=NOWHERE, weight=1.0, **data):
    plan = DataPlan(sources=(DataSource(path=str(file), weight=weight),), **data)
    return sample_rows(plan, tokenizer_folder=tokenizer_folder)


def guessed(file, *, packing=False, seq_len=4096, **settings):
    batch = Batch(micro_batch_size=2, accumulation=1, seq_len=seq_len, packing=packing)
    return sampled(file, **settings).epoch(batch)


def tokens_of(size):
    """Both texts, two messages, one token at the start."""
    return round(2 * size / BYTES_PER_TOKEN) + 2 * TOKENS_PER_MESSAGE + 1


SIZES = [40, 80, 120, 400]


def test_a_short_file_is_counted_whole(rows):
    epoch = guessed(rows(*SIZES))
    tokens = [tokens_of(size) for size in SIZES]
    assert (epoch.rows, epoch.units, epoch.longest_row) == (4, 4, max(tokens))
    assert epoch.tokens == sum(tokens)
    assert (epoch.usual.rows, epoch.usual.tokens) == (2, round(sum(tokens) / 2))
    assert epoch.usual.longest_row == round(sum(n * n for n in tokens) / sum(tokens))
    assert epoch.usual.supervised_tokens == pytest.approx(epoch.usual.tokens / 2, abs=2)
    assert "first" not in epoch.guess


def test_rows_behind_the_first_are_told_by_the_size_of_the_file(rows, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_ROWS", 1_000)
    epoch = guessed(rows(*[50 + n % 100 for n in range(4_500)]))
    assert epoch.rows == pytest.approx(4_500, rel=0.02)
    assert "from the first 1,000 rows" in epoch.guess


@pytest.mark.parametrize(
    ("policy", "kept", "longest"), [("truncate", 4, 100), ("drop", 3, 71), ("split", 6, 100)]
)
def test_long_rows_are_treated_as_training_treats_them(rows, policy, kept, longest):
    assert tokens_of(400) == 211
    epoch = guessed(rows(*SIZES), seq_len=100, on_long_row=policy)
    assert (epoch.rows, epoch.longest_row) == (kept, longest)


def test_weights_held_out_rows_and_packs_change_the_count(rows):
    file = rows(*[40] * 100)
    assert guessed(file, weight=2.0).rows == 200
    assert guessed(file, val_fraction=0.1).rows == 90
    assert guessed(file, val_fraction=20, weight=2.0).rows == 160
    with pytest.raises(
        DataError, match="no row is left to train on: val_fraction 200 holds out all 100 rows"
    ):
        guessed(file, val_fraction=200)
    with pytest.raises(DataError, match="no row is left to train on\n"):
        guessed(file, val_fraction=0.1, seq_len=8, on_long_row="drop")
    assert guessed(f"{file}#30").rows == 30
    assert guessed(file, packing=True, seq_len=100).units == -(-100 // (100 // tokens_of(40)))


def test_a_template_that_is_not_there_is_refused_before_training(rows):
    file = rows(40)
    with pytest.raises(DataError, match=r"chat_template 'llama-3.1': no such file"):
        guessed(file, chat_template="llama-3.1")
    assert (
        guessed(file, chat_template="chatml").rows == guessed(file, chat_template="{{ messages }}").rows == 1
    )


def test_the_average_row_keeps_no_more_than_seq_len(rows):
    sample = sampled(rows(40, 80, 400))
    assert sample.mean_row_tokens(4096) == round((31 + 51 + 211) / 3)
    assert sample.mean_row_tokens(100) == round((31 + 51 + 100) / 3)


def test_the_models_own_tokenizer_counts(tmp_path, data_file):
    byte_tokenizer().save_pretrained(tmp_path)
    epoch = guessed(data_file, tokenizer_folder=tmp_path)
    assert epoch.rows == 56
    assert epoch.guess.endswith("bytes a token")


def test_a_damaged_tokenizer_is_left_to_training_to_refuse(tmp_path, data_file):
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 1, "content": "a"}]}')
    epoch = guessed(data_file, tokenizer_folder=tmp_path)
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
    assert [sampled(path) for path in ("owner/name", "s3://bucket/rows.jsonl")] == [None, None]


def test_a_missing_file_and_one_without_rows_are_refused(rows, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        guessed("missing.jsonl")
    with pytest.raises(DataError, match="no row"):
        guessed(rows())
    other = tmp_path / "other.jsonl"
    for text, said in (
        ('{"prompt": "a", "completion": 7}\n{"p"', "other.jsonl:1: .*7"),
        ('{"p"', "other.jsonl:1: the f"),
    ):
        other.write_text(text)
        with pytest.raises(DataError, match=f"no row that can be trained on, from the first: .*{said}"):
            guessed(other)


def test_rows_that_cannot_be_used_are_counted_by_reason(rows):
    file = rows(*[40] * 5)
    assert not guessed(file).bad_rows
    with file.open("a") as lines:
        lines.write('{"prompt": "a", "completion": 7}\n{"prompt": \n[1, 2]\n{"prompt": "x"\n')
    epoch = guessed(file)
    assert (epoch.rows, sum(epoch.bad_rows.values()), epoch.bad_rows["not JSON"]) == (5, 4, 2)


def test_a_plan_counts_rows_of_other_formats_as_training_does(rows, prepare):
    """The first row says how a source is read; training never looks for another format behind it."""
    file = rows(*[40] * 5)
    with file.open("a") as lines:
        lines.write('{"question": "a", "answer": "b"}\n{"some": "a", "other": "b"}\n{"prompt": \n')
    epoch, ledger = guessed(file), prepare(file, seq_len=4096, on_bad_row="skip").train_ledger
    assert epoch.bad_rows == ledger.dropped == {"missing field": 2, "not JSON": 1}
    assert epoch.rows == ledger.rows_kept == 5
