"""One owner for the directory of a run: two runs, or two scorings, never write into the same one.

The kernel keeps the lock (flock), and gives it up when its owner dies, even by kill -9; NFS carries it to other
machines. filelock would take the same lock, but keeps no name of the owner, cannot be asked whether a lock is held, and
its versions before 4 empty the file in which the name stands.
"""

import fcntl
import json
import os
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import path_fault, process_lives
from fitune.units import whole_number
from fitune.values.run_directory import LAUNCH_LOCK, LOCK
from fitune.values.serial import parse_json

WAIT_VARIABLE = "FITUNE_WAIT_FOR_RUN_SECONDS"
"""Names the seconds that a run waits for an earlier attempt to let go of its directory, instead of failing at once. A
cluster starts the next attempt while the pods of the one before still save."""
_LOOK_SECONDS = 0.1
"""A lock that is taken is asked for twice at least: whoever asks if it is held has it for a moment."""
_held: set[int] = set()
"""A child that is forked, and lives longer than the owner, must not have its lock."""
os.register_at_fork(after_in_child=lambda: [*map(os.close, _held)])
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def lock_directory(path: Path, *, lock: str = LOCK) -> Iterator[str]:
    """Make ``path``, own it for the duration of the block, and yield the name of this attempt, which stands in the lock
    with the process that owns it.

    A block that raises before it wrote anything into the directory leaves no lock in it.
    Raises RunDirectoryError when the directory cannot be written or another live run owns it.
    """
    is_new = not Path(path).exists()
    directory = _make_directory(Path(path))
    try:
        before = set(os.listdir(directory))
    except OSError as error:
        raise _unwritable(directory, error) from error
    file, has_ended = directory / lock, False
    handle = _acquired_in_time(file)
    _held.add(handle)
    try:
        attempt = uuid.uuid4().hex
        owner = {"pid": str(os.getpid()), "host": socket.gethostname(), "attempt": attempt}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode(), 0)
        yield attempt
        has_ended = True
    finally:
        if not has_ended:  # a run that was refused: the directory may be somebody else's
            with suppress(OSError):
                if lock not in before and set(os.listdir(directory)) == {*before, lock}:
                    file.unlink()
                    if is_new:
                        directory.rmdir()
        _held.remove(handle)
        os.ftruncate(handle, 0)  # an empty lock has no owner, however the run ended
        os.close(handle)  # closing releases the lock


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


def _acquired_in_time(file: Path) -> int:
    """The locked file, open. Raises RunDirectoryError when the lock has an owner, and still has it when the time to
    wait is over."""
    text = os.environ.get(WAIT_VARIABLE, "0")
    seconds = whole_number(text, most=10**9)
    if seconds is None:
        raise RunDirectoryError(
            f"{WAIT_VARIABLE} is {text!r}, not a whole number of seconds", hint="e.g. 600, or 0"
        )
    until = time.monotonic() + max(seconds, _LOOK_SECONDS)
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        except OSError as error:
            raise _unwritable(file.parent, error) from error
        with ExitStack() as stack:
            stack.callback(os.close, handle)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RunDirectoryError(
                    f"{file} is no regular file", hint="remove it, or choose another output_dir"
                )
            owner = _owner(handle)
            if not _is_held(handle, owner, how=fcntl.LOCK_EX):
                # the owner before may have been refused and removed it: another one has its name by now, or none
                with suppress(FileNotFoundError):
                    if os.path.samestat(file.lstat(), os.fstat(handle)):
                        stack.pop_all()
                        return handle
            elif time.monotonic() >= until:
                who = f"process {owner.get('pid')} on {owner.get('host')}, attempt {owner.get('attempt')}"
                raise RunDirectoryError(
                    f"output_dir {file.parent} is in use by {who if owner else 'another live run'}",
                    hint="wait for it to end, stop it, or choose another output_dir",
                )
        time.sleep(_LOOK_SECONDS)


def _is_held(handle: int, owner: dict[str, str], *, how: int) -> bool:
    """True if another one has the lock; else ``handle`` has it, ``how`` LOCK_EX or LOCK_SH, until it is closed."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # a file system without locks: all that is left is what the file says
        pid = owner.get("pid", "")
        is_here = owner.get("host") == socket.gethostname()
        return bool(owner) and (not is_here or (pid.isdecimal() and process_lives(int(pid))))
    return False


def _owner(handle: int) -> dict[str, str]:
    """The owner that the lock file names; empty when the file is empty or torn."""
    try:
        found = parse_json(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _unwritable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"output_dir {path} cannot be written: {error.strerror}",
        hint="choose an output_dir that you may write to",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that took a run directory and has not let go of it."""

    pid: int
    host: str
    attempt: str = ""
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
    found = [_owner_by(directory / lock) for lock in (LAUNCH_LOCK, LOCK)]
    return tuple(owner for owner in found if owner is not None)


def _owner_by(file: Path) -> Owner | None:
    try:
        handle = os.open(file, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        said = _owner(handle)
        if not said.get("pid", "").isdecimal():
            return None
        return Owner(
            pid=int(said["pid"]), host=said.get("host", ""), attempt=said.get("attempt", ""),
            since=os.fstat(handle).st_mtime, is_alive=_is_held(handle, said, how=fcntl.LOCK_SH),
        )  # fmt: skip
    finally:
        os.close(handle)
