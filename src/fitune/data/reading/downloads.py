"""Files behind https:// addresses: fetched once into the cache, asked again only whether they changed.

A recipe may be a stranger's, so addresses are opened only where the user allows it, and private ones (this machine,
this network, a cloud's metadata service) only where that is allowed, too. That is looked at before a name is connected
to and after, and again for every redirection.
"""

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from fitune.credentials import without_credentials
from fitune.errors import DataError
from fitune.files import cache_folder, read_text, temporary_sibling, write_atomically
from fitune.stores.addresses import PrivateAddress, require_public
from fitune.units import GIB, MIB, format_bytes

SCHEMES = ("https", "http")
MOST_BYTES = 64 * GIB
"""Larger files belong into a store, where they are read as a stream."""
_TIMEOUT_S = 30.0
_CHUNK_BYTES = MIB
_WAITS_S = (0.5, 2.0, 8.0)
"""Before each try to go on after a cut."""
_CONTENT, _ABOUT = "content", "about.json"

_checked: set[Path] = set()
"""Folders of files that this process has asked about: a file does not change between its hash and its rows."""


def cached(url: str) -> Path:
    """The file on disk, fetched before by ``fetch``."""
    return _folder(url) / _CONTENT


def fetch(url: str, *, allow_https: bool, allow_private: bool) -> None:
    """Bring the file behind ``url`` into the cache, or see that the copy there is the newest.

    Raises DataError when the address may not be opened, does not answer, or the file is too large.
    """
    _require_allowed(url, allow_https=allow_https, allow_private=allow_private)
    folder = _folder(url)
    if folder in _checked:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _Download(url, folder, allow_private=allow_private).run()
    except OSError as error:
        raise DataError(
            f"{url}: the cache for downloads cannot be written: {folder}: {error.strerror or error}",
            hint="free some space, or name another folder: FITUNE_CACHE",
        ) from None
    _checked.add(folder)


def _folder(url: str) -> Path:
    return cache_folder() / "downloads" / hashlib.blake2b(url.encode(), digest_size=16).hexdigest()


def _require_allowed(url: str, *, allow_https: bool, allow_private: bool) -> None:
    scheme = url.partition("://")[0].lower()
    if not allow_https:
        raise DataError(
            f"{url}: addresses on the web are opened only when that is allowed",
            hint="allow_https: true (--allow-https), or download the file and give its path",
        )
    if scheme == "http" and not allow_private:
        raise DataError(f"{url}: http:// is not encrypted", hint=f"https://{url.partition('://')[2]}")


class _Cut(Exception):
    """The connection ended before the file did."""


