"""The kind of a data file, told by its name: what its rows are written in, and how it is compressed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from fitune.errors import DataError
from fitune.files import PICKLE_SUFFIXES

Layout = Literal["jsonl", "json", "csv", "parquet", "arrow", "text"]
Codec = Literal["", "gzip", "zstd"]

_LAYOUTS: dict[str, Layout] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
CODECS: dict[str, Codec] = {".gz": "gzip", ".zst": "zstd"}
_OTHER_CODECS = (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz", ".lz4", ".br")
_OWN_COMPRESSION = ("parquet", "arrow")

READABLE = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Suffixes that are read, in the words of the error messages."""
ACCEPTED_FILES = f"{', '.join(READABLE)}; text files also as .gz and .zst"

_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files beside the data that say something about it."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """Layout of the rows and codec of the bytes; codec is empty for a plain file."""

    layout: Layout
    codec: Codec


def kind_of(path: str) -> FileKind | None:
    """The kind of the file at a path or URL; None for a name that is not a data file."""
    name = _name(path)
    codec = CODECS.get(PurePosixPath(name).suffix, "")
    inner = PurePosixPath(name).stem if codec else name
    layout = _LAYOUTS.get(PurePosixPath(inner).suffix)
    if layout is None or (codec and layout in _OWN_COMPRESSION):
        return None
    return FileKind(layout, codec)


def require_readable(path: str) -> FileKind:
    """The kind of the file. Raises DataError for a name that says it cannot be read."""
    _refuse_pickle(path)
    found = kind_of(path)
    if found is not None:
        return found
    suffixes = PurePosixPath(_name(path)).suffixes
    if suffixes and suffixes[-1] in _OTHER_CODECS:
        raise DataError(
            f"{path}: {suffixes[-1]} is not a compression that is read",
            hint="decompress it, or use gzip (.gz) or zstd (.zst)",
        )
    if suffixes and suffixes[-1] in CODECS:
        inner = "".join(suffixes[-2:-1])
        why = f"{inner} files are compressed inside" if inner in (".parquet", ".arrow") else "of what kind?"
        raise DataError(
            f"{path}: {inner or 'a file'} inside {suffixes[-1]} is not read ({why})",
            hint="decompress it, or name it for its content: rows.jsonl.gz",
        )
    raise DataError(f"{path}: not a data file this version reads", hint=f"one of {ACCEPTED_FILES}")


def _refuse_pickle(path: str) -> None:
    suffix = PurePosixPath(_name(path)).suffix
    if suffix in PICKLE_SUFFIXES:
        raise DataError(
            f"{path}: {suffix} files are pickles, and opening a pickle runs the code inside it",
            hint="convert it to .jsonl or .parquet",
        )


def data_files(names: Iterable[str]) -> list[str]:
    """The names of data files, sorted. Text counts only where there is nothing else: else it is a README, a licence."""
    files = sorted(n for n in names if kind_of(n) is not None and _name(n) not in _DESCRIPTIONS)
    rows = [name for name in files if _layout(name) != "text"]
    return rows or files


def require_one_kind(where: str, files: list[str]) -> None:
    """Raises DataError where the files of one folder or pattern have several layouts, or are there packed and plain."""
    by_layout: dict[str, list[str]] = {}
    for name in files:
        by_layout.setdefault(_layout(name), []).append(name)
    if len(by_layout) > 1:
        counts = ", ".join(f"{len(group)} {layout}" for layout, group in sorted(by_layout.items()))
        most = max(by_layout, key=lambda layout: len(by_layout[layout]))
        suffixes = "".join(PurePosixPath(_name(by_layout[most][0])).suffixes)
        raise DataError(
            f"{where}: holds files of several kinds: {counts}; they may be the same rows twice",
            hint=f"name those that are meant, alone or by a pattern: {where.rstrip('/')}/*{suffixes}",
        )
    _refuse_packed_twins(files)


def _layout(path: str) -> str:
    found = kind_of(path)
    return found.layout if found else ""


def _refuse_packed_twins(files: list[str]) -> None:
    """``rows.jsonl`` beside ``rows.jsonl.gz`` are the same rows, and would be learned twice."""
    plain = set(files)
    for name in sorted(files):
        unpacked = name.rpartition(".")[0]
        if PurePosixPath(name).suffix in CODECS and unpacked in plain:
            raise DataError(
                f"{name}: {unpacked} is there, too: the same rows, compressed and uncompressed",
                hint="remove one of them, or name the one that is meant",
            )


def _name(path: str) -> str:
    """Last part of a path or of a URL's path, in small letters."""
    if path.startswith(("http://", "https://")):
        path = urlsplit(path).path
    return path.rpartition("/")[2].lower()
