"""Stores behind URLs, opened by fsspec; what their clients raise becomes an error for people.

Credentials come from where the store's own client looks for them: the environment, or its file. None stands in a path.
"""

import ftplib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from fitune.credentials import without_credentials
from fitune.errors import DataError, FituneError, did_you_mean, joined_hints

CLIENTS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "hdfs": "pyarrow",
}  # fmt: skip
"""Scheme of a URL -> the package that reads it. No memory://, which is gone when the process ends."""
HOSTS = {"ftp": "fsspec"}
"""As CLIENTS, for schemes whose URL names a host to connect to. Runs are written there; data is not read from there."""
_PROBE_S, _READ_S = 10, 60
"""Seconds until a store that does not answer, or stops in the middle, counts as cut off. Clients then try again."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3fs": {
        "config_kwargs": {
            "connect_timeout": _PROBE_S,
            "read_timeout": _READ_S,
            "retries": {"max_attempts": 3},
            # Else a checksum follows each file in chunks that stores other than Amazon's may refuse; what they hold
            # is compared with the file anyway.
            "request_checksum_calculation": "when_required",
        }
    }
}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")
WRITTEN = {**CLIENTS, **HOSTS}
WAITS_S = (0.5, 2.0, 8.0)
"""Before each try to go on after a cut."""


def scheme_of(url: str) -> str:
    """``s3`` of ``s3://bucket/name``, in lower case."""
    return url.partition("://")[0].lower()


def is_url(path: str) -> bool:
    """True for what is behind a URL, False for a path of this machine."""
    return "://" in path


def open_store(
    url: str, clients: Mapping[str, str] = CLIENTS, *, error: type[FituneError] = DataError
) -> tuple[Any, str]:
    """fsspec's file system for ``url``, and the path in it. Raises ``error`` for a scheme that has no client."""
    import fsspec

    client = clients[require_address(url, clients, error=error)]
    filesystem, inner = fsspec.core.url_to_fs(url, **_options(client))
    if client == "s3fs":
        filesystem.retries = 1  # botocore tries again below it, and we do above
    return filesystem, inner


def require_address(url: str, clients: Mapping[str, str] = CLIENTS, *, error: type[FituneError]) -> str:
    """The scheme of ``url``. Raises ``error`` for one that has no client, and where no bucket or host is named."""
    scheme, _, path = url.partition("://")
    inner = path.partition("]")[2] if path.startswith("[") else path  # [::1] is a host
    if scheme not in clients or "::" in inner:
        known = [*(("https",) if error is DataError else ()), *clients]
        instead = "download the file and give its path, or use" if error is DataError else "a folder, or"
        hint = joined_hints(
            did_you_mean(scheme, known), f"{instead} {', '.join(f'{name}://' for name in known)}"
        )
        raise error(f"{url}: {scheme}:// addresses are not opened", hint=hint)
    if path.startswith("/") and scheme == "hdfs":
        return scheme  # the name node of the client's settings
    if not path.partition("/")[0]:
        named = "host" if scheme in HOSTS else "bucket"
        raise error(f"{url} names no {named}", hint=f"{scheme}://{named.upper()}/folder")
    if ".." in path.split("/"):
        raise error(
            f"{url}: '..' is a name like others in a store", hint="the folder's own URL, without '..'"
        )
    return scheme


def _options(client: str) -> dict[str, Any]:
    """How the client is made. TLS guards what is sent, so behind https no SHA-256 of it is signed, too: a quarter of
    the core that sending takes."""
    options = OPTIONS.get(client, {})
    is_plain = any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS)
    if client != "s3fs" or is_plain:
        return options
    return options | {"config_kwargs": {**options["config_kwargs"], "s3": {"payload_signing_enabled": False}}}


_DONE = {"read": "read", "write": "written"}


