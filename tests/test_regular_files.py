"""Reading never waits for what is no file, and never reads without an end."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fitune.files import open_regular, read_bytes, read_text


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # an address holds 107 bytes, a test's folder may not fit
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


_STRANGE: dict[str, Callable[[Path], None]] = {
    "a named pipe": lambda path: os.mkfifo(path),
    "a socket": _socket,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", _STRANGE)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    _STRANGE[kind](tmp_path / "strange")
    with pytest.raises(OSError, match=f"{kind}, not a regular file") as refused:
        open_regular(tmp_path / "strange")
    assert refused.value.filename == str(tmp_path / "strange")


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"
    with pytest.raises(OSError, match="a symbolic link, not a regular file"):
        read_text(tmp_path / "link", follow_links=False)


def test_a_file_that_is_not_there_is_named_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", follow_links=False)


def test_a_small_file_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_bytes(tmp_path / "file", limit=8) == b"12345678"
    with pytest.raises(OSError, match="larger than 7 B"):
        read_bytes(tmp_path / "file", limit=7)


@pytest.mark.parametrize("name", ["nul\0", "surrogate\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_system(name: str) -> None:
    with pytest.raises(OSError, match="no file can have this name"):
        open_regular(name)
