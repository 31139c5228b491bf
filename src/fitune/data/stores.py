"""Files in stores behind URLs (s3://, gs://, hdfs://, …), listed and read as a stream by fsspec.

A cut connection is taken up again where it was. Credentials come from where the store's own client looks for them: the
environment, or its file. None stands in a path.
"""

import hashlib
import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from fitune.credentials import without_credentials
from fitune.errors import DataError, FituneError
from fitune.units import MIB, format_bytes

_CLIENTS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "hdfs": "pyarrow",
    "memory": "fsspec",
}  # fmt: skip
"""Scheme of a URL -> the package that reads it. memory:// is the memory of this process."""
_PROBE_S, _READ_S = 10, 60
"""Seconds until a store that does not answer, or stops in the middle, counts as cut off."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3fs": {
        "config_kwargs": {
            "connect_timeout": _PROBE_S,
            "read_timeout": _READ_S,
            "retries": {"max_attempts": 3},
        }
    }
}
_BLOCK_BYTES = 8 * MIB
"""Asked of a store at once, so memory per open file is some of these."""
_WAITS_S = (0.5, 2.0, 8.0)
"""Before each try to go on after a cut."""
_HASHES = ("etag", "md5hash", "content_md5", "sha256", "crc32c", "checksum")
_TIMES = ("lastmodified", "last_modified", "mtime", "updated", "modified", "modificationtime", "created")


@dataclass(frozen=True, slots=True)
class Found:
    """The files that a URL names, as URLs: one file, all of a folder, or those of a pattern."""

    kind: Literal["file", "folder", "pattern"]
    files: tuple[str, ...]


def look_up(url: str, *, is_pattern: bool) -> Found:
    """The files at ``url`` as the store lists them now. Raises DataError when nothing is there, or none may look."""
    with _asking(url):
        filesystem, inner = _open_store(url)
        filesystem.invalidate_cache()
        if is_pattern and not filesystem.exists(inner):
            base = re.split(r"[*?\[]", url, maxsplit=1)[0].rpartition("/")[0]
            return Found("pattern", _as_urls(base, filesystem, filesystem.glob(inner)))
        if filesystem.isdir(inner):
            return Found("folder", _as_urls(url, filesystem, filesystem.find(inner)))
        filesystem.info(inner)
        return Found("file", (url,))


def identity(url: str) -> str | None:
    """The identity that the store gives a file's content: hash and size, or else size and time of change; or None."""
    with _asking(url):
        filesystem, inner = _open_store(url)
        return _identity_of(filesystem.info(inner))


def open_stream(url: str) -> BinaryIO:
    """Open a file for reading. A cut connection is taken up again where it was; a file that changed is an error."""
    return cast(BinaryIO, _Stream(url))


def _open_store(url: str) -> tuple[Any, str]:
    import fsspec

    scheme = url.partition("://")[0].lower()
    if scheme not in _CLIENTS or "::" in url:
        opened = ", ".join(f"{name}://" for name in ("https", *_CLIENTS))
        raise DataError(
            f"{url}: {scheme}:// addresses are not opened",
            hint=f"download the file and give its path, or use {opened}",
        )
    filesystem, inner = fsspec.core.url_to_fs(url, **_OPTIONS.get(_CLIENTS[scheme], {}))
    return filesystem, inner


def _as_urls(base: str, filesystem: Any, names: list[str]) -> tuple[str, ...]:
    """Names without a scheme as URLs: fsspec's own way back leaves out the host of hdfs://host/path."""
    start = filesystem._strip_protocol(base).rstrip("/")
    return tuple(sorted(base.rstrip("/") + name[len(start) :] for name in names))


def _identity_of(info: dict[str, Any]) -> str | None:
    said = {str(key).lower(): value for key, value in info.items() if value not in (None, "")}
    for names in (_HASHES, _TIMES):
        found = [f"{name}={said[name]}" for name in names if name in said]
        if found:
            return f"size={said.get('size')} {found[0]}"
    return None


class _Stream(io.RawIOBase):
    """A file in a store, which goes on where a cut connection left it."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with _asking(url):
            filesystem, inner = _open_store(url)
            info = filesystem.info(inner)
            self._identity, self._size = _identity_of(info), info.get("size")
            self._file: Any = filesystem.open(inner, "rb", block_size=_BLOCK_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        block = self._read(len(buffer))
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def _read(self, size: int) -> bytes:
        """The next bytes, at most ``size``. Raises DataError when the store still fails after the last try."""
        cause: Exception | None = None
        for wait_s in (0.0, *_WAITS_S):
            try:
                if cause is not None:
                    time.sleep(wait_s)
                    self._reopen()
                return bytes(self._file.read(size))
            except (FituneError, MemoryError):
                raise
            except (
                Exception
            ) as error:  # clients of stores have no error in common; the last try tells its own
                cause = error
        assert cause is not None
        whole = f" of {format_bytes(self._size)}" if self._size else ""
        raise DataError(
            f"{self._url}: the connection was cut after {format_bytes(self._at)}{whole}, and {len(_WAITS_S)} tries "
            f"to go on failed: {_cause(cause)}",
            hint="run it again when the store answers; nothing half-made is kept",
        )

    def _reopen(self) -> None:
        self._file.close()
        filesystem, inner = _open_store(self._url)
        filesystem.invalidate_cache()
        if _identity_of(filesystem.info(inner)) != self._identity:
            raise DataError(f"{self._url}: the file was changed while it was read", hint="run it again")
        self._file = filesystem.open(inner, "rb", block_size=_BLOCK_BYTES)
        self._file.seek(self._at)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _asking(url: str) -> Iterator[None]:
    """Raises DataError in place of what a store's client raises."""
    scheme = url.partition("://")[0].lower()
    try:
        yield
    except (FituneError, MemoryError):
        raise
    except ImportError as error:
        package = _CLIENTS.get(scheme, scheme)
        extra = "'fitune[remote]'" if package == "s3fs" else package
        raise DataError(f"{url}: {error}", hint=f"pip install {extra}") from None
    except FileNotFoundError:
        endpoint = ", and at AWS_ENDPOINT_URL where the store is not Amazon's" if "s3" in scheme else ""
        raise DataError(
            f"{url}: nothing there: no such file, folder or bucket", hint=f"look at the spelling{endpoint}"
        ) from None
    except PermissionError as error:
        raise DataError(
            f"{url}: the store does not let you read it: {_cause(error)}",
            hint="look at whose credentials the environment holds, and whether they may list and read the bucket",
        ) from None
    except Exception as error:  # botocore, google.auth, aiohttp …: each has errors of its own under Exception
        if "credential" in f"{type(error).__name__} {error}".lower():
            raise DataError(
                f"{url}: no credentials for {scheme}://: {_cause(error)}", hint=_credentials_hint(scheme)
            ) from None
        raise DataError(f"{url}: cannot be read: {_cause(error)}") from None


def _credentials_hint(scheme: str) -> str:
    if _CLIENTS.get(scheme) == "s3fs":
        return (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) in the environment; a public bucket: "
            "FSSPEC_S3_ANON=true"
        )
    return "put them where the store's own client looks for them, never into the path"


def _cause(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return without_credentials(text.splitlines()[0])


def hash_stream(url: str, on_bytes: Any) -> str:
    """A hash of the bytes of a file, for stores that say neither hash nor time."""
    digest = hashlib.blake2b(digest_size=16)
    with open_stream(url) as file:
        while chunk := file.read(4 * MIB):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()
