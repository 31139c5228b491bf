"""A model is told from another by every byte of it, and no byte is read twice for that."""

import os
import shutil
import time
from pathlib import Path

import pytest

from fitune.models import weight_files
from fitune.models.weight_files import identity, weights_identity
from fitune.units import MIB


@pytest.fixture
def folder(tmp_path):
    """Two shards of 3 MiB."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * (3 * MIB))
    return folder


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were read to the end, and files count as settled at once."""
    names = []
    real = weight_files.open_regular

    def noting(file):
        names.append(file.name)
        return real(file)

    monkeypatch.setattr(weight_files, "open_regular", noting)
    monkeypatch.setattr("fitune.models.weight_files._SETTLED_S", -1.0)
    return names


@pytest.mark.parametrize("place", [0, MIB + 5, 3 * MIB // 2, 3 * MIB - 1])
def test_one_byte_anywhere_is_another_model(folder, place):
    before = identity(str(folder)), weights_identity(str(folder))
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\x09")
    assert identity(str(folder)) != before[0]
    assert weights_identity(str(folder)) != before[1]


def test_a_second_time_nothing_is_read(folder, hashed):
    first = weights_identity(str(folder))
    assert sorted(hashed) == ["model-1.safetensors", "model-2.safetensors"]
    assert weights_identity(str(folder)) == first
    assert len(hashed) == 2


def test_a_change_that_keeps_size_and_time_is_seen(folder, hashed):
    """The time of modification can be set back, that of the change of the file's entry cannot."""
    file = folder / "model-1.safetensors"
    before, stat = weights_identity(str(folder)), file.stat()
    content = bytearray(file.read_bytes())
    content[MIB + 7] ^= 1
    wait_for_a_tick_after(stat.st_ctime_ns, folder)
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_identity(str(folder)) != before
    assert hashed[2:] == ["model-1.safetensors"]


def wait_for_a_tick_after(changed_ns, folder):
    """Wait until the clock of the file system is past that time: it ticks some hundred times a second, or once."""
    probe, until = folder / "probe", time.monotonic() + 60
    probe.touch()
    while probe.stat().st_ctime_ns <= changed_ns:
        assert time.monotonic() < until
        time.sleep(0.001)
        probe.touch()
    probe.unlink()


def test_a_file_that_was_written_this_moment_is_not_remembered(folder, monkeypatch):
    """Within one tick of the clock it could change again and look the same."""
    monkeypatch.setattr(weight_files, "_SETTLED_S", 600.0)  # of a machine that stalls in between, too
    before = weights_identity(str(folder))
    assert not (Path(os.environ["FITUNE_CACHE"]) / "hashes").exists()
    assert weights_identity(str(folder)) == before


def test_a_cache_that_cannot_be_read_or_written_costs_time_only(folder, hashed, tmp_path, monkeypatch):
    before = weights_identity(str(folder))
    for times, entry in ((2, ""), (3, "\0")):
        for file in (Path(os.environ["FITUNE_CACHE"]) / "hashes").iterdir():
            file.write_text(entry)
        assert weights_identity(str(folder)) == before
        assert len(hashed) == 2 * times
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "file"))
    assert weights_identity(str(folder)) == before


def test_where_the_folder_lies_and_what_else_is_in_it_does_not_matter(folder, tmp_path):
    before = identity(str(folder)), weights_identity(str(folder))
    (folder / "notes.pdf").write_text("seen")
    moved = tmp_path / "elsewhere" / "some-model"
    shutil.copytree(folder, moved)
    assert (identity(str(moved)), weights_identity(str(moved))) == before
    (moved / "config.json").write_text('{"a": 1}')
    assert identity(str(moved)) != before[0]
    assert weights_identity(str(moved)) == before[1]


@pytest.mark.parametrize("name", ["", "some/hub-id"])
def test_a_name_on_the_hub_is_its_own_identity(name):
    assert identity(name) == name
