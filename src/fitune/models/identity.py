"""Is it still the same model? A hash of a folder's files that costs no reading of whole weights."""

import hashlib
from pathlib import Path

from fitune.units import MIB

_MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")


def identity(path: str) -> str:
    """A Hub id as it is; a folder's name and a hash of its files, wherever it lies now.

    Small files count by their bytes; larger ones by size, first and last MiB: training changes weights everywhere.
    """
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    return f"{folder.resolve().name}, files {_hash_of(folder, _MODEL_FILES)}"


def weights_identity(path: str) -> str:
    """The same of the weights alone, whatever the folder is called."""
    folder = Path(path)
    return _hash_of(folder, (".safetensors",)) if folder.is_dir() else path


def _hash_of(folder: Path, suffixes: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.iterdir()):
        if file.suffix in suffixes and file.is_file():
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_ends(file))
    return digest.hexdigest()


def _ends(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= 2 * MIB:
            return stream.read()
        first = stream.read(MIB)
        stream.seek(size - MIB)
        return first + stream.read()
