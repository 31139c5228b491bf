"""Which checkpoints of a run count: COMMIT, the line of descent, and what is moved aside.

COMMIT is the manifest of a checkpoint, naming every other file with its size and sha256, and itself by its digest: a
folder whose files differ from it was damaged. checkpoints/LINE names the attempts, one after another, that led to where
the run is now. An attempt that goes on from an older checkpoint leaves its line at that step, and what was saved after
it counts no longer: neither for resuming nor for pruning, nor as the best. What counts no longer is moved aside under
another name: never preferred, never deleted.
"""

import dataclasses
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fitune.errors import CheckpointError
from fitune.files import (
    open_regular,
    read_bytes,
    sync_folder,
    temporary_sibling,
    write_atomically,
    write_synced,
)
from fitune.units import format_bytes
from fitune.values.serial import from_data, parse_object, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Hash and size that a file must have when it is read again."""

    sha256: str
    bytes: int


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Stored:
    """Write the chunks, hash them on the way (no second read), sync. Raises OSError."""
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[memoryview]:
        """The chunks, each counted and hashed before it is written."""
        nonlocal size
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            size += view.nbytes
            yield view

    write_synced(path, hashed())
    return Stored(sha256=digest.hexdigest(), bytes=size)


def link_atomically(link: Path, name: str) -> None:
    """Let ``link`` point to its sibling ``name``; relative, so that the run may be moved."""
    temporary = temporary_sibling(link)
    os.symlink(name, temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def hash_file(path: Path) -> Stored:
    """Raises OSError."""
    with open_regular(path, follow_links=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Stored(sha256=digest, bytes=file.tell())


def require_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raises CheckpointError with the arithmetic when ``folder`` has no room for ``needed_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{what} needs {format_bytes(needed_bytes)}, {format_bytes(free)} free in {folder}, "
            f"{format_bytes(needed_bytes - free)} short",
            hint="free some space, choose another output_dir, or keep fewer checkpoints (keep_checkpoints)",
        )


T = TypeVar("T")


def sealed(value: Any) -> Any:
    """``value``, a dataclass with a field ``digest``, with the sha256 of all else in that field."""
    text = to_json(dataclasses.replace(value, digest=""))
    return dataclasses.replace(value, digest=hashlib.sha256(text.encode()).hexdigest())


def read_sealed(cls: type[T], path: Path) -> T:
    """As ``parse_sealed``, of a file. Raises OSError, too."""
    return parse_sealed(cls, read_bytes(path, follow_links=False))


def parse_sealed(cls: type[T], content: bytes) -> T:
    """Raises ValueError when ``content`` is not, byte for byte, what was written."""
    data = parse_object(content)
    if "digest" not in data:
        raise ValueError("it is of an older format, without a digest of itself")
    value = from_data(cls, data)
    if to_json(sealed(value)).encode() != content:
        raise ValueError("its content does not match its digest")
    return value


LINE = "LINE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run."""

    id: str
    after: int
    """The step it went on from; 0 from the beginning."""


Line = tuple[Attempt, ...]
"""Attempts in their order, each of which saved but for the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint that another one was trained from."""

    step: int
    digest: str
    """Digest of its COMMIT."""


@dataclass(slots=True, kw_only=True)
class Descent:
    """The origin of the run that is going on."""

    line: Line
    parent: Parent | None = None
    """The last checkpoint; each save puts its own here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFile:
    """The content of ``LINE``."""

    line: Line
    digest: str = ""


def write_line(folder: Path, line: Line) -> None:
    """Raises OSError."""
    write_atomically(folder / LINE, line_bytes(line))


def keep_line(folder: Path, line: Line) -> None:
    """Write the present line where the file does not say so already. Raises OSError."""
    with suppress(CheckpointError):  # missing at the first save, or damaged since
        if read_line(folder) == line:
            return
    write_line(folder, line)


def read_line(folder: Path) -> Line:
    """The present line of ``folder``. Raises CheckpointError when the file is missing or damaged."""
    try:
        return read_sealed(LineFile, folder / LINE).line
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{folder / LINE}: cannot be read: {cause}") from error


def line_bytes(line: Line) -> bytes:
    """The content of a ``LINE``."""
    text: str = to_json(sealed(LineFile(line=line)))
    return text.encode()


OnNote = Callable[[str], None]
"""Told a line for people."""

DAMAGED = "damaged"
ABANDONED = "abandoned"


def set_aside(path: Path, word: str) -> str:
    """Rename step-N to <word>-step-N and return a line that says so. Raises OSError."""
    target = path.with_name(f"{word}-{path.name}")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{word}-{path.name}-{number}")
    os.rename(path, target)
    sync_folder(path.parent)
    why = "its files are not what was saved" if word == DAMAGED else "the run went on from an older step"
    size = sum(file.lstat().st_size for file in target.rglob("*"))
    return f"{path.name} is now {target.name} ({why}, {format_bytes(size)}; delete it if you like)"


COMMIT = "COMMIT"
STATE = "state.json"
LOG = "metrics.jsonl"
FOLDER = "checkpoints"
"""Name of the folder inside a run directory that holds step-N, ``LINE``, ``latest`` and ``best``."""

_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"[\w-]+\.\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The record by which a checkpoint counts: its files with their sizes and hashes, and the line it continues."""

    step: int
    line: Line
    """The attempts that led here; the last one saved it."""
    parent: Parent | None
    """None for the first one of a run that began at the beginning."""
    eval_loss: float | None
    files: dict[str, Stored]
    digest: str = ""
    """sha256 of all of the above."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise ValueError(f"it names {name!r}, which is no file inside its folder")

    def is_on(self, line: Line | None) -> bool:
        """True if ``line`` passes through this checkpoint; None: any does."""
        if line is None:
            return True
        if not self.line or line[: len(self.line)] != self.line:
            return False
        later = line[len(self.line) :]
        return not later or self.step <= later[0].after


def loss_of(commit: Commit) -> float:
    """Infinite for what is no candidate for the best; the earlier one of two equals is taken."""
    loss = commit.eval_loss
    return loss if loss is not None and math.isfinite(loss) else math.inf


def step_folders(folder: Path) -> list[Path]:
    """Every step-N in ``folder``, whole or not, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_commit(path: Path) -> Commit:
    """Raises CheckpointError when COMMIT is missing or changed, or the folder has the name of another step."""
    if not (path / COMMIT).is_file():
        raise CheckpointError(f"{path}: no {COMMIT}, so this is no whole checkpoint", hint=_OLDER)
    try:
        commit = read_sealed(Commit, path / COMMIT)
    except OSError as error:
        raise CheckpointError(
            f"{path / COMMIT}: cannot be read: {error.strerror or error}", hint=_OLDER
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path / COMMIT}: damaged: {error}", hint=_OLDER) from error
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != commit.step:
        raise CheckpointError(f"{path}: holds step {commit.step}, not that of its name", hint=_OLDER)
    return commit


