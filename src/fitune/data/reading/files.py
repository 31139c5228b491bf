"""Paths to files: on disk, behind https:// or in a store; or to a dataset on the Hub."""

import glob
import hashlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from fitune.credentials import CREDENTIALS_ELSEWHERE, credential_in
from fitune.errors import DataError
from fitune.files import PICKLE_SUFFIXES, cache_folder, open_regular, temporary_sibling
from fitune.recipe.types import MOST
from fitune.stores import opening, reading
from fitune.units import whole_number
from fitune.values.plan import DataSource

_LAYOUTS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
CODECS = {".gz": "gzip", ".zst": "zstd"}
ACCEPTED_FILES = f"{', '.join(_LAYOUTS)}; text files also as .gz and .zst"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files beside the data that say something about it."""
_SPLIT_NAMES = {
    "train": ("train",),
    "test": ("test",),
    "validation": ("validation", "valid", "val", "dev", "eval"),
}
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
_PATTERN = re.compile(r"[*?\[]")
_WEB = ("https", "http")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubDataset:
    """``owner/name`` or ``owner/name:configuration`` on the Hugging Face Hub."""

    name: str
    config: str | None
    split: str


def layout_of(path: str) -> tuple[str, str]:
    """Layout of the rows and codec of the bytes, by the name alone: ("jsonl", "gzip"). No layout: not a data file."""
    name = PurePosixPath(_name(path))
    if codec := CODECS.get(name.suffix, ""):
        name = name.with_suffix("")
    layout = _LAYOUTS.get(name.suffix, "")
    return ("", "") if codec and layout in ("parquet", "arrow") else (layout, codec)


def sample_size(source: DataSource) -> tuple[str, int]:
    """The path without ``#n`` and the number of rows to take (0: all). A file whose name holds a # keeps it."""
    path, mark, count = source.path.rpartition("#")
    if not mark or os.path.exists(source.path):
        return source.path, source.sample
    rows = whole_number(count, most=int(MOST["sample"]))
    if not rows:
        raise DataError(
            f"{source.path[:200]}: #{count[:40]} is not a number of rows",
            hint=f"{path[:200]}#500 takes 500 rows",
        )
    if source.sample not in (0, rows):
        raise DataError(f"{source.path}: the path asks for {rows} rows and sample for {source.sample}")
    return path, rows


def locate(source: DataSource) -> tuple[str, ...] | HubDataset:
    """The data files that the source's path names, in reading order, or the dataset on the Hub.

    Raises DataError when nothing is there, when it is pickled, when a folder holds files of several kinds, or when it
    is a URL that may not be opened.
    """
    path, _ = sample_size(source)
    if found := credential_in(path):
        raise DataError(
            f"{path}: contains {found}, and paths are saved and shown", hint=CREDENTIALS_ELSEWHERE
        )
    scheme, _, rest = path.partition("://") if "://" in path else ("", "", "")
    if scheme.lower() in _WEB:
        _require_readable(path)
        if not source.allow_https:
            raise DataError(
                f"{path}: addresses on the web are opened only when that is allowed",
                hint="allow_https: true (--allow-https), or download the file and give its path",
            )
        if scheme.lower() == "http" and not source.allow_private_addresses:
            raise DataError(
                f"{path}: http:// is not encrypted",
                hint=f"https://{rest}, or allow_private_addresses: true for a server of your own",
            )
        _fetched(path)
        return (path,)
    if scheme.lower() not in ("", "file"):
        kind, files = reading.look_up(path, is_pattern=bool(_PATTERN.search(path)))
        if kind == "folder":
            return _of_folder(path, files, source.split)
        return _of_pattern(path, files) if kind == "pattern" else (_require_readable(path),)
    path = unquote(urlsplit(path).path) if scheme else path
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_folder(path, (str(file) for file in local.rglob("*") if file.is_file()), source.split)
    if local.exists():
        return (_require_readable(str(local)),)
    if _PATTERN.search(path):
        return _of_pattern(path, filter(os.path.isfile, glob.glob(str(local), recursive=True)))
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id and not path.startswith(".") and not path.endswith(tuple(_LAYOUTS)):
        return HubDataset(name=hub_id[1], config=hub_id[2], split=source.split)
    raise DataError(
        f"{path}: no such file or folder", hint=f"a path to {ACCEPTED_FILES}, or owner/name on the Hub"
    )


def open_binary(path: str) -> BinaryIO:
    """Open a local file, one behind https:// or one in a store for reading bytes. Raises DataError or OSError."""
    if path.partition("://")[0].lower() in _WEB:
        return open_regular(_fetched(path))
    return reading.open_stream(path) if "://" in path else open_regular(path)


def key_in_store(path: str) -> str | None:
    """A store's own words for a file's content; None where the bytes have to be hashed."""
    is_stored = "://" in path and path.partition("://")[0].lower() not in _WEB
    return reading.identity(path) if is_stored else None


