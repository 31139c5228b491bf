"""The meaning of a source's path: files on disk, files behind a URL, or a dataset on the Hub."""

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from fitune.credentials import CREDENTIALS_ELSEWHERE, credential_in
from fitune.data.reading import downloads
from fitune.data.reading.kinds import ACCEPTED_FILES, READABLE, data_files, require_one_kind, require_readable
from fitune.errors import DataError
from fitune.files import open_regular
from fitune.spec.plan import DataSource
from fitune.stores import reading

_SPLIT_NAMES = {
    "train": ("train",),
    "test": ("test",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
}
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """``owner/name`` or ``owner/name:configuration`` on the Hugging Face Hub."""

    name: str
    config: str | None
    split: str


def sample_size(source: DataSource) -> tuple[str, int]:
    """The path without ``#n`` and the number of rows to take (0: all). A file whose name holds a # keeps it."""
    path, mark, count = source.path.rpartition("#")
    if not mark or os.path.exists(source.path):
        return source.path, source.sample
    if not count.isdigit() or int(count) == 0:
        raise DataError(f"{source.path}: #{count} is not a number of rows", hint=f"{path}#500 takes 500 rows")
    if source.sample not in (0, int(count)):
        raise DataError(f"{source.path}: the path asks for {count} rows and sample for {source.sample}")
    return path, int(count)


def locate(source: DataSource) -> tuple[str, ...] | HubDataset:
    """The data files that the source's path names, in reading order, or the dataset on the Hub.

    A file behind https:// is in the cache then. Raises DataError when nothing is there, when it is pickled, when a
    folder holds files of several kinds, or when it is a URL that may not be opened.
    """
    path, _ = sample_size(source)
    if found := credential_in(path):
        raise DataError(
            f"{path}: contains {found}, and paths are saved and shown", hint=CREDENTIALS_ELSEWHERE
        )
    scheme = path.partition("://")[0].lower() if "://" in path else ""
    if scheme in downloads.SCHEMES:
        require_readable(path)
        downloads.fetch(path, allow_https=source.allow_https, allow_private=source.allow_private_addresses)
        return (path,)
    if scheme == "file":
        path = unquote(urlsplit(path).path)
    elif scheme:
        return _in_store(path, split=source.split)
    return _on_disk(path, split=source.split)


def open_binary(path: str) -> BinaryIO:
    """Open a local file, a downloaded one or one in a store for reading bytes. Raises DataError."""
    try:
        if "://" not in path:
            return open_regular(path)
        if path.partition("://")[0].lower() in downloads.SCHEMES:
            return open_regular(downloads.cached(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return reading.open_stream(path)


def _on_disk(path: str, *, split: str) -> tuple[str, ...] | HubDataset:
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_folder(path, (str(file) for file in local.rglob("*") if file.is_file()), split=split)
    if local.exists():
        require_readable(path)
        return (str(local),)
    if _PATTERN.search(path):
        found = glob.glob(str(local), recursive=True)
        return _of_pattern(path, [name for name in found if os.path.isfile(name)])
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id and not path.startswith(".") and not path.endswith(READABLE):
        return HubDataset(name=hub_id[1], config=hub_id[2], split=split)
    raise DataError(
        f"{path}: no such file or folder", hint=f"a path to {ACCEPTED_FILES}, or owner/name on the Hub"
    )


def _in_store(url: str, *, split: str) -> tuple[str, ...]:
    found = reading.look_up(url, is_pattern=bool(_PATTERN.search(url)))
    if found.kind == "file":
        require_readable(url)
        return found.files
    return (
        _of_pattern(url, found.files)
        if found.kind == "pattern"
        else _of_folder(url, found.files, split=split)
    )


def _of_pattern(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """The data files that a pattern names; splits are not looked at."""
    names = list(names)
    files = data_files(names)
    if not files:
        what = f"none of the {len(names)} files it names is data" if names else "the pattern names no file"
        raise DataError(f"{pattern}: {what}", hint=f"it should name {ACCEPTED_FILES}")
    require_one_kind(pattern, files)
    return tuple(files)


def _of_folder(folder: str, names: Iterable[str], *, split: str) -> tuple[str, ...]:
    """The data files of a folder; only those of ``split`` where files or subfolders are named for splits."""
    start = str(Path(folder).expanduser()) if "://" not in folder else folder.rstrip("/")
    inside = {name: name[len(start) :].lstrip("/") for name in names}
    files = data_files(name for name, rest in inside.items() if "/." not in f"/{rest}")
    if not files:
        raise DataError(f"{folder}: no data files in this folder", hint=f"it should hold {ACCEPTED_FILES}")
    named = {name: found for name in files if (found := _split_of(inside[name]))}
    others = [inside[name] for name in files if name not in named]
    if named and others:
        shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise DataError(
            f"{folder}: some files are named for a split, and {len(others)} are not: {shown}",
            hint=f"give one file ({next(iter(named))}, for example) or a pattern, or rename every file after its split",
        )
    chosen = [name for name in files if named.get(name) == _canonical_split(split)] if named else files
    if not chosen:
        raise DataError(
            f"{folder}: no files of split {split!r}; there are files of {', '.join(sorted(set(named.values())))}",
            hint="set split: to one of them, or name the files",
        )
    require_one_kind(folder, chosen)
    return tuple(chosen)


def _canonical_split(word: str) -> str:
    return next((split for split, names in _SPLIT_NAMES.items() if word in names), word)


def _split_of(relative_path: str) -> str | None:
    """The split that a file or one of its folders is named for: ``train-00000.parquet``, ``test/data.arrow``."""
    for part in PurePosixPath(relative_path.lower()).parts:
        words = re.split(r"[^a-z]+", part)
        for split, names in _SPLIT_NAMES.items():
            if any(word in names for word in words):
                return split
    return None
