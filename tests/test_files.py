"""Files: reading never waits and never ends without a limit; a written file is the old one or the new one."""

import os
import socket
import tracemalloc

import pytest

from fitune.files import open_regular, read_bytes, read_text, write_atomically


def _socket(path):
    folder = os.open(path.parent, os.O_RDONLY)  # an address holds 107 bytes, a test's folder may not fit
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


_STRANGE = {
    "a pipe or a device": os.mkfifo,
    "a link or a socket": _socket,
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("kind", _STRANGE)
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    _STRANGE[kind](tmp_path / "strange")
    with pytest.raises(OSError, match=f"{kind}, not a regular file") as refused:
        open_regular(tmp_path / "strange")
    assert refused.value.filename == str(tmp_path / "strange")


def test_links_are_followed_only_where_they_may_be(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "text"
    with pytest.raises(OSError, match="a link or a socket, not a regular file"):
        read_text(tmp_path / "link", follow_links=False)


def test_a_file_that_is_not_there_is_named_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing", follow_links=False)


def test_a_small_file_has_a_largest_size_and_takes_no_more_memory_than_it_has(tmp_path):
    """Whatever its limit: 2 GiB were taken for a moment to read the manifest of a cache."""
    (tmp_path / "file").write_bytes(b"12345678")
    assert read_bytes(tmp_path / "file", limit=8) == b"12345678"
    with pytest.raises(OSError, match="larger than 7 B"):
        read_bytes(tmp_path / "file", limit=7)
    tracemalloc.start()
    try:
        read_bytes(tmp_path / "file", limit=2**31)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["nul\0", "surrogate\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_system(name):
    with pytest.raises(OSError, match="no file can have this name"):
        open_regular(name)


def test_texts_and_bytes_are_written(tmp_path):
    for content, expected in (("é\n", "é\n".encode()), (b"\x00\xff", b"\x00\xff")):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "file", "old")
    with monkeypatch.context() as broken:
        broken.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
