"""Regular files and their names: read without blocking, on the disk when a writing function returns.

A rename or a new name is durable only after its folder was synced too (man 2 fsync, NOTES). What is not finished has
a hidden name that tells which process left it and that nobody can guess: whoever could guess it could put a link there
before and have another file written over.
"""

import errno
import glob
import io
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from fitune.units import MIB, format_bytes

MOST_TEXT_BYTES = 16 * MIB
"""Largest file that is read whole, written by hand or by this program: a recipe, a plan, a report, a template."""


def open_regular(path: str | Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading bytes; a named pipe, a socket, a device or a folder is refused, never waited for.

    ``follow_links`` False refuses a symbolic link as well: for files that this program wrote under that name.
    Raises OSError; its ``strerror`` says what is there instead.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    return os.fdopen(_open_checked(path, flags), "rb")


def read_bytes(
    path: str | Path, *, limit: int = MOST_TEXT_BYTES, follow_links: bool = True, own_pipe: bool = False
) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises OSError.

    ``own_pipe`` also takes a pipe that whoever started this program opened for it (/dev/stdin, ``<(…)``).
    """
    is_opened = own_pipe and (str(path) == "/dev/stdin" or str(path).startswith("/dev/fd/"))
    with open(path, "rb") if is_opened else open_regular(path, follow_links=follow_links) as file:
        content = bytearray()  # in parts: asked for 2 GiB at once, Python takes them before it reads
        while len(content) <= limit and (part := file.read(2**20)):
            content += part
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(limit)}", str(path))
    return bytes(content)


def read_text(
    path: str | Path, *, limit: int = MOST_TEXT_BYTES, follow_links: bool = True, own_pipe: bool = False,
    encoding: str = "utf-8",
) -> str:  # fmt: skip
    """The text of a file, as ``read_bytes`` reads it. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, limit=limit, follow_links=follow_links, own_pipe=own_pipe).decode(encoding)


def _open_checked(path: str | Path, flags: int) -> int:
    """A handle of a regular file; O_NONBLOCK keeps the open from waiting for the other end of a pipe."""
    try:
        handle = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno in (
            errno.ELOOP,
            errno.ENXIO,
        ):  # the system's words for a link that is not followed, a socket
            raise OSError(errno.EINVAL, "a link or a socket, not a regular file", str(path)) from None
        raise
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", ascii(str(path))) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
    return handle


def open_for_append(path: Path) -> BinaryIO:
    """Open a regular file, made when there is none, for writing at its end. Raises OSError for a link or a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_open_checked(path, flags), "ab")


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file is the old one or the new one, never a part of it. Raises OSError; nothing unfinished is left then."""
    temporary = temporary_sibling(path)
    data = content.encode() if isinstance(content, str) else content
    with naming(path, size=len(data)):
        try:
            write_synced(temporary, [data])
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write ``path`` anew, which is on the disk and has that name once the block ends without an error.

    Raises OSError that names ``path``; nothing unfinished is left then.
    """
    temporary = temporary_sibling(path)
    with naming(path):
        try:
            with _Named(io.FileIO(temporary, "xb"), path) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


class _Named(io.BufferedWriter):
    """Errors of writing name ``path``, also where several files are written at a time."""

    def __init__(self, raw: io.FileIO, path: Path) -> None:
        super().__init__(raw)
        self._path = path

    def write(self, content: Any) -> int:
        """Writes as BufferedWriter does, but an OSError names ``path``."""
        with naming(self._path):
            return super().write(content)


@contextmanager
def naming(path: Path, *, size: int = 0) -> Iterator[None]:
    """Gives an OSError the name of the file that is written, which the system does not know by a handle; that of a full
    disk the bytes to write, where ``size`` is known, and the free ones."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not Path(str(error.filename)).name.startswith(TEMPORARY):
            raise
        said = error.strerror
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted = f"{format_bytes(size)} to write, " if size else ""
            said = f"{said}: {wanted}{format_bytes(shutil.disk_usage(path.parent).free)} free"
        raise OSError(error.errno, said, str(path)) from error


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write the chunks one after another into a new file and sync. Raises OSError, also when something is there."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            while view.nbytes:  # Linux takes at most 2 GiB in one call
                view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Takes a file as well: fsync needs no handle that can write."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync files that a library wrote, then the folder that names them."""
    for path in folder.rglob("*"):
        sync_folder(path)
    sync_folder(folder)


TEMPORARY = ".tmp-"
"""Prefix of the name of every unfinished file and folder."""


def temporary_sibling(target: Path) -> Path:
    """A hidden name next to ``target`` that nobody can guess and that says whose it is."""
    return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{os.urandom(8).hex()}")


def remove_stale_siblings(folder: Path, name: str = "") -> None:
    """Remove what dead processes, or an earlier failure of this one, left half done of ``name`` in ``folder``; of
    every name when there is none.

    A link among them is removed itself, never what it points to.
    """
    owned = re.compile(f"{re.escape(TEMPORARY)}{re.escape(name) or '.+'}-([0-9]{{1,10}})-[0-9a-f]{{16}}")
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        match = owned.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not process_lives(int(match[1]))):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def process_lives(pid: int) -> bool:
    """True if a process with this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's process is a process
    return True


_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
"""NAME_MAX and PATH_MAX of Linux (man 7 path_resolution)."""


def path_fault(path: str) -> str | None:
    """Reason why ``path`` cannot be the name of a file or folder; None when it can."""
    for character in path:
        category = unicodedata.category(character)
        if category in ("Cc", "Cs"):
            kind = "a control character" if category == "Cc" else "an unpaired surrogate"
            return f"{ascii(path)[:80]} contains {kind} (U+{ord(character):04X})"
    longest = max(path.split("/"), key=len)
    size = len(longest.encode())
    if size > _LONGEST_NAME_BYTES:
        return f"the name {longest[:40]}… has {size} bytes, at most {_LONGEST_NAME_BYTES} are allowed"
    size = len(path.encode())
    if size > _LONGEST_PATH_BYTES:
        return f"the path {path[:40]}… has {size} bytes, at most {_LONGEST_PATH_BYTES} are allowed"
    return None


def is_template(text: str) -> bool:
    """True for the text of a Jinja template, which may stand where the path of one does."""
    return "{%" in text or "{{" in text


def is_there(path: str) -> bool:
    """True for a file or a folder, for the file of ``FILE#500``, and for a pattern that names files."""
    if is_template(path):
        return False
    if os.path.exists(path) or os.path.exists(path.rpartition("#")[0]):
        return True
    return bool(re.search(r"[*?\[]", path)) and any(glob.iglob(path, recursive=True))


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """$FITUNE_CACHE, else fitune's folder of $XDG_CACHE_HOME, else of ~/.cache."""
    root = environment.get("FITUNE_CACHE") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "fitune"
    return Path(root).expanduser()


PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib")
