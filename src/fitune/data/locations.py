"""The meaning of a source's path: files on disk, files behind an fsspec URL, or a dataset on the Hub."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fitune.credentials import CREDENTIALS_ELSEWHERE, credential_in
from fitune.errors import DataError
from fitune.files import PICKLE_SUFFIXES, open_regular
from fitune.spec.plan import DataSource

READABLE = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
"""Suffixes that are read, in the words of the error messages."""

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
_REMOTE = {"hdfs": "pyarrow", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs"}
"""URL scheme -> the package that reads it."""
_SPLIT_NAMES = {
    "train": ("train",),
    "test": ("test",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
}
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


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


def locate(path: str, *, split: str) -> tuple[str, ...] | HubDataset:
    """The data files that ``path`` names, in reading order, or the dataset on the Hub.

    Raises DataError when nothing is there, when it is pickled, or when it is a URL this version does not open.
    """
    if found := credential_in(path):
        raise DataError(
            f"{path}: contains {found}, and paths are saved and shown", hint=CREDENTIALS_ELSEWHERE
        )
    scheme = path.partition("://")[0].lower() if "://" in path else ""
    if scheme:
        return _remote_files(path, scheme=scheme, split=split)
    _refuse_pickle(path)
    local = Path(path).expanduser()
    if local.is_dir():
        return _choose(path, (str(file) for file in local.rglob("*") if file.is_file()), split=split)
    if local.exists():
        _require_readable(path)
        return (str(local),)
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id and not path.startswith(".") and not path.endswith(READABLE):
        return HubDataset(name=hub_id[1], config=hub_id[2], split=split)
    if any(mark in path for mark in "*?["):
        raise DataError(
            f"{path}: no such file or folder; patterns are not expanded",
            hint="name the folder, or give a list: data: [a.jsonl, b.jsonl]",
        )
    raise DataError(
        f"{path}: no such file or folder", hint=f"a path to {', '.join(READABLE)}, or owner/name on the Hub"
    )


def open_binary(path: str) -> BinaryIO:
    """Open a local file or an fsspec URL for reading bytes."""
    try:
        if "://" not in path:
            return open_regular(path)
        import fsspec

        return fsspec.open(path, "rb").open()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _refuse_pickle(path: str) -> None:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise DataError(
            f"{path}: {suffix} files are pickles, and opening a pickle runs the code inside it",
            hint=f"convert it to {' or '.join(READABLE[:1] + READABLE[4:5])}",
        )


def _require_readable(path: str) -> None:
    if path.lower().endswith(_COMPRESSED):
        raise DataError(f"{path}: compressed files are not read in this version", hint="decompress it first")
    if not path.lower().endswith(READABLE):
        raise DataError(f"{path}: not a data file this version reads", hint=f"one of {', '.join(READABLE)}")


def _remote_files(url: str, *, scheme: str, split: str) -> tuple[str, ...]:
    if scheme not in _REMOTE or "::" in url:
        raise DataError(
            f"{url}: {scheme}:// addresses are not opened in this version",
            hint=f"download the file and give its path, or use {', '.join(f'{name}://' for name in _REMOTE)}",
        )
    _refuse_pickle(url)
    import fsspec

    try:
        filesystem, inner = fsspec.core.url_to_fs(url)
        if not filesystem.isdir(inner):
            _require_readable(url)
            return (url,)
        return _choose(
            url, (filesystem.unstrip_protocol(name) for name in filesystem.find(inner)), split=split
        )
    except ImportError as error:
        raise DataError(f"{url}: {error}", hint=f"pip install {_REMOTE[scheme]}") from None
    except OSError as error:
        raise DataError(f"{url}: cannot be read: {error}") from None


def _choose(folder: str, names: Iterable[str], *, split: str) -> tuple[str, ...]:
    """The data files of a folder; only those of ``split`` where files or subfolders are named for splits.

    A folder that ``datasets`` saved holds small JSON files about its arrow files: arrow alone is read there.
    """
    inside = {name: name[len(folder.rstrip("/")) :].lstrip("/") for name in names}
    files = [n for n, rest in inside.items() if n.lower().endswith(READABLE) and "/." not in f"/{rest}"]
    if any(PurePosixPath(name).name == "state.json" for name in files):
        files = [name for name in files if name.endswith(".arrow")]
    if not files:
        raise DataError(
            f"{folder}: no data files in this folder", hint=f"it should hold {', '.join(READABLE)}"
        )
    named = {name: found for name in files if (found := _split_of(inside[name]))}
    if not named:
        return tuple(sorted(files))
    chosen = sorted(name for name, found in named.items() if found == _canonical_split(split))
    if not chosen:
        raise DataError(
            f"{folder}: no files of split {split!r}; there are files of {', '.join(sorted(set(named.values())))}",
            hint="set split: to one of them, or name the files",
        )
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