@contextmanager
def asking(
    url: str, *, error: type[FituneError] = DataError, doing: Literal["read", "write"] = "read"
) -> Iterator[None]:
    """Raises ``error`` in place of what a store's client raises."""
    scheme = scheme_of(url)
    try:
        yield
    except (FituneError, MemoryError):
        raise
    except ImportError as problem:
        package = WRITTEN.get(scheme, scheme)
        extra = "'fitune[remote]'" if package == "s3fs" else package
        raise error(f"{url}: {problem}", hint=f"pip install {extra}") from None
    except FileNotFoundError:
        endpoint = ", and at AWS_ENDPOINT_URL where the store is not Amazon's" if "s3" in scheme else ""
        raise error(
            f"{url}: nothing there: no such file, folder or bucket", hint=f"look at the spelling{endpoint}"
        ) from None
    except (PermissionError, ftplib.error_perm) as problem:
        raise error(
            f"{url}: the store does not let you {doing} it: {cause_of(problem)}",
            hint=f"look at whose credentials the environment holds, and whether they may list and {doing} there",
        ) from None
    except (
        Exception
    ) as problem:  # botocore, google.auth, aiohttp …: each has errors of its own under Exception
        if lacks_credentials(problem):
            raise error(
                f"{url}: no credentials for {scheme}://: {cause_of(problem)}", hint=_credentials_hint(scheme)
            ) from None
        raise error(f"{url}: cannot be {_DONE[doing]}: {cause_of(problem)}", hint=look_at(url)) from None


def look_at(url: str) -> str:
    """Hint for a store that does not answer as one: the settings of its client in the environment."""
    is_s3 = CLIENTS.get(scheme_of(url)) == "s3fs"
    names = (*_ENDPOINTS, "AWS_PROFILE", "AWS_DEFAULT_REGION") if is_s3 else ()
    found = [f"{name} = {os.environ[name]}" for name in names if os.environ.get(name)]
    settings = f"{', '.join(found)} in the environment, and at " if found else ""
    return without_credentials(f"look at {settings}the network; run it again when the store answers")


def lacks_credentials(problem: Exception) -> bool:
    """True if the error of a store's client speaks of credentials."""
    return "credential" in f"{type(problem).__name__} {problem}".lower()


def _credentials_hint(scheme: str) -> str:
    if CLIENTS.get(scheme) == "s3fs":
        return (
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) in the environment; a public bucket: "
            "FSSPEC_S3_ANON=true"
        )
    return "put them where the store's own client looks for them, never into the path"


def cause_of(problem: Exception) -> str:
    """First line of the error's words, or its type where it has none; secrets are hidden."""
    text = str(problem) or type(problem).__name__
    return without_credentials(text.splitlines()[0])


T = TypeVar("T")

ANSWER_S = 30.0
"""Seconds that a store has for its first answer, whatever its client tries."""
SILENT_S = 300.0
"""Seconds without a part or an answer after which a store that answered before is given up: on a slow link a part of
16 MiB alone takes minutes."""


class Patience:
    """Patience with one store. Several threads may ask it for answers: a sign of life to one of them counts for all."""

    def __init__(self, error: type[FituneError]) -> None:
        """``error`` is raised for silence."""
        self._error, self._heard = error, 0.0
        self.has_answered = False
        """False before the first answer, and after the store fell silent."""

    def heard(self) -> None:
        """The store took or gave a part, or answered."""
        self._heard = time.monotonic()

    def answer(self, url: str, ask: Callable[[], T], *, so_far: Callable[[], str]) -> T:
        """The result of ``ask``: its client alone would try for a quarter of an hour, and for ever where the other end
        takes no bytes. The thread that asks a silent store is left alone. ``so_far`` says in words what was done until
        the store fell silent."""
        self.heard()
        is_first = not self.has_answered
        limit = ANSWER_S if is_first else SILENT_S
        answer = _asked_beside(ask)
        while not wait([answer], timeout=limit / 20).done:
            if time.monotonic() - self._heard > limit:
                self.has_answered = False
                said = f"nothing was heard of the store for {limit:g} s, {so_far()}"
                first = f"the store did not answer within {limit:g} s"
                raise self._error(f"{url}: {first if is_first else said}", hint=look_at(url))
        result = answer.result()
        self.has_answered = True
        self.heard()
        return result


def _asked_beside(ask: Callable[[], T]) -> Future[T]:
    """The result to come of ``ask``, which runs in a thread that nobody has to wait for, not even at exit."""
    answer: Future[T] = Future()

    def run() -> None:
        """Puts the result of ``ask`` into ``answer``, or what it raised."""
        try:
            answer.set_result(ask())
        except BaseException as problem:  # raised where the answer is waited for
            answer.set_exception(problem)

    threading.Thread(target=run, name="store", daemon=True).start()
    return answer
