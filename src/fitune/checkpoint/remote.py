"""Checkpoints of a run in a store, under the names that they have in its directory.

COMMIT is sent last and removed first, so a checkpoint that is half there does not count. The store's own
checkpoints/LINE says which attempt may write: a later one puts its line there, and an earlier one that still lives
sends nothing more.
"""

import math
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.commit import (
    COMMIT,
    DAMAGED,
    FOLDER,
    LINE,
    Commit,
    Line,
    LineFile,
    OnNote,
    line_bytes,
    loss_of,
    parse_sealed,
    put_in_place,
    read_commit,
    read_line,
    require_space,
    verify,
    write_hashed,
    write_line,
)
from fitune.errors import CheckpointError, StoreError
from fitune.files import remove, remove_stale_siblings, temporary_sibling
from fitune.stores.opening import WRITTEN
from fitune.stores.reading import open_stream
from fitune.stores.writing import AT_ONCE, Store, nobody_stops
from fitune.units import MIB, format_bytes

_COMMIT_FILE = re.compile(rf"step-(\d+)/{COMMIT}")
_READ_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Remote:
    """A complete checkpoint in a store."""

    store: Store
    name: str
    """Below the store: ``checkpoints/step-40``."""
    commit: Commit

    @property
    def url(self) -> str:
        """URL of its folder."""
        return self.store.below(self.name)


def complete_checkpoints(store: Store) -> list[Remote]:
    """Checkpoints of ``store`` with a COMMIT that is whole, newest first."""
    found = []
    for name in store.infos(FOLDER):
        if match := _COMMIT_FILE.fullmatch(name):
            with suppress(CheckpointError):
                remote = remote_checkpoint(store, f"{FOLDER}/step-{match[1]}")
                if remote.commit.step == int(match[1]):
                    found.append(remote)
    return sorted(found, key=lambda remote: -remote.commit.step)


def remote_checkpoint(store: Store, name: str = "") -> Remote:
    """The complete checkpoint ``name`` of the store, or the store itself. Raises CheckpointError when there is none."""
    file = f"{name}/{COMMIT}" if name else COMMIT
    content = store.read(file)
    if content is None:
        raise CheckpointError(f"{store.below(name)}: no {COMMIT}, so this is no whole checkpoint")
    try:
        return Remote(store, name, parse_sealed(Commit, content))
    except ValueError as error:
        raise CheckpointError(f"{store.below(file)}: damaged: {error}") from error


def remote_line(store: Store) -> Line:
    """The line in the store; empty where there is none, or one that is damaged."""
    content = store.read(f"{FOLDER}/{LINE}")
    try:
        return () if content is None else parse_sealed(LineFile, content).line
    except ValueError:
        return ()


def adopt_line(store: Store, root: Path, on_note: OnNote) -> Line:
    """Take over the store's line where another machine went on from what is in ``root``; returns the store's line.

    What is not on it counts no longer, here too. Raises StoreError, OSError.
    """
    line = remote_line(store)
    try:
        own = read_line(root / FOLDER)
    except CheckpointError:
        own = ()
    if line and own[: len(line)] != line:
        (root / FOLDER).mkdir(parents=True, exist_ok=True)
        write_line(root / FOLDER, line)
        if own and line[: len(own)] != own:
            on_note(
                f"{store.url}: the run went on elsewhere since; what {root} has beyond that does not count"
            )
    return line or own


def take_line(store: Store, line: Line) -> None:
    """Make ``line`` the store's: from here on attempts that are not on it send nothing more."""
    store.write(f"{FOLDER}/{LINE}", line_bytes(line))


def require_line(store: Store, line: Line) -> None:
    """Raises StoreError when another attempt has taken the store over."""
    there = remote_line(store)
    if there and there != line[: len(there)]:
        raise StoreError(
            f"{store.url}: another attempt of this run writes there now, so this one sends nothing more",
            hint="one URL for each run; what this one trained stays here",
        )


