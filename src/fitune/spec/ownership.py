"""A directory with one owner: two runs, or two scorings, never write into the same one."""

import fcntl
import json
import os
import socket
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.spec.path_names import path_fault
from fitune.spec.strict_json import parse_json
from fitune.spec.temporaries import process_lives

LOCK = "run.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """This attempt owns ``directory`` until the lock is released or the process dies."""

    directory: Path
    attempt: str


_held: set[Path] = set()
"""A POSIX lock belongs to the process, so it cannot keep two runs of one process apart; this does."""


@contextmanager
def lock_directory(path: Path, *, attempt: str | None = None) -> Iterator[Ownership]:
    """Make ``path``, own it for the duration of the block.

    The lock is a POSIX record lock on ``run.lock``: the kernel gives it up when its owner dies, even by
    kill -9, children do not inherit it, and NFS carries it to other machines. The file says who owns it.
    Raises RunDirectoryError when the directory cannot be written or another live run owns it.
    """
    directory = _make_directory(Path(path))
    attempt = attempt or uuid.uuid4().hex
    file = directory / LOCK
    if file in _held:
        raise _in_use(directory, "another run of this process")
    handle = _open(file)
    _held.add(file)
    try:
        _acquire(handle, directory)
        _write_owner(handle, attempt)
        try:
            yield Ownership(directory=directory, attempt=attempt)
        finally:
            os.ftruncate(handle, 0)  # an empty lock has no owner, however the run ended
    finally:
        os.close(handle)  # closing releases the lock
        _held.discard(file)


def _make_directory(path: Path) -> Path:
    if fault := path_fault(str(path)):
        raise RunDirectoryError(f"output_dir: {fault}", hint="choose another output_dir")
    if path.is_symlink() and not path.exists():
        raise RunDirectoryError(
            f"output_dir {path} is a symbolic link to {os.readlink(path)}, which is not there",
            hint="make that folder, or remove the link",
        )
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"output_dir {path} is a file", hint="choose another output_dir")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path.resolve()


def _open(file: Path) -> int:
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunDirectoryError(f"{file} is no regular file", hint="remove it, or choose another output_dir")
    return handle


def _acquire(handle: int, directory: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise _in_use(directory, _describe(_owner(handle))) from None
    except OSError:  # a file system without locks: all that is left is what the file says
        owner = _owner(handle)
        if owner and (owner.get("host") != socket.gethostname() or _owner_lives(owner)):
            raise _in_use(directory, _describe(owner)) from None


def _owner(handle: int) -> dict[str, str]:
    """What the lock file says; nothing when it is empty or torn."""
    try:
        found = parse_json(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _owner_lives(owner: dict[str, str]) -> bool:
    pid = str(owner.get("pid"))
    return pid.isdecimal() and process_lives(int(pid))


def _write_owner(handle: int, attempt: str) -> None:
    owner = {"pid": str(os.getpid()), "host": socket.gethostname(), "attempt": attempt}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(owner).encode(), 0)


def _describe(owner: dict[str, str]) -> str:
    if not owner:
        return "another live run"
    return f"process {owner.get('pid')} on {owner.get('host')}, attempt {owner.get('attempt')}"


def _in_use(directory: Path, owner: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"output_dir {directory} is in use by {owner}",
        hint="wait for it to end, stop it, or choose another output_dir",
    )


def _unwritable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"output_dir {path} cannot be written: {error.strerror}",
        hint="choose an output_dir that you may write to",
    )