def put_in_place(temporary: Path, target: Path, commit: Commit, *, word: str, on_note: OnNote) -> None:
    """Write COMMIT, the last file, and rename ``temporary`` to ``target``: from here on the checkpoint exists.

    One that is there already is set aside by ``word``: nothing is written over. Raises OSError.
    """
    write_synced(temporary / COMMIT, [to_json(commit).encode()])
    sync_folder(temporary)
    if target.exists():
        on_note(set_aside(target, word))
    os.rename(temporary, target)
    sync_folder(target.parent)


def verify(path: Path, *, unless_known: bool = False, on_note: OnNote = lambda _: None) -> Commit:
    """Compare every file with COMMIT, by its hash, after a line about it: hashing 100 GiB takes minutes. Raises
    CheckpointError naming the first that differs.

    ``unless_known``: the hashing is left out when this process wrote or hashed the files and the system says that none
    of them was touched since.
    """
    commit = read_commit(path)
    seen = _signature(path, commit.files)
    if unless_known and seen and _known.get(path.resolve()) == seen:
        return commit
    for name, stored in commit.files.items():  # before hashing: a truncated file of many GiB is found at once
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing", hint=_OLDER)
        size = file.stat().st_size
        if size != stored.bytes:
            raise CheckpointError(
                f"{file}: {format_bytes(size)} ({size} bytes), saved with {stored.bytes} bytes", hint=_OLDER
            )
    on_note(f"verifying {path}: {format_bytes(sum(stored.bytes for stored in commit.files.values()))}")
    for name, stored in commit.files.items():
        file = path / name
        try:
            found = hash_file(file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}", hint=_OLDER) from error
        if found != stored:
            raise CheckpointError(
                f"{file}: damaged, sha256 {found.sha256[:12]}… instead of {stored.sha256[:12]}…", hint=_OLDER
            )
    _known[path.resolve()] = seen
    return commit


def note_as_known(path: Path, files: Iterable[str]) -> None:
    """Files that this process wrote or hashed and that did not change since: they need no hashing."""
    _known[path.resolve()] = _signature(path, files)


_Signature = tuple[tuple[str, int, int, int, int], ...]

_known: dict[Path, _Signature] = {}
"""Checkpoints that this process wrote or hashed, with what the system said of their files."""


def _signature(path: Path, files: Iterable[str]) -> _Signature:
    """Size, times and inode of every file; empty where one is missing."""
    try:
        found = [(name, os.lstat(path / name)) for name in sorted({COMMIT, *files})]
    except (OSError, ValueError):
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in found)


_OLDER = "resume without a path to take the newest valid checkpoint"


def last_saved(root: Path) -> Commit | None:
    """The newest checkpoint of the present line by what the COMMITs say, nothing hashed: for messages."""
    line, _ = present_line(root / FOLDER, any_saved=True)
    return next((commit for _, commit in saved_on(root, line)), None)


def saved_on(root: Path, line: Line | None) -> Iterator[tuple[Path, Commit]]:
    """Yields the checkpoints on ``line`` in ``root``, the newest first, but those whose COMMIT cannot be read."""
    for path in reversed(step_folders(root / FOLDER)):
        with suppress(CheckpointError):
            if (commit := read_commit(path)).is_on(line):
                yield path, commit


def present_line(folder: Path, *, any_saved: bool) -> tuple[Line | None, list[str]]:
    """The line as it is now. None, and a warning, when checkpoints are there and the line is not: the newest valid one
    is then on it."""
    if not any_saved and not (folder / LINE).exists():
        return None, []
    try:
        return read_line(folder), []
    except CheckpointError as error:
        return None, [f"{error.message}; the newest valid checkpoint is taken to be of the present line"]
