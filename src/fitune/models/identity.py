"""Is it still the same model? A hash of every byte of a folder's files, taken once and remembered."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fitune.models.remembered_hashes import remember, remembered
from fitune.spec.disk import open_regular

_MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_THREADS = 4
"""Files hashed at once: sha256 lets the others run, and four keep up with one NVMe drive."""


def identity(path: str) -> str:
    """A Hub id as it is; a folder's name and a hash of its files, wherever it lies now."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    return f"{folder.resolve().name}, files {_hash_of(_files(folder, _MODEL_FILES))}"


def base_reference(path: str) -> str:
    """How a file names the base that it belongs to: a folder by its absolute path, a Hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def weights_identity(path: str) -> str:
    """A hash of the weights alone, whatever the folder is called; a Hub id as it is."""
    folder = Path(path)
    return _hash_of(weight_files(folder)) if folder.is_dir() else path


def weight_files(folder: Path) -> list[Path]:
    return _files(folder, (".safetensors",))


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())


def _hash_of(files: Sequence[Path]) -> str:
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(_file_hash, files))
    lines = [f"{file.name} {found}" for file, found in zip(files, hashes, strict=True)]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _file_hash(file: Path) -> str:
    """sha256 of every byte: processors have instructions for it, so it is faster here than younger hashes."""
    known = remembered(file)
    if known is not None:
        return known
    before = file.stat()
    with open_regular(file) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    remember(file, found, as_of=before)
    return found
