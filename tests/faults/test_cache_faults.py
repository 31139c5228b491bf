"""The cache of tokenised data: changed bytes are seen, killed makers are cleaned up after, two makers can meet."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data import cache
from fitune.data.preparing import prepare_data
from fitune.values.plan import DataPlan, DataSource
from jsonl import write_lines


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


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def link(file):
    """To where the right content lies, and must go on to lie."""
    file.symlink_to(file.rename(file.parents[3] / "elsewhere"))


def make_folder(file):
    file.unlink()
    file.mkdir()


def changed(change):
    """The manifest with another content."""

    def damage(file):
        sealed = json.loads(file.read_text())
        change(sealed)
        file.write_text(json.dumps(sealed))

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/ids", flip),
        ("eval/supervised", flip),
        ("train/places", flip),
        ("train/ids", Path.unlink),
        ("train/ids", link),
        ("train/ids", make_folder),
        ("eval/places", Path.touch),  # one of this name would say which rows are trained, and how often
        ("manifest.json", flip),
        ("manifest.json", changed(lambda sealed: sealed["content"]["train_ledger"].update(rows_read=7))),
        ("manifest.json", changed(lambda sealed: sealed["files"].pop("train/ids"))),
        ("manifest.json", changed(lambda sealed: sealed.pop("hash"))),
    ],
)
def test_a_damaged_entry_is_seen_and_made_again(tmp_path, prepare, name, damage):
    first, notes = prepare()
    assert notes == []
    (entry,) = (tmp_path / "cache" / "tokens").iterdir()
    damage(entry / name)
    again, (note,) = prepare()
    assert "is damaged" in note
    assert note.endswith("it is made again")
    for part in ("train", "eval"):
        assert getattr(again, part).fingerprint == getattr(first, part).fingerprint
    assert (again.train_ledger, again.eval_examples) == (first.train_ledger, first.eval_examples)
    assert damage is not link or (tmp_path / "cache" / "elsewhere").is_file()
    assert prepare()[1] == []


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