@cache
def _fetched(url: str) -> Path:
    """The file behind ``url`` in the cache, named by its address and what the server says of its content.

    A process asks once: a file does not change between its hash and its rows. Raises DataError.
    """
    import aiohttp
    import fsspec

    # fsspec's own clients end each download after 5 minutes and pass proxies over
    limits = aiohttp.ClientTimeout(total=None, connect=30, sock_read=60)
    web: Any = fsspec.filesystem("https", client_kwargs={"trust_env": True, "timeout": limits})
    problem: Exception | None = None
    for wait_s in (0.0, *opening.WAITS_S):
        time.sleep(wait_s)
        part = None
        try:
            said = reading.identity_of(web.info(url))
            name = hashlib.blake2b(f"{url} {said}".encode(), digest_size=16).hexdigest()
            path = cache_folder() / "downloads" / name
            if said is None or not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                part = temporary_sibling(path)
                web.get_file(url, str(part))
                os.replace(part, path)
            return path
        except (OSError, aiohttp.ClientError) as error:  # the disk's and fsspec's, and the connection's
            problem = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if getattr(problem, "status", 500) < 500 or getattr(error, "errno", None):
                break
        finally:
            if part:
                part.unlink(missing_ok=True)
    assert problem is not None
    raise DataError(
        f"{url}: cannot be downloaded: {opening.cause_of(problem)}",
        hint="look at the address and at the disk of the cache (FITUNE_CACHE); run it again when the server answers",
    )


def _require_readable(path: str) -> str:
    """``path``. Raises DataError for a name that says it cannot be read."""
    suffix = PurePosixPath(_name(path)).suffix
    if suffix in PICKLE_SUFFIXES:
        raise DataError(
            f"{path}: {suffix} files are pickles, and opening a pickle runs the code inside it",
            hint="convert it to .jsonl or .parquet",
        )
    if not layout_of(path)[0]:
        raise DataError(
            f"{path}: not a data file this version reads",
            hint=f"one of {ACCEPTED_FILES} (rows.jsonl.gz); decompress others",
        )
    return path


def _of_pattern(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """The data files that a pattern names; splits are not looked at."""
    names = list(names)
    files = _data_files(names)
    if not files:
        what = f"none of the {len(names)} files it names is data" if names else "the pattern names no file"
        raise DataError(f"{pattern}: {what}", hint=f"it should name {ACCEPTED_FILES}")
    return _of_one_kind(pattern, files)


def _of_folder(folder: str, names: Iterable[str], split: str) -> tuple[str, ...]:
    """The data files of a folder; only those of ``split`` where files or subfolders are named for splits."""
    start = str(Path(folder).expanduser()) if "://" not in folder else folder.rstrip("/")
    inside = {name: name[len(start) :].lstrip("/") for name in names}
    files = _data_files(name for name, rest in inside.items() if "/." not in f"/{rest}")
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
    wanted = next((name for name, words in _SPLIT_NAMES.items() if split in words), split)
    chosen = [name for name in files if named.get(name) == wanted] if named else files
    if not chosen:
        raise DataError(
            f"{folder}: no files of split {split!r}; there are files of {', '.join(sorted(set(named.values())))}",
            hint="set split: to one of them, or name the files",
        )
    return _of_one_kind(folder, chosen)


def _split_of(relative_path: str) -> str | None:
    """The split that a file or one of its folders is named for: ``train-00000.parquet``, ``test/data.arrow``."""
    for part in PurePosixPath(relative_path.lower()).parts:
        words = re.split(r"[^a-z]+", part)
        for split, names in _SPLIT_NAMES.items():
            if any(word in names for word in words):
                return split
    return None


def _data_files(names: Iterable[str]) -> list[str]:
    """The names of data files, sorted. Text counts only where there is nothing else: else it is a README, a licence."""
    files = sorted(name for name in names if layout_of(name)[0] and _name(name) not in _DESCRIPTIONS)
    return [name for name in files if layout_of(name)[0] != "text"] or files


def _of_one_kind(where: str, files: list[str]) -> tuple[str, ...]:
    """``files``. Raises DataError where they have several layouts, or are there packed and plain: learned twice."""
    by_layout: dict[str, list[str]] = {}
    for name in files:
        by_layout.setdefault(layout_of(name)[0], []).append(name)
    if len(by_layout) > 1:
        counts = ", ".join(f"{len(group)} {layout}" for layout, group in sorted(by_layout.items()))
        suffixes = "".join(PurePosixPath(_name(max(by_layout.values(), key=len)[0])).suffixes)
        raise DataError(
            f"{where}: holds files of several kinds: {counts}; they may be the same rows twice",
            hint=f"name those that are meant, alone or by a pattern: {where.rstrip('/')}/*{suffixes}",
        )
    for name in files:
        unpacked, _, suffix = name.rpartition(".")
        if f".{suffix}" in CODECS and unpacked in files:
            raise DataError(
                f"{name}: {unpacked} is there, too: the same rows, compressed and uncompressed",
                hint="remove one of them, or name the one that is meant",
            )
    return tuple(files)


def _name(path: str) -> str:
    """Last part of a path or of a URL's path, in small letters."""
    if path.startswith(("http://", "https://")):
        path = urlsplit(path).path
    return path.rpartition("/")[2].lower()
