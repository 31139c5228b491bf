"""Shards that were damaged are errors for people, with the file that is at fault."""

import json
import shutil
from pathlib import Path

import pytest

from fitune.errors import RunDirectoryError
from score.scorings import everything, quietly


def shards(plan):
    return Path(plan.output_dir) / "shards"


def require_damaged(plan, path, why, *, hint=""):
    with pytest.raises(RunDirectoryError, match=f"{path.name}: .*damaged: {why}") as refused:
        quietly(plan)
    assert str(refused.value.hint).startswith(hint or f"remove {shards(plan) / path.name[:5]}.json to answer")


@pytest.mark.parametrize("kind", ["answers", "tasks"])
def test_a_damaged_shard_is_an_error_with_its_file(finished, kind):
    shard = shards(finished) / f"00001.{kind}.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"a", b"b", 1))
    require_damaged(finished, shard, "its bytes")
    shard.unlink()
    require_damaged(finished, shard, "No such file")


@pytest.mark.parametrize("damage", ["{\n" * 8, "", "null\n" * 8, '{"other": 1}\n' * 8])
def test_grades_that_were_damaged_are_an_error_with_their_file_and_without_it_they_are_made_again(
    finished, damage
):
    """Grades have no hash of their own."""
    before = everything(finished)
    (path, *_) = shards(finished).glob("00001.grades-*.jsonl")
    path.write_text(damage)
    require_damaged(finished, path, "", hint="remove this file")
    path.unlink()
    quietly(finished)
    assert everything(finished) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (b"", "Invalid JSON"),
        (b"[1, 2]", "Input should be an object"),
        ({"ids": ["train-0001"]}, "its ids, contents and states are not equally many"),
        ({"ids": 8}, "ids: "),
        ({"states": ["x"] * 8}, "states.0: "),
        ({"sha256": "abc"}, "sha256: "),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_an_error_with_its_file(finished, change, why):
    path = shards(finished) / "00000.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change).encode()
    path.write_bytes(change)
    require_damaged(finished, path, why)


@pytest.mark.parametrize("part", ["ids", "contents", "states", "sha256"])
def test_a_flipped_bit_in_a_manifest_is_damage_and_without_it_the_folder_is_as_before(finished, part):
    """A changed id is no changed data; a state of 2 that became 0 would ask its row again."""
    before = everything(finished)
    path = shards(finished) / "00000.json"
    written = bytearray(path.read_bytes())
    at = written.index(f'"{part}"'.encode())
    place = next(n for n in range(at + len(part) + 3, len(written)) if chr(written[n]) in "0123456789")
    written[place] ^= 2
    path.write_bytes(written)
    with pytest.raises(RunDirectoryError, match="00000.*: the shard is damaged: its .* not those"):
        quietly(finished)
    if part == "states":
        path.unlink()
        quietly(finished)
        assert everything(finished) == before


def test_a_manifest_of_an_earlier_version_has_no_hash_of_its_rows(finished):
    path = shards(finished) / "00000.json"
    found = json.loads(path.read_text())
    del found["sha256"]["rows"]
    path.write_text(json.dumps(found))
    assert quietly(finished).rows_asked == 0


def test_a_shard_of_another_run_is_an_error_with_its_file(finished):
    shutil.copy(shards(finished) / "00001.json", shards(finished) / "00000.json")
    require_damaged(finished, shards(finished) / "00000.answers.jsonl", "its bytes are not those")
