"""The cache of tokenised data: changed bytes are seen, killed makers are cleaned up after, two makers can meet."""

import fcntl
import json
import os
import time

import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data import cache
from fitune.data.preparing import prepare_data
from fitune.values.plan import DataPlan, DataSource
from jsonl import write_lines

FILES = [f"{part}/{name}" for part in ("train", "eval") for name in ("ids", "supervised", "offsets")]


@pytest.fixture
def prepare(tmp_path):
    def run():
        file = tmp_path / "rows.jsonl"
        rows = [{"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(60)]
        write_lines(file, rows)
        data = DataPlan(
            sources=(DataSource(path=str(file), weight=1.5),),
            cache_dir=str(tmp_path / "cache"),
            val_fraction=0.2,
        )
        notes = []
        prepared = prepare_data(
            data, tokenizer=byte_tokenizer(), tokenizer_path="tiny", seq_len=64, seed=1, on_note=notes.append
        )
        return prepared, notes

    return run


def the_entry(tmp_path):
    (entry,) = (tmp_path / "cache" / "tokens").iterdir()
    return entry


@pytest.mark.parametrize("name", [*FILES, "train/places", "manifest.json"])
def test_a_flipped_bit_is_seen_and_the_entry_is_made_again(tmp_path, prepare, name):
    first, notes = prepare()
    assert notes == []
    file = the_entry(tmp_path) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again, notes = prepare()
    assert len(notes) == 1
    assert "is damaged" in notes[0]
    assert notes[0].endswith("it is made again")
    assert (again.train.fingerprint, again.eval.fingerprint) == (
        first.train.fingerprint,
        first.eval.fingerprint,
    )
    assert (again.train_ledger, again.eval_examples) == (first.train_ledger, first.eval_examples)
    assert prepare()[1] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: sealed["content"]["train_ledger"].update(rows_read=7),
        lambda sealed: sealed["content"]["train_facts"].update(fingerprint="0" * 32),
        lambda sealed: sealed["files"].pop("train/ids"),
        lambda sealed: sealed.pop("hash"),
        lambda sealed: sealed.update(content=[]),
    ],
)
def test_a_changed_manifest_is_seen(tmp_path, prepare, change):
    first, _ = prepare()
    file = the_entry(tmp_path) / "manifest.json"
    sealed = json.loads(file.read_text())
    change(sealed)
    file.write_text(json.dumps(sealed))
    again, notes = prepare()
    assert len(notes) == 1
    assert again.train_ledger == first.train_ledger
    assert again.train.fingerprint == first.train.fingerprint


@pytest.mark.parametrize("instead", ["link", "pipe", "folder", "nothing"])
def test_what_stands_in_the_place_of_a_file_is_not_followed(tmp_path, prepare, instead):
    prepare()
    file = the_entry(tmp_path) / "train" / "ids"
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    if instead == "link":
        file.symlink_to(elsewhere)
    elif instead == "pipe":
        os.mkfifo(file)
    elif instead == "folder":
        file.mkdir()
    assert len(prepare()[1]) == 1
    assert elsewhere.exists()
    assert prepare()[1] == []


def test_an_added_file_is_seen(tmp_path, prepare):
    """One of this name would say which rows are trained, and how often."""
    first, _ = prepare()
    (the_entry(tmp_path) / "eval" / "places").write_bytes(bytes(8))
    again, notes = prepare()
    assert len(notes) == 1
    assert again.eval.fingerprint == first.eval.fingerprint


def test_what_killed_makers_left_is_removed(tmp_path, prepare):
    tokens = tmp_path / "cache" / "tokens"
    dead, live, young = (tokens / f"abc.making-{name}" for name in ("dead", "live", "young"))
    long_ago = time.time() - 3600
    for folder in (dead, live, young):
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "ids").write_bytes(b"1234")
        if folder is not young:
            os.utime(folder, (long_ago, long_ago))
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    prepare()
    assert not dead.exists()
    assert live.exists()
    assert young.exists()
    os.close(lock)


def test_two_that_make_the_same_entry_both_have_it(tmp_path):
    entry = tmp_path / "tokens" / "key"
    mapped = []
    with cache.making(entry) as first, cache.making(entry) as second:
        for folder in (first, second):
            (folder / "ids").write_bytes(b"1234")
            mapped.append((folder / "ids").open("rb"))
            cache.publish(folder, entry, {"made": 1})
    assert cache.read_entry(entry) == {"made": 1}
    assert [file.read() for file in mapped] == [b"1234", b"1234"]
    assert [each.name for each in entry.parent.iterdir()] == ["key"]
    for file in mapped:
        file.close()