class _Download:
    """One file on its way into the cache."""

    def __init__(self, url: str, folder: Path, *, allow_private: bool) -> None:
        self._url, self._folder = url, folder
        self._opener = _opener(allow_private=allow_private)
        self._part = temporary_sibling(folder / _CONTENT)
        self._done = 0
        self._tag = ""
        self._whole: int | None = None

    def run(self) -> None:
        known = _about(self._folder)
        try:
            self._tries(known)
        finally:
            self._part.unlink(missing_ok=True)

    def _tries(self, known: dict[str, str]) -> None:
        cause = ""
        for wait_s in (0.0, *_WAITS_S):
            time.sleep(wait_s)
            try:
                self._try(known)
                return
            except PrivateAddress as refused:
                raise DataError(
                    f"{self._url}: {refused}",
                    hint="allow_private_addresses: true opens addresses of this machine and network",
                ) from None
            except urllib.error.HTTPError as error:
                cause = f"the server answers {error.code} {error.reason}"
                error.close()
                if error.code < 500 and error.code != 429:
                    raise DataError(f"{self._url}: cannot be downloaded: {cause}") from None
            except urllib.error.URLError as error:
                cause = str(error.reason)
            except (_Cut, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                cause = str(error) or type(error).__name__
        whole = f" of {format_bytes(self._whole)}" if self._whole else ""
        got = f"the connection was cut after {format_bytes(self._done)}{whole}" if self._done else "no answer"
        raise DataError(
            f"{self._url}: {got}, and {len(_WAITS_S)} tries more failed: {without_credentials(cause)}",
            hint="run it again when the server answers",
        )

    def _try(self, known: dict[str, str]) -> None:
        headers = {"User-Agent": "fitune", "Accept-Encoding": "identity"}
        if self._done and self._tag:
            headers |= {"Range": f"bytes={self._done}-", "If-Range": self._tag}
        else:
            self._done = 0
            headers |= known
        try:
            answer = self._opener.open(urllib.request.Request(self._url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 304 and known and not self._done:
                error.close()
                return
            raise
        with answer:
            self._keep(answer)

    def _keep(self, answer: Any) -> None:
        goes_on = answer.status == 206 and self._done > 0
        if not goes_on:
            self._done = 0
            tag = answer.headers.get("ETag", "")
            self._tag = "" if tag.startswith("W/") else tag
        length = answer.headers.get("Content-Length", "")
        self._whole = self._done + int(length) if length.isdecimal() else None
        _require_room(self._url, self._whole or 0, self._folder)
        with self._part.open("ab" if goes_on else "wb") as out:
            self._copy(answer, out)
            out.flush()
            os.fsync(out.fileno())
        if self._whole is not None and self._done < self._whole:
            raise _Cut(f"{format_bytes(self._whole - self._done)} are missing")
        self._publish(answer.headers)

    def _copy(self, answer: Any, out: BinaryIO) -> None:
        while chunk := _received(answer):
            self._done += len(chunk)
            _require_room(self._url, self._done, None)
            out.write(chunk)

    def _publish(self, headers: Any) -> None:
        """The content first: without a description it is fetched again, never taken for something else."""
        again = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
        about = {ask: headers[name] for name, ask in again.items() if headers.get(name)}
        (self._folder / _ABOUT).unlink(missing_ok=True)
        os.replace(self._part, self._folder / _CONTENT)
        write_atomically(self._folder / _ABOUT, json.dumps({"url": self._url, "ask": about}))


def _received(answer: Any) -> bytes:
    try:
        return bytes(answer.read(_CHUNK_BYTES))
    except OSError as error:
        raise _Cut(str(error)) from None


def _about(folder: Path) -> dict[str, str]:
    """Headers that ask whether the copy is the newest; none when there is no whole copy."""
    with suppress(OSError, ValueError, KeyError, AttributeError):
        if (folder / _CONTENT).is_file():
            asked = json.loads(read_text(folder / _ABOUT))["ask"]
            return {str(name): str(value) for name, value in asked.items()}
    return {}


def _require_room(url: str, wanted: int, folder: Path | None) -> None:
    if wanted > MOST_BYTES:
        raise DataError(
            f"{url}: {format_bytes(wanted)}, and at most {format_bytes(MOST_BYTES)} are downloaded",
            hint="put it into a store (s3://, gs://, hdfs://), from where it is read as a stream",
        )
    if folder is not None and wanted > (free := shutil.disk_usage(folder).free):
        raise DataError(
            f"{url}: {format_bytes(wanted)}, and the cache has {format_bytes(free)} free: "
            f"{format_bytes(wanted - free)} short",
            hint="free some space, or name another folder: FITUNE_CACHE",
        )


def _opener(*, allow_private: bool) -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(allow_private),
        _Http(allow_private),
        _Https(allow_private),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections, but not from https:// to http://."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https" and not self._allow_private:
            raise PrivateAddress(f"redirected to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, allow_private: bool) -> None:
        super().__init__()
        self._allow_private = allow_private

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connecting(_HttpConnection, req, self._allow_private), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, allow_private: bool) -> None:
        super().__init__()
        self._allow_private = allow_private

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connecting(_HttpsConnection, req, self._allow_private), req)


def _connecting(connection: Callable[..., Any], req: urllib.request.Request, allow_private: bool) -> Any:
    """A function that opens a connection. Through a proxy, which the user set, the proxy finds the address."""
    target = urlsplit(req.full_url).hostname or ""
    through_proxy = req.host != urlsplit(req.full_url).netloc
    if not allow_private and through_proxy:
        require_public(target, resolve=False)
    return partial(connection, is_checked=not allow_private and not through_proxy)


class _HttpConnection(http.client.HTTPConnection):
    def __init__(self, *args: Any, is_checked: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._is_checked = is_checked

    def connect(self) -> None:
        _connect_checked(self, super().connect)


class _HttpsConnection(http.client.HTTPSConnection):
    def __init__(self, *args: Any, is_checked: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._is_checked = is_checked

    def connect(self) -> None:
        _connect_checked(self, super().connect)


def _connect_checked(connection: _HttpConnection | _HttpsConnection, connect: Callable[[], None]) -> None:
    """Look at the address before anything is sent to it: a name may lead elsewhere when it is asked again."""
    if connection._is_checked:
        require_public(connection.host, resolve=True)
    connect()
    if connection._is_checked:
        require_public(connection.sock.getpeername()[0], resolve=False)
