"""One owner for the directory of a run: two runs, or two scorings, never write into the same one."""

import fcntl
import json
import math
import os
import socket
import stat
import struct
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import path_fault, process_lives
from fitune.spec.run_directory import LAUNCH_LOCK, LOCK
from fitune.spec.serial import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """This attempt owns ``directory`` until the lock is released or the process dies."""

    directory: Path
    attempt: str


_held: set[Path] = set()
"""A POSIX lock belongs to the process, so it cannot keep two runs of one process apart; this does."""


@contextmanager
def lock_directory(path: Path, *, attempt: str | None = None, lock: str = LOCK) -> Iterator[Ownership]:
    """Make ``path``, own it for the duration of the block.

    The lock is a POSIX record lock on a file in it: the kernel gives it up when its owner dies, even by
    kill -9, children do not inherit it, and NFS carries it to other machines. The file says who owns it.
    A block that raises before it wrote anything into the directory leaves no lock in it.
    Raises RunDirectoryError when the directory cannot be written or another live run owns it.
    """
    is_new = not Path(path).exists()
    directory = _make_directory(Path(path))
    attempt = attempt or uuid.uuid4().hex
    file = directory / lock
    if file in _held:
        raise _in_use(directory, "another run of this process")
    try:
        before = set(os.listdir(directory))
    except OSError as error:
        raise _unwritable(directory, error) from error
    has_ended = False
    _held.add(file)
    try:
        handle = _acquired_in_time(file)
        try:
            _write_owner(handle, attempt)
            yield Ownership(directory=directory, attempt=attempt)
            has_ended = True
        finally:
            if not has_ended:
                _remove_if_alone(file, before, is_new=is_new)
            os.ftruncate(handle, 0)  # an empty lock has no owner, however the run ended
            os.close(handle)  # closing releases the lock
    finally:
        _held.discard(file)


def attempt_in(directory: Path) -> str:
    """The attempt that owns ``directory`` as this machine sees it; empty when none does."""
    try:
        handle = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _owner(handle).get("attempt", "")
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that took a run directory and has not let go of it."""

    pid: int
    host: str
    since: float
    """``time.time`` when it took the directory."""
    is_alive: bool
    """False: it was killed, and its name is all that is left."""

    @property
    def name(self) -> str:
        """``process 12 on node1``."""
        return f"process {self.pid} on {self.host}"


def owners_of(directory: Path) -> tuple[Owner, ...]:
    """Owners of ``directory``: the program that starts the ranks, then the first rank; for one process only that."""
    found = [_owner_by(directory.resolve() / lock) for lock in (LAUNCH_LOCK, LOCK)]
    return tuple(owner for owner in found if owner is not None)


def _owner_by(file: Path) -> Owner | None:
    if file in _held:  # closing the file once more would give up this process's lock
        return Owner(pid=os.getpid(), host=socket.gethostname(), since=file.stat().st_mtime, is_alive=True)
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        said = _owner(handle)
        pid = str(said.get("pid"))
        if not pid.isdecimal():
            return None
        host = str(said.get("host"))
        locked = _is_locked(handle)
        lives = locked if locked is not None else host != socket.gethostname() or _owner_lives(said)
        return Owner(pid=int(pid), host=host, since=os.fstat(handle).st_mtime, is_alive=lives)
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool | None:
    """True if another process has the lock, of this machine or over NFS; None where the system does not say."""
    if sys.platform != "linux":
        return None
    asked = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock, man 2 fcntl
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, asked)
    except OSError:  # a file system without locks
        return None
    return bool(struct.unpack("hhqqi0q", answer)[0] != fcntl.F_UNLCK)


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


def _remove_if_alone(file: Path, before: set[str], *, is_new: bool) -> None:
    """Remove the lock, and the directory if it ``is_new``, where nothing has come to what was there ``before``: the
    run was refused, and the directory may be somebody else's."""
    with suppress(OSError):
        if file.name not in before and set(os.listdir(file.parent)) == {*before, file.name}:
            file.unlink()
            if is_new:
                file.parent.rmdir()


def _open(file: Path) -> int:
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunDirectoryError(f"{file} is no regular file", hint="remove it, or choose another output_dir")
    return handle


WAIT_VARIABLE = "FITUNE_WAIT_FOR_RUN_SECONDS"
"""Names the seconds that a run waits for an earlier attempt to let go of its directory, instead of failing at once. A
cluster starts the next attempt while the pods of the one before still save."""
_LOOK_SECONDS = 1.0


def _acquired_in_time(file: Path) -> int:
    """The locked file, open. Raises RunDirectoryError when the lock has an owner, and still has it when the time to
    wait is over."""
    until = time.monotonic() + _seconds_to_wait()
    while True:
        handle = _open(file)
        is_owned = False
        try:
            _acquire(handle, file.parent)
            is_owned = _is_still(file, handle)
        except RunDirectoryError:
            if time.monotonic() >= until:
                raise
            time.sleep(_LOOK_SECONDS)
        finally:
            if not is_owned:
                os.close(handle)
        if is_owned:
            return handle


def _is_still(file: Path, handle: int) -> bool:
    """False if the file was removed by the owner before, who was refused: another one has its name by now, or none."""
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _seconds_to_wait() -> float:
    text = os.environ.get(WAIT_VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RunDirectoryError(
            f"{WAIT_VARIABLE} is {text!r}, not a number of seconds", hint="e.g. 600, or 0"
        )
    return seconds


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
    """The owner that the lock file names; empty when the file is empty or torn."""
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
