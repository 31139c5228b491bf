"""A folder in a store that is written: files sent in parallel, tried again, and compared with what the store holds."""

import ftplib
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, TypeVar

from fitune.errors import FituneError, StoreError
from fitune.files import open_regular, temporary_sibling, write_synced
from fitune.stores import opening
from fitune.stores.opening import (
    CLIENTS,
    HOSTS,
    WRITTEN,
    Patience,
    asking,
    lacks_credentials,
    open_store,
    require_address,
    scheme_of,
)
from fitune.stores.reading import is_same, open_stream, part_bytes
from fitune.threads import give_way
from fitune.units import MIB, format_bytes

T = TypeVar("T")

AT_ONCE = 4
"""Files that are sent at the same time."""
_PARTS_AT_ONCE = 2
"""Parts of one file that are sent at the same time; a part is 16 MiB, so sending takes 128 MiB of the host at most."""
_BLOCK_BYTES = 8 * MIB
_SMALL_BYTES = 64 * MIB


def nobody_stops() -> bool:
    """Always False: for transfers that nothing interrupts."""
    return False


class Store:
    """A folder behind a URL. Names below it have ``/`` between their parts. All methods raise StoreError."""

    def __init__(self, url: str) -> None:
        require_address(url, WRITTEN, error=StoreError)
        if "?" in url:  # s3fs takes what follows for a version, and writes to the name before it
            raise StoreError(f"{url}: '?' may not stand in a folder's URL", hint=url.partition("?")[0])
        self.url = url.rstrip("/")
        self._patience = Patience(StoreError)
        self._sent_bytes = 0
        self._shared: tuple[Any, str] | None = None
        self._making = threading.Lock()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sending", initializer=give_way)

    def below(self, name: str) -> str:
        """URL of ``name``, or of the folder itself for an empty one."""
        return f"{self.url}/{name}" if name else self.url

    def infos(self, folder: str = "") -> dict[str, Mapping[str, Any]]:
        """Every file below ``folder`` by its name there, with the store's words about it; none where it is not."""

        def ask(filesystem: Any, inner: str) -> dict[str, Mapping[str, Any]]:
            """Lists the folder anew: name below it -> what the store says of the file."""
            found = filesystem.find(inner, detail=True) if filesystem.exists(inner) else {}
            return {name[len(inner.rstrip("/")) + 1 :]: said for name, said in found.items() if name != inner}

        return self._tried(folder, ask)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none. Raises StoreError for a large one."""

        def ask(filesystem: Any, inner: str) -> bytes | None:
            """Reads the file anew; None where there is none. Raises StoreError for a large one."""
            try:
                size = filesystem.info(inner)["size"]
            except FileNotFoundError:
                return None
            if size is not None and size > _SMALL_BYTES:
                raise StoreError(
                    f"{self.below(name)}: {format_bytes(size)}, larger than {format_bytes(_SMALL_BYTES)}"
                )
            return bytes(filesystem.cat_file(inner))

        return self._tried(name, ask)

    def write(self, name: str, content: bytes) -> None:
        """Put a small file there; afterwards it has this content."""

        def put(filesystem: Any, inner: str) -> None:
            """Writes the file, in its folder if the store has folders."""
            self._make_folder(filesystem, inner)
            filesystem.pipe_file(inner, content)

        self._tried(name, put, doing="write")
        if self.read(name) != content:
            raise StoreError(f"{self.below(name)}: the store does not hold what was written")

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error."""
        self._all(self._remove, names)

    def require_writable(self) -> None:
        """Write a small file, read it back and remove it: what a run needs a store to allow."""
        name, content = f"fitune-probe-{uuid.uuid4().hex[:12]}", self.url.encode()

        def probe(filesystem: Any, folder: str) -> None:
            """Writes, reads and removes the file. Raises StoreError if the bytes read differ."""
            inner = f"{folder}/{name}"
            self._make_folder(filesystem, inner)
            filesystem.pipe_file(inner, content)
            try:
                filesystem.invalidate_cache()
                if filesystem.cat_file(inner) != content:
                    raise StoreError(f"{self.url}: the store does not hold what was written")
            finally:
                filesystem.rm_file(inner)

        self._tried("", probe, doing="write")

    def put_folder(
        self,
        folder: Path,
        name: str,
        files: Iterable[str],
        *,
        last: str = "",
        keeps_others: bool = False,
        stop: Callable[[], bool] = nobody_stops,
    ) -> int:
        """Let ``name`` in the store hold the ``files`` of ``folder`` and, unless ``keeps_others``, no others; returns
        the bytes that were sent.

        What is there already, by size and hash, is not sent again. ``last`` is sent when the others are there, and
        removed before one of them changes. Raises StoreError, and OSError where a file here cannot be read.
        """
        there = self.infos(name)
        wanted = sorted((set(files)) - {last}, key=lambda each: -(folder / each).stat().st_size)
        holds = self._all(
            lambda each: self._holds(folder / each, _inside(name, each), there.get(each)), wanted
        )
        missing = [each for each, is_there in zip(wanted, holds, strict=True) if not is_there]
        others = [] if keeps_others else sorted(there.keys() - set(wanted) - {last})
        if last and last in there and (missing or others):
            self._remove(_inside(name, last))
            del there[last]
        self.remove(_inside(name, each) for each in others)

        def send(each: str) -> int:
            """Sends one file; returns the bytes sent. Raises StoreError when ``stop`` says so."""
            if stop():
                raise StoreError(f"{self.below(name)}: sending was stopped")
            return self._put(folder / each, _inside(name, each))

        sent = sum(self._all(send, missing))
        if last and not self._holds(folder / last, _inside(name, last), there.get(last)):
            sent += self._put(folder / last, _inside(name, last))
        return sent

    def get_folder(self, name: str, folder: Path, *, stop: Callable[[], bool] = nobody_stops) -> int:
        """Bring every file below ``name`` into ``folder``; returns how many. Raises StoreError, DataError and OSError.

        A file that does not fit to the store's words about it is an error.
        """
        there = self.infos(name)

        def block(stream: BinaryIO) -> bytes:
            """At most _BLOCK_BYTES of the stream, none at its end. Raises StoreError when ``stop`` says so."""
            if stop():
                raise StoreError(f"{self.below(name)}: fetching was stopped")
            return stream.read(_BLOCK_BYTES)

        def get(each: str) -> None:
            """Fetches one file under a temporary name first. Raises StoreError if it is not what the store holds."""
            if ".." in PurePosixPath(each).parts or "\\" in each or each.startswith("/"):
                raise StoreError(f"{self.below(name)}: {each!r} is no name inside a folder")
            file = folder / each
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_sibling(file)
            try:
                with closing(
                    open_stream(self.below(_inside(name, each)), clients=WRITTEN, patience=self._patience)
                ) as stream:
                    write_synced(temporary, iter(partial(block, stream), b""))
                if is_same(temporary, there[each]) is False:
                    raise StoreError(f"{self.below(name)}/{each}: what came is not what the store holds")
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)

        self._all(get, there)
        return len(there)

    def close(self) -> None:
        """Drops transfers that have not begun and does not wait for those that have."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all(self, action: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Run ``action`` on several names at once; returns its results. Raises the first error when all have ended;
        after a store fell silent no more of them are begun."""
        begun = [self._pool.submit(action, name) for name in names]
        wait(begun, return_when=FIRST_EXCEPTION)
        if not self._patience.has_answered:
            for one in begun:
                one.cancel()
        wait(begun)
        return [one.result() for one in begun]

    def _open(self, name: str) -> tuple[Any, str]:
        """The client and the path in it. One that works by asyncio may be asked by several threads, another may not."""
        url = self.below(name)
        if self._shared is not None:
            filesystem, root = self._shared
            return filesystem, f"{root}/{name}" if name else root
        filesystem, inner = open_store(url, WRITTEN, error=StoreError)
        if getattr(filesystem, "async_impl", False):
            self._shared = filesystem, filesystem._strip_protocol(self.url).rstrip("/")
        return filesystem, inner.rstrip("/")

    def _make_folder(self, filesystem: Any, inner: str) -> None:
        """Stores of objects have no folders, and making one there would make a bucket."""
        if self._shared is None:
            with self._making:
                filesystem.makedirs(filesystem._parent(inner), exist_ok=True)

    def _remove(self, name: str) -> None:
        def remove(filesystem: Any, inner: str) -> None:
            """Removes the file; raises the store's error only if the file is still there."""
            try:
                filesystem.rm_file(inner)
            except (FileNotFoundError, ftplib.error_perm):
                filesystem.invalidate_cache()
                if filesystem.exists(inner):
                    raise

        self._tried(name, remove, doing="write")

    def _put(self, file: Path, name: str) -> int:
        """Send the file until the store holds it."""
        size = file.stat().st_size

        def put(filesystem: Any, inner: str) -> None:
            """Sends the file. Raises OSError if the store then holds something else."""
            from fsspec.callbacks import Callback

            self._make_folder(filesystem, inner)
            arrived = Callback(hooks={"moved": lambda *_size_and_value: self._patience.heard()})
            filesystem.put_file(str(file), inner, callback=arrived, **self._how(size))
            filesystem.invalidate_cache()
            if not self._holds(file, name, filesystem.info(inner)):
                raise OSError("the store does not hold what was sent")

        with open_regular(file, follow_links=False):
            self._tried(name, put, doing="write")
        self._sent_bytes += size
        return size

    def _how(self, size: int) -> dict[str, Any]:
        if CLIENTS.get(scheme_of(self.url)) == "s3fs":
            return {"chunksize": part_bytes(size), "max_concurrency": _PARTS_AT_ONCE}
        return {"block_size": _BLOCK_BYTES} if scheme_of(self.url) in HOSTS else {}

    def _holds(self, file: Path, name: str, said: Mapping[str, Any] | None) -> bool:
        """True if the store holds this very file: by its hash, or where it gives none by reading it back."""
        if said is None:
            return False
        same = is_same(file, said)
        return self._reads_as(file, name) if same is None else same

    def _reads_as(self, file: Path, name: str) -> bool:
        with open_regular(file) as own:
            here = hashlib.file_digest(own, "sha256").digest()
        filesystem, inner = self._open(name)
        there = hashlib.sha256()
        with filesystem.open(inner, "rb", block_size=_BLOCK_BYTES) as stream:
            while block := stream.read(_BLOCK_BYTES):
                there.update(block)
        return there.digest() == here

    def _tried(
        self, name: str, action: Callable[[Any, str], T], *, doing: Literal["read", "write"] = "read"
    ) -> T:
        """Run ``action`` with the file system and ``name`` there, again after each of the waits; returns its result.
        Raises at once what no wait changes."""

        def once() -> T:
            """One try, of what the store holds now."""
            filesystem, inner = self._open(name)
            filesystem.invalidate_cache()
            return action(filesystem, inner)

        with asking(url := self.below(name), error=StoreError, doing=doing):
            return self._patience.answer(url, partial(_tries, once), so_far=self._so_far)

    def _so_far(self) -> str:
        return f"after {format_bytes(self._sent_bytes)} in whole files were sent"


def _tries(action: Callable[[], T]) -> T:
    for wait_s in opening.WAITS_S:
        try:
            return action()
        except (FituneError, MemoryError, PermissionError, FileNotFoundError, ImportError):
            raise
        except Exception as problem:  # clients of stores have no error in common
            if lacks_credentials(problem):
                raise
        time.sleep(wait_s)
    return action()


def opened_store(url: str) -> closing[Store]:
    """The store behind ``url``, for ``with``. Raises StoreError."""
    return closing(Store(url))


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
