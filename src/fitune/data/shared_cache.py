"""Tokenised data in a store, where other machines find it: fetched into the cache of this one, or sent from there.

The manifest of an entry is sent last, so one that is half there does not count, and what a kill interrupted is sent
without the files that are there already. What is fetched is compared with its hashes like every entry.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from fitune.data import cache
from fitune.errors import FituneError, StoreError
from fitune.stores.opening import is_url
from fitune.stores.writing import Store
from fitune.units import format_bytes

T = TypeVar("T")

_BEAT_S = 0.2


class SharedCache:
    """The entries in ``tokens`` below a URL. ``beat`` is called several times a second and may raise to stop."""

    def __init__(self, store: Store, *, beat: Callable[[], None], on_note: Callable[[str], None]) -> None:
        self._store, self._beat, self._on_note = store, beat, on_note
        self._stopped, self._is_damaged = threading.Event(), False

    def require_ready(self, entry: Path) -> None:
        """Raises StoreError where the store has no such entry and does not take one: known before it is made here."""
        if not self._has(entry):
            self._ask(self._store.require_writable)

    def fetch(self, entry: Path) -> bool:
        """Bring the entry into the cache of this machine; False where the store has none that is whole.

        Raises StoreError where the store cannot be asked, DataError when the cache here cannot be written.
        """
        if not self._has(entry):
            return False
        with cache.making(entry) as folder, cache.writing(entry.parent):
            try:
                self._beside(lambda: self._store.get_folder(_name(entry), folder, stop=self._stopped.is_set))
                content = cache.read_entry(folder)
                cache.publish(folder, entry, content or {}, beat=self._beat)
            except cache.Damaged as damaged:
                self._is_damaged, why = True, f"is damaged ({damaged})"
            except FituneError as error:
                why = f"cannot be fetched: {error.message}"
            else:
                self._on_note(f"the tokenised data is fetched from {self._store.below(_name(entry))}")
                return True
        self._on_note(f"the tokenised data in {self._store.below(_name(entry))} {why}: it is made here")
        return False

    def send(self, entry: Path) -> None:
        """Let the store hold the entry. One that fails on the way costs other machines their time: it is noted."""
        url = self._store.below(_name(entry))
        try:
            if self._has(entry) and not self._is_damaged:
                return
            files = [str(file.relative_to(entry)) for file in sorted(entry.rglob("*")) if file.is_file()]
            sent = self._beside(
                lambda: self._store.put_folder(
                    entry, _name(entry), files, last=cache.MANIFEST, stop=self._stopped.is_set
                )
            )
            self._on_note(f"the tokenised data is in {url} now ({format_bytes(sent)} sent)")
        except FituneError as error:
            self._on_note(
                f"the tokenised data is not in {url}: {error.message}; the run goes on with that of this machine"
            )
        except OSError as error:  # another process has just made the entry anew
            self._on_note(f"the tokenised data is not in {url}: {error.strerror or error}")

    def _has(self, entry: Path) -> bool:
        return cache.MANIFEST in self._ask(partial(self._store.infos, _name(entry)))

    @staticmethod
    def _ask(question: Callable[[], T]) -> T:
        try:
            return question()
        except StoreError as error:
            raise StoreError(f"cache_dir: {error.message}", hint=error.hint) from error

    def _beside(self, action: Callable[[], T]) -> T:
        """The result of ``action``, which runs in a thread while this one beats; it is stopped when a beat raises."""
        with ThreadPoolExecutor(1) as one:
            work = one.submit(action)
            try:
                while not wait([work], timeout=_BEAT_S).done:
                    self._beat()
            except BaseException:
                self._stopped.set()
                raise
            return work.result()


@contextmanager
def shared_cache(
    cache_dir: str, *, beat: Callable[[], None], on_note: Callable[[str], None]
) -> Iterator[SharedCache | None]:
    """The cache at the URL ``cache_dir``; None where it is a folder. Raises StoreError for a URL that is not opened."""
    if not is_url(cache_dir):
        yield None
        return
    store = Store(cache_dir)
    try:
        yield SharedCache(store, beat=beat, on_note=on_note)
    finally:
        store.close()


def _name(entry: Path) -> str:
    return f"{cache.TOKENS}/{entry.name}"
