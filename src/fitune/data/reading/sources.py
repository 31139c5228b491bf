"""Rows of a source, one after another: a file, a folder, a store or a dataset of the Hub, and a hash of its content."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fitune.data.reading.files import (
    HubDataset,
    key_in_store,
    layout_of,
    locate,
    open_binary,
    sample_size,
)
from fitune.data.reading.layouts import Rows, naming, read_file
from fitune.data.reading.rows import BadRow, Row
from fitune.errors import DataError, first_line
from fitune.units import MIB
from fitune.values.hub import no_waiting_for_the_hub
from fitune.values.plan import DataSource

_SAMPLE_SEED = 500
"""A sample is a property of the source, not of the run: two runs with other seeds train on the same rows."""


def ignore(_count: int) -> None:
    """Does nothing, for callers that show no progress."""


def read_rows(source: DataSource) -> Iterator[Row]:
    """``rows_of`` the source. The first that cannot be read is raised as DataError ``file:line: cause``."""

    def readable(row: Row | BadRow) -> Row:
        """The row. Raises DataError for one that cannot be read."""
        if isinstance(row, BadRow):
            raise row
        return row

    return map(readable, rows_of(source))


def rows_of(source: DataSource, *, on_bytes: Callable[[int], None] = ignore) -> Rows:
    """The rows of a file, a folder, a Hub dataset or an fsspec URL, in order.

    ``path#500`` or ``source.sample`` takes that many rows of those that can be read, the same ones every time; the
    others are all given. ``on_bytes`` is told what was read, and may raise to stop.
    """
    path, wanted = sample_size(source)
    place = locate(source)
    stored = _load_hub(place, streaming=source.streaming) if isinstance(place, HubDataset) else None

    def every_row() -> Rows:
        """Rows of the files, or of the Hub dataset, numbered from 1. ``on_bytes`` gets 0 for each of its rows."""
        for name in () if isinstance(place, HubDataset) else place:
            yield from read_file(name, on_bytes)
        for number, fields in enumerate(stored or (), start=1):
            on_bytes(0)
            yield Row(f"{path} row {number}", fields)

    return _sampled(every_row, wanted) if wanted else every_row()


def content_key(source: DataSource, *, on_bytes: Callable[[int], None] = ignore) -> str:
    """A hash that changes when the content of the source changes, or what its files are read as.

    Files on disk, those of a downloaded Hub dataset included, are hashed by their bytes; files in a store by what
    it says of them: a hash and the size, or the time of change where it has no hash; a Hub dataset that is streamed by
    its commit. ``on_bytes`` is told what was read, and may raise to stop.
    """
    place = locate(source)
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(place, HubDataset) and source.streaming:
        with _asking_the_hub(place) as datasets:
            commit = datasets.load_dataset_builder(place.name, place.config).hash
        digest.update(f"{place.name} {place.config} {place.split} {commit}".encode())
        return digest.hexdigest()
    if isinstance(place, HubDataset):
        digest.update(place.split.encode())  # it may name some of the rows in a file
        place = tuple(entry["filename"] for entry in _load_hub(place, streaming=False).cache_files)
    for name in place:
        layout, codec = layout_of(name)
        digest.update(f"FileKind(layout={layout!r}, codec={codec!r})".encode())
        if (key := key_in_store(name)) is not None:
            digest.update(key.encode())
            continue
        of_file = hashlib.blake2b(digest_size=16)
        with naming(name), open_binary(name) as file:
            while chunk := file.read(4 * MIB):
                of_file.update(chunk)
                on_bytes(len(chunk))
        digest.update(of_file.digest())
    return digest.hexdigest()


def _load_hub(place: HubDataset, *, streaming: bool) -> Any:
    """Rows of the dataset: of its copy on this disk, or as they come over the network."""
    with _asking_the_hub(place) as datasets:
        return datasets.load_dataset(place.name, place.config, split=place.split, streaming=streaming)


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
            cause = first_line(error) + (f"; {unreachable}" if unreachable else "")
            raise DataError(
                f"{place.name}: no such file here, and the Hub gives no such dataset: {cause}",
                hint="check the path; owner/name:configuration names one of several configurations",
            ) from None


def with_skip_hint(bad: BadRow) -> BadRow:
    """``bad`` with the advice to skip such rows."""
    skip = "mend the row, or set on_bad_row: skip to leave such rows out and count them"
    return BadRow(bad.message, reason=bad.reason, hint=f"{bad.hint}; {skip}" if bad.hint else skip)


def _sampled(every_row: Callable[[], Rows], count: int) -> Rows:
    """``count`` of the rows that can be read, each equally likely (reservoir sampling, Vitter 1985), and all others.

    They are read once more rather than kept: a sample may be large.
    """
    import numpy as np  # whoever plans on the first rows has none

    rng = np.random.default_rng(_SAMPLE_SEED)
    kept: list[int] = []
    for number, _ in enumerate(row for row in every_row() if isinstance(row, Row)):
        if number < count:
            kept.append(number)
        elif (place := int(rng.integers(number + 1))) < count:
            kept[place] = number
    wanted, number = set(kept), -1
    for row in every_row():
        number += isinstance(row, Row)
        if isinstance(row, BadRow) or number in wanted:
            yield row
