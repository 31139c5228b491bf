"""Shards that were damaged are errors for people, with the file that is at fault."""

import json
import shutil
from pathlib import Path

import pytest

from fitune.errors import RunDirectoryError
from score.scorings import everything, quietly


def test_a_damaged_shard_is_an_error_with_its_file(finished):
    shard = Path(finished.output_dir) / "shards" / "00001.answers.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"assistant", b"assisted!"))
    with pytest.raises(RunDirectoryError, match=r"00001.answers.jsonl: the shard is damaged: its bytes"):
        quietly(finished)


@pytest.mark.parametrize("damage", ["{\n" * 8, "", "null\n" * 8, '{"other": 1}\n' * 8, "[" * 100_000 + "\n"])
def test_grades_that_were_damaged_are_an_error_with_their_file_and_without_it_they_are_made_again(
    finished, damage
):
    """Grades have no hash of their own."""
    before = everything(finished)
    (path, *_) = (Path(finished.output_dir) / "shards").glob("00001.grades-*.jsonl")
    path.write_text(damage)
    with pytest.raises(RunDirectoryError, match="00001.grades-.*: damaged: ") as caught:
        quietly(finished)
    assert str(caught.value.hint).startswith("remove this file")
    path.unlink()
    quietly(finished)
    assert everything(finished) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ids": ["train-0001"]}, "its ids, contents and states are not"),
        ({"states": ["x"] * 8}, "states.0: "),
        ({"contents": [1] * 8}, "contents.0: "),
        ({"states": [[]] * 8}, "states.0: "),
        ({"ids": 8}, "ids: "),
        ({"sha256": "abc"}, "sha256: "),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_an_error_with_its_file(finished, change, why):
    path = shard_manifest(finished)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunDirectoryError, match=f"00000.json: the shard is damaged: .*{why}") as refused:
        quietly(finished)
    assert f"remove {path} to answer its rows again" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Invalid JSON"),
        (b"[1, 2]", "Input should be an object"),
        (b"{}", "ids: Field required"),
        (b'{"ids": [], "contents": [], "states": []}', "sha256: Field required"),
        (b"\x00\xff\xfe", "Invalid JSON"),
    ],
)
def test_a_manifest_that_is_none_is_an_error_with_its_file(finished, content, why):
    shard_manifest(finished).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"00000.json: the shard is damaged: {why}"):
        quietly(finished)


@pytest.mark.parametrize("part", ["ids", "contents", "states", "sha256"])
def test_a_flipped_bit_in_a_manifest_is_damage_and_without_it_the_folder_is_as_before(finished, part):
    """A changed id is no changed data; a state of 2 that became 0 would ask its row again."""
    before = everything(finished)
    path = shard_manifest(finished)
    written = bytearray(path.read_bytes())
    at = written.index(f'"{part}"'.encode())
    place = next(n for n in range(at + len(part) + 3, len(written)) if chr(written[n]) in "0123456789")
    written[place] ^= 2
    path.write_bytes(written)
    with pytest.raises(RunDirectoryError, match="00000.*: the shard is damaged: its .* not those") as refused:
        quietly(finished)
    assert f"remove {path} to answer its rows again" in str(refused.value.hint)
    path.unlink()
    quietly(finished)
    assert everything(finished) == before


def test_a_manifest_of_an_earlier_version_has_no_hash_of_its_rows(finished):
    path = shard_manifest(finished)
    found = json.loads(path.read_text())
    del found["sha256"]["rows"]
    path.write_text(json.dumps(found))
    assert quietly(finished).rows_asked == 0


def test_a_shard_of_another_run_is_an_error_with_its_file(finished, finished_once):
    path = shard_manifest(finished)
    shutil.copy(path.with_name("00001.json"), path)
    with pytest.raises(RunDirectoryError, match=r"00000.answers.jsonl: .* its bytes are not those"):
        quietly(finished)


def shard_manifest(plan):
    return Path(plan.output_dir) / "shards" / "00000.json"
