"""The files of a model folder: which tensor is where, checked and then read when used; and a hash of every byte."""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fitune.errors import ModelError
from fitune.files import cache_folder, open_regular, read_text, write_atomically
from fitune.models.headers import AGAIN, StoredTensor, read_header
from fitune.models.low_bit.files import LowBitTensor, as_read
from fitune.models.remote_code import CONFIG, refuse_pickle
from fitune.values.serial import TABLE_BYTES, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the model in ``folder``, by name; weights of few bits as the 16-bit ones that they stand for.

    Raises ModelError naming the file, and the tensor, when weights are missing, pickled or damaged.
    """
    files, placed = _placed_files(folder)
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in found:
                raise ModelError(f"{name} is both in {found[name].file} and in {file}", hint=AGAIN)
            found[name] = tensor
    if not found:
        raise ModelError(f"{files[0]}: holds no tensor", hint=AGAIN)
    for name, file in placed.items():
        if name not in found or found[name].file != file:
            raise ModelError(
                f"{file}: {name} is not in it, and {INDEX} says that it is",
                hint="index and files must be of the same model: fetch them again",
            )
    try:  # rows and columns of FP8 that share a scale; values/model/config_schema.py has checked them
        rows, columns = read_object(folder / CONFIG)["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, KeyError, TypeError):
        rows = columns = 128
    return as_read(found, (rows, columns))


_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Type of most of the weights in ``folder``, by their headers; None for a type that is not trained in."""
    sizes: Counter[str] = Counter()
    for tensor in stored_tensors(folder).values():
        sizes[tensor.dtype] += tensor.size_bytes
    (name, _), *_ = sizes.most_common(1)
    return _STORED_DTYPES.get(name)


def _placed_files(folder: Path) -> tuple[Sequence[Path], Mapping[str, Path]]:
    """The files to read, and where the index places each tensor; empty without an index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    if (folder / INDEX).is_file():
        try:
            weight_map = read_object(folder / INDEX, largest_bytes=TABLE_BYTES)["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{folder / INDEX}: no index of weights: {error}", hint=AGAIN) from None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX}: its weight_map names no tensor", hint=AGAIN)
        placed = {name: _shard(folder, name, file) for name, file in weight_map.items()}
        return sorted(set(placed.values())), placed
    refuse_pickle(folder, error=ModelError)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    beside = f", only {', '.join(others[:3])}" if others else ""
    raise ModelError(
        f"{folder}: no weights (*.safetensors): neither {SINGLE} nor {INDEX}{beside}",
        hint="name a complete model folder or a Hub id",
    )


def _shard(folder: Path, tensor: str, name: object) -> Path:
    """The file of that name in ``folder``, which may be a link into the Hub's cache; no path leads out of it."""
    plain = isinstance(name, str) and name == PurePosixPath(name).name == PureWindowsPath(name).name
    if not plain or not str(name).endswith(".safetensors"):
        raise ModelError(
            f"{folder / INDEX}: {tensor} is listed in {name!r}, which is not a safetensors file of this folder",
            hint="fetch the model again from a source that you trust",
        )
    file = folder / str(name)
    if not file.is_file():
        raise ModelError(
            f"{file}: not there, and {INDEX} says that {tensor} is in it",
            hint="the model was not fetched whole: fetch it again",
        )
    return file


OnBytes = Callable[[int, int], None]
"""Told bytes read and bytes in all; by several threads, one after the other."""


def nobody(done: int, total: int) -> None:
    """Does nothing, for callers that do not show how far the reading is."""


class Unread:
    """A tensor that is still in its files; ``unread[...]`` reads it."""

    def __init__(self, stored: StoredTensor, read: Callable[[Any], Tensor]) -> None:
        self._stored, self._read = stored, read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read(index)

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """The name that safetensors gives the type, such as BF16."""
        return self._stored.dtype


@contextmanager
def unread_tensors(stored: Mapping[str, StoredTensor], on_bytes: OnBytes) -> Iterator[dict[str, Unread]]:
    """Every tensor by name, none of them in memory yet. The files are open inside."""
    total, done, lock = sum(tensor.size_bytes for tensor in stored.values()), 0, Lock()
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def part(name: str, file: Path) -> Any:
            """safetensors' slice of one tensor; each file is opened once."""
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            return opened[file].get_slice(name)

        def count(size: int) -> None:
            """``size`` bytes more are read."""
            nonlocal done
            with lock:
                done += size
                on_bytes(done, total)

        def unread(name: str, stored: StoredTensor) -> Unread:
            """One tensor of the files, or one weight that is made of several."""
            parts = stored.parts if isinstance(stored, LowBitTensor) else {"": (name, stored.file)}
            slices = {role: part(*place) for role, place in parts.items()}

            def read(index: Any) -> Tensor:
                """The rows of ``index``, counted as all of the tensor."""
                if isinstance(stored, LowBitTensor):  # reading any of it decodes all of it
                    tensor = stored.decode({role: each[...] for role, each in slices.items()})[index]
                else:
                    tensor = slices[""][index]
                count(stored.size_bytes)
                return tensor

            return Unread(stored, read)

        yield {name: unread(name, tensor) for name, tensor in stored.items()}
        if done < total:  # tensors that were not read count as done
            count(total - done)


_MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_THREADS = 4
"""Files hashed at once: sha256 lets the others run, and four keep up with one NVMe drive."""


def identity(path: str) -> str:
    """A Hub id as it is; a folder's name and a hash of its files, wherever it lies now."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    return f"{folder.resolve().name}, files {_hash_of(_files_of(folder, _MODEL_FILES))}"


def base_reference(path: str) -> str:
    """The name by which a file refers to the base it belongs to: a folder by its absolute path, a Hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def weights_identity(path: str) -> str:
    """A hash of the weights alone, whatever the folder is called; a Hub id as it is."""
    folder = Path(path)
    return _hash_of(_files_of(folder, (".safetensors",))) if folder.is_dir() else path


def _files_of(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())


def _hash_of(files: Sequence[Path]) -> str:
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(_file_hash, files))
    lines = [f"{file.name} {found}" for file, found in zip(files, hashes, strict=True)]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _file_hash(file: Path) -> str:
    """sha256 of every byte: processors have instructions for it, so it is faster here than younger hashes."""
    entry, state = _entry_of(file), file.stat()
    with suppress(OSError, ValueError):  # never hashed, or an entry that cannot be read
        if len(known := read_text(entry, follow_links=False)) == 64:
            return known
    with open_regular(file) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    is_settled = time.time() - max(state.st_mtime, state.st_ctime) > _SETTLED_S
    with suppress(OSError):  # a cache that cannot be written costs time only
        if is_settled and entry == _entry_of(file):
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(entry, found)
    return found


_SETTLED_S = 2.0
"""A file younger than this may change again within one tick of the file system's clock and look the same."""


def _entry_of(file: Path) -> Path:
    """Where the hash of ``file`` is remembered, by all that the system says of it. The time of change is beside that
    of modification: whoever sets the second back cannot set the first."""
    state = file.stat()
    facts = (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_dev, state.st_ino)
    name = hashlib.sha256(f"{facts}".encode() + os.fsencode(file.resolve())).hexdigest()
    return cache_folder() / "hashes" / name
