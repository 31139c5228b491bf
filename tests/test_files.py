"""A file is the old one or the new one, whatever fails on the way."""

import os
from pathlib import Path

import pytest

from fitune.files import write_atomically


def test_texts_and_bytes_are_written(tmp_path: Path) -> None:
    for content in ("é\n", b"\x00\xff"):
        write_atomically(tmp_path / "file", content)
        expected = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "file").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["file"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "file", "old")
    with monkeypatch.context() as broken:
        broken.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["file"]
