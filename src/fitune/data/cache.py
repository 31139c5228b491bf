"""Tokenised data kept by what it was made of, so that it is made once; every byte is checked before it is used."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fitune.child import Beat, nothing
from fitune.errors import DataError
from fitune.files import cache_folder, open_regular, read_bytes, sync_tree, write_synced
from fitune.stores.opening import is_url
from fitune.units import GIB, MIB

_CODE_VERSION = 6
"""Raised whenever the same input would be tokenised, or stored, differently."""
MANIFEST = "manifest.json"
TOKENS = "tokens"
"""Folder of the entries."""
_MAKING = ".making-"
_GRACE_S = 600
"""An unfinished folder is left alone for this long, whoever owns it: its maker takes the lock just after it made it."""


def folder_of(cache_dir: str) -> Path:
    """``tokens`` in ``cache_dir``, or else, and beside a URL, where fitune keeps what it can make again."""
    is_here = cache_dir and not is_url(cache_dir)
    return (Path(cache_dir).expanduser() if is_here else cache_folder()) / TOKENS


def key_of(settings: dict[str, Any], *, tokenizer: Any, template: str) -> str:
    """A hash of everything the tokens depend on: content, settings, tokenizer, template and this code."""
    parts = [
        _CODE_VERSION, settings, template, type(tokenizer).__name__, _tokenizer_text(tokenizer),
        tokenizer.special_tokens_map,
    ]  # fmt: skip
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _tokenizer_text(tokenizer: Any) -> Any:
    """The tokenizer's content, not where it was read from: a renamed folder changes nothing."""
    if tokenizer.is_fast:  # its JSON begins with truncation and padding, which rows are never encoded with
        head, _, rest = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')
        return rest or head
    with tempfile.TemporaryDirectory() as folder:  # a vocabulary is not all: merges, a model, normalisation
        tokenizer.save_pretrained(folder)
        return {name: _hash_of_file(Path(folder, name), nothing) for name in _names(Path(folder))}


class Damaged(Exception):
    """An entry of the cache is not what was written."""


def read_entry(entry: Path, *, beat: Beat = nothing) -> dict[str, Any] | None:
    """Return what ``publish`` was given for ``entry``, its files compared with their hashes; None without an entry.

    Raises Damaged, which costs no more than tokenising again.
    """
    if not entry.exists():
        return None
    try:
        sealed = json.loads(read_bytes(entry / MANIFEST, limit=2 * GIB, follow_links=False))
        content, files = sealed["content"], sealed["files"]
        if sealed["hash"] != _hash_of_text(content, files):
            raise Damaged(f"{MANIFEST} was changed")
        if _names(entry) != sorted([*files, MANIFEST]):
            raise Damaged("files were added or removed")
        for name, expected in files.items():
            if _hash_of_file(entry / name, beat) != expected:
                raise Damaged(f"{name} was changed")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(getattr(error, "strerror", None) or f"{MANIFEST} cannot be read") from None
    return dict(content)


@contextmanager
def making(entry: Path) -> Iterator[Path]:
    """A folder in which ``entry`` is made. Nothing of it is left unless ``publish`` was called.

    What processes left that were killed while they made an entry is removed. Raises DataError when the cache cannot
    be written.
    """
    with writing(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(entry.parent)
        folder = Path(tempfile.mkdtemp(prefix=f"{entry.name}{_MAKING}", dir=entry.parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _take_lock(lock)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, entry: Path, content: dict[str, Any], *, beat: Beat = nothing) -> None:
    """Give ``folder`` the name ``entry`` once all of it is on disk, with a hash of every file.

    What stands there is replaced: it was damaged, or another process has just made the same. Who has mapped its files
    keeps them. Raises OSError.
    """
    (folder / MANIFEST).unlink(missing_ok=True)  # of an entry that was fetched
    files = {name: _hash_of_file(folder / name, beat) for name in _names(folder)}
    sealed = {"content": content, "files": files, "hash": _hash_of_text(content, files)}
    write_synced(folder / MANIFEST, [json.dumps(sealed, ensure_ascii=False, indent=1).encode()])
    sync_tree(folder)
    for _ in range(10):
        with suppress(OSError):
            folder.rename(entry)
            return
        with suppress(FileNotFoundError):  # another process was here first
            aside = Path(tempfile.mkdtemp(prefix=f"{entry.name}{_MAKING}", dir=entry.parent))
            entry.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    folder.rename(entry)


def _names(folder: Path) -> list[str]:
    """Everything in ``folder`` but folders."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir())


def _hash_of_file(path: Path, beat: Beat) -> str:
    """SHA-256, which processors compute at 1 to 2 GB/s."""
    digest = hashlib.sha256()
    with open_regular(path, follow_links=False) as file:
        while chunk := file.read(4 * MIB):
            digest.update(chunk)
            beat()
    return digest.hexdigest()


def _hash_of_text(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _remove_orphans(cache: Path) -> None:
    """Remove folders whose makers are dead: the lock of a live one is held."""
    for folder in cache.glob(f"*{_MAKING}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _GRACE_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _take_lock(handle):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _take_lock(handle: int) -> bool:
    """Take the lock of a folder, which its maker holds until it ends, even by kill -9. False when another has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can tell, so nothing is removed
        return False
    return True


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises DataError, naming ``folder``, in place of OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache for tokenised data cannot be written: {folder}: {error.strerror or error}",
            hint="free some space, or name another folder: cache_dir in the recipe, or FITUNE_CACHE",
        ) from None
