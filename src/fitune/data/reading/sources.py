"""Rows of a source, one after another, whatever it is stored in."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

from fitune.data.reading.downloads import SCHEMES
from fitune.data.reading.files import Rows, read_file
from fitune.data.reading.kinds import kind_of
from fitune.data.reading.locations import HubDataset, locate, open_binary, sample_size
from fitune.data.reading.rows import BadRow, Row
from fitune.errors import DataError
from fitune.spec.hub import no_waiting_for_the_hub
from fitune.spec.plan import DataSource
from fitune.stores import reading
from fitune.units import MIB

_CHUNK_BYTES = 4 * MIB
_SAMPLE_SEED = 500
"""A sample is a property of the source, not of the run: two runs with other seeds train on the same rows."""


def _ignore(_what: object) -> None:
    """Does nothing, for callers that count and show nothing."""


def read_rows(
    source: DataSource,
    *,
    on_bad_row: Literal["error", "skip"] = "error",
    count_bad: Callable[[str], None] = _ignore,
    on_bytes: Callable[[int], None] = _ignore,
) -> Iterator[Row]:
    """The rows of a file, a folder, a Hub dataset or an fsspec URL, in order.

    A row that cannot be read is raised as DataError ``file:line: cause``, or, under ``skip``, counted by
    calling ``count_bad`` with its reason. ``path#500`` or ``source.sample`` takes that many rows, the same
    ones every time, in the order of the file. ``on_bytes`` is told what was read, and may raise to stop.
    """
    path, wanted = sample_size(source)
    place = locate(source)
    stored = _load_hub(place, streaming=source.streaming) if isinstance(place, HubDataset) else None

    def good_rows(count_bad: Callable[[str], None]) -> Iterator[Row]:
        if isinstance(place, HubDataset):
            rows = _rows_of_hub(path, stored, on_bytes)
        else:
            rows = chain.from_iterable(read_file(name, on_bytes) for name in place)
        return _good_rows(rows, on_bad_row=on_bad_row, count_bad=count_bad)

    if not wanted:
        return good_rows(count_bad)
    return _numbered(good_rows(_ignore), _sample(good_rows(count_bad), wanted))


def content_key(source: DataSource, *, on_bytes: Callable[[int], None] = _ignore) -> str:
    """A hash that changes when the content of the source changes, or what its files are read as.

    Files on disk, those of a downloaded Hub dataset included, are hashed by their bytes; files in a store by what
    it says of them: a hash and the size, or the time of change where it has no hash; a Hub dataset that is streamed by
    its commit. ``on_bytes`` is told what was read, and may raise to stop.
    """
    place = locate(source)
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(place, HubDataset) and source.streaming:
        return _hub_version(place)
    if isinstance(place, HubDataset):
        digest.update(place.split.encode())  # it may name some of the rows in a file
        place = tuple(entry["filename"] for entry in _load_hub(place, streaming=False).cache_files)
    for name in place:
        digest.update(f"{kind_of(name)}".encode() + _file_key(name, on_bytes))
    return digest.hexdigest()


def _file_key(path: str, on_bytes: Callable[[int], None]) -> bytes:
    if "://" in path and path.partition("://")[0] not in SCHEMES:
        return (reading.identity(path) or reading.hash_stream(path, on_bytes)).encode()
    with open_binary(path) as file:
        digest = hashlib.blake2b(digest_size=16)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
        return digest.digest()


def _rows_of_hub(path: str, stored: Any, on_bytes: Callable[[int], None]) -> Rows:
    for number, fields in enumerate(stored, start=1):
        on_bytes(0)
        yield Row(f"{path} row {number}", fields)


def _load_hub(place: HubDataset, *, streaming: bool) -> Any:
    """Rows of the dataset: of its copy on this disk, or as they come over the network."""
    with _asking_the_hub(place) as datasets:
        return datasets.load_dataset(place.name, place.config, split=place.split, streaming=streaming)


def _hub_version(place: HubDataset) -> str:
    """A hash of the dataset's name and of the commit that the Hub gives."""
    with _asking_the_hub(place) as datasets:
        commit = datasets.load_dataset_builder(place.name, place.config).hash
    text = f"{place.name} {place.config} {place.split} {commit}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def datasets_of_hub() -> Iterator[str]:
    """Inside, the library datasets looks into its cache alone where the Hub is off or does not answer.

    Yields why it is not asked, for an error message; empty when it is.
    """
    import datasets  # before the Hub is tried: the library remembers whether the Hub was off when it was imported

    was_offline = datasets.config.HF_HUB_OFFLINE
    with no_waiting_for_the_hub() as unreachable:
        datasets.config.HF_HUB_OFFLINE = was_offline or bool(unreachable)
        try:
            yield unreachable
        finally:
            datasets.config.HF_HUB_OFFLINE = was_offline


@contextmanager
def _asking_the_hub(place: HubDataset) -> Iterator[Any]:
    """The library, while the Hub is asked no longer than a try takes. Raises DataError in place of its errors."""
    import datasets

    with datasets_of_hub() as unreachable:
        try:
            yield datasets
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            cause = f"{first_line}; {unreachable}" if unreachable else first_line
            raise DataError(
                f"{place.name}: no such file here, and the Hub gives no such dataset: {cause}",
                hint="check the path; owner/name:configuration names one of several configurations",
            ) from None


def _good_rows(
    rows: Rows, *, on_bad_row: Literal["error", "skip"], count_bad: Callable[[str], None]
) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, Row):
            yield row
        elif on_bad_row == "error":
            raise with_skip_hint(row)
        else:
            count_bad(row.reason)


def with_skip_hint(bad: BadRow) -> BadRow:
    """``bad`` with the advice to skip such rows."""
    skip = "mend the row, or set on_bad_row: skip to leave such rows out and count them"
    return BadRow(bad.message, reason=bad.reason, hint=f"{bad.hint}; {skip}" if bad.hint else skip)


def _sample(rows: Iterator[Row], count: int) -> list[int]:
    """Numbers of ``count`` rows, each equally likely (reservoir sampling, Vitter 1985)."""
    import numpy as np  # whoever plans on the first rows has none

    rng = np.random.default_rng(_SAMPLE_SEED)
    kept: list[int] = []
    for number, _ in enumerate(rows):
        if number < count:
            kept.append(number)
        elif (place := int(rng.integers(number + 1))) < count:
            kept[place] = number
    return sorted(kept)


def _numbered(rows: Iterator[Row], wanted: list[int]) -> Iterator[Row]:
    """The rows of these numbers. They are read once more rather than kept: a sample may be large."""
    numbers = iter(wanted)
    next_wanted = next(numbers, -1)
    for number, row in enumerate(rows):
        if number == next_wanted:
            yield row
            next_wanted = next(numbers, -1)
        if next_wanted < 0:
            return