def fetch_checkpoint(remote: Remote, root: Path, on_note: OnNote) -> Path:
    """Bring a checkpoint into ``root/checkpoints``, every file hashed on the way, and return its folder.

    One that is there already, whole, is taken as it is; another one of its step, or a damaged one, is set aside.
    Raises CheckpointError when a file is not what was saved, and when the disk has no room or fails.
    """
    commit, folder = remote.commit, root / FOLDER
    target = folder / f"step-{commit.step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(CheckpointError):  # none, or one that is damaged
            if verify(target, unless_known=True, on_note=on_note).digest == commit.digest:
                return target
        remove_stale_siblings(folder, target.name)
        size = sum(stored.bytes for stored in commit.files.values())
        require_space(folder, size, what=f"checkpoint {remote.url}")
        on_note(f"fetching {remote.url}: {format_bytes(size)}")
        temporary = temporary_sibling(target)
        temporary.mkdir()
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda name: _fetch_file(remote, name, temporary), commit.files))
            put_in_place(temporary, target, commit, word=DAMAGED, on_note=on_note)
        finally:
            remove(temporary)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}") from error
    return target


def _fetch_file(remote: Remote, name: str, folder: Path) -> None:
    stored = remote.commit.files[name]
    with closing(open_stream(f"{remote.url}/{name}", clients=WRITTEN)) as stream:
        found = write_hashed(folder / name, iter(lambda: stream.read(_READ_BYTES), b""))
    if found != stored:
        raise CheckpointError(
            f"{remote.url}/{name}: damaged, {found.bytes} bytes with sha256 {found.sha256[:12]}… instead of "
            f"{stored.bytes} with {stored.sha256[:12]}…"
        )


def newest_in_store(store: Store, root: Path, line: Line, *, after: int, on_note: OnNote) -> Path | None:
    """Fetch the newest checkpoint on ``line`` that is later than step ``after``; None where there is none.

    One that is damaged in the store is named and passed over.
    """
    for remote in complete_checkpoints(store):
        if remote.commit.step <= after:
            return None
        if line and not remote.commit.is_on(line):
            continue
        try:
            return fetch_checkpoint(remote, root, on_note)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            on_note(f"{remote.url} is skipped: {error.message}")
    return None


def send_checkpoint(store: Store, path: Path, *, stop: Callable[[], bool] = nobody_stops) -> int:
    """Let the store hold the checkpoint in ``path``; returns the bytes that were sent, 0 when it was there already.

    Raises StoreError, and CheckpointError where ``path`` is no checkpoint any more.
    """
    commit, name = read_commit(path), f"{FOLDER}/{path.name}"
    with suppress(CheckpointError):  # none, or a part of one
        if remote_checkpoint(store, name).commit.digest == commit.digest:
            return 0
    try:
        return store.put_folder(path, name, [*commit.files, COMMIT], last=COMMIT, stop=stop)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def prune_store(store: Store, line: Line, *, keep: int) -> tuple[str, ...]:
    """Remove checkpoints on ``line`` but the newest ``keep`` and the best, and what killed attempts left half sent.

    One whose COMMIT cannot be read is left alone: another version may read it, or a person mend it.
    Returns the names of those that were removed.
    """
    there = store.infos(FOLDER)
    members = [remote for remote in complete_checkpoints(store) if remote.commit.is_on(line)]
    kept = {remote.name for remote in members[:keep]}
    best = min(members, key=lambda r: (loss_of(r.commit), r.commit.step), default=None)
    if best is not None and loss_of(best.commit) < math.inf:
        kept.add(best.name)
    doomed = {remote.name for remote in members} - kept
    committed = {name.removesuffix(f"/{COMMIT}") for name in there if _COMMIT_FILE.fullmatch(name)}
    steps = {name.partition("/")[0] for name in there if name.startswith("step-")}
    halves = {f"{FOLDER}/{step}" for step in steps - committed}
    for name in sorted(doomed | halves):
        store.remove([f"{name}/{COMMIT}"])  # first: a half-removed checkpoint does not count
        store.remove([f"{FOLDER}/{file}" for file in there if f"{FOLDER}/{file}".startswith(f"{name}/")])
    return tuple(sorted(doomed))


def remove_remote_run(store: Store, names: Collection[str]) -> None:
    """Remove what an earlier run wrote under ``names``; COMMITs go first."""
    there = [name for name in store.infos() if name.partition("/")[0] in names]
    commits = [name for name in there if name.endswith(f"/{COMMIT}")]
    store.remove(commits)
    store.remove(name for name in there if name not in commits)


def is_run(store: Store) -> bool:
    """True if an earlier run left steps in the store."""
    names = store.infos()
    return (
        any(_COMMIT_FILE.fullmatch(name.removeprefix(f"{FOLDER}/")) for name in names)
        or "report.json" in names
    )
