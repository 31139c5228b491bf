"""Files behind https addresses: opened when that is allowed, never on private addresses by themselves, fetched once."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fitune.data.reading import downloads
from fitune.data.reading.sources import content_key, read_rows
from fitune.errors import DataError
from fitune.spec.plan import DataSource
from fitune.units import KIB

LINES = b"".join(b'{"text": "row %d"}\n' % number for number in range(20_000))


class _Server(ThreadingHTTPServer):
    """Gives LINES, or what ``answers`` says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.tag = LINES, '"1"'
        self.cuts: list[int] = []
        """After so many bytes each of the next answers is cut."""
        self.sent = 0
        self.redirect = ""
        self.status = 200
        self.asked: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/rows.jsonl?download=true"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(dict(self.headers))
        if server.redirect:
            self._head(302, Location=server.redirect)
        elif server.status != 200:
            self._head(server.status)
        elif self.headers.get("If-None-Match") == server.tag:
            self._head(304)
        else:
            self._give()

    def _give(self) -> None:
        server, begin = self.server, 0
        if (wanted := self.headers.get("Range")) and self.headers["If-Range"] == server.tag:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
        body = server.content[begin:]
        self._head(206 if begin else 200, ETag=server.tag, **{"Content-Length": str(len(body))})
        body = body[: server.cuts.pop(0)] if server.cuts else body
        server.sent += len(body)
        self.wfile.write(body)

    def _head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(downloads, "_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(downloads, "_checked", set())
    server = _Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def source(url: str, **allowed: bool) -> DataSource:
    return DataSource(path=url, **({"allow_https": True, "allow_private_addresses": True} | allowed))


def test_a_file_is_fetched_once_and_its_rows_are_named_by_the_address(server: _Server, monkeypatch) -> None:
    rows = list(read_rows(source(server.url)))
    assert (len(rows), rows[7].where) == (20_000, f"{server.url}:8")
    assert content_key(source(server.url))
    assert len(server.asked) == 1, "one process asks once"
    monkeypatch.setattr(downloads, "_checked", set())
    assert len(list(read_rows(source(server.url)))) == 20_000
    assert server.sent == len(LINES), "the second process was told that nothing changed"
    server.content, server.tag = b'{"text": "new"}\n', '"2"'
    monkeypatch.setattr(downloads, "_checked", set())
    assert [row.fields["text"] for row in read_rows(source(server.url))] == ["new"]


def test_a_cut_download_goes_on_where_it_was(server: _Server) -> None:
    server.cuts = [100_000, 50_000]
    assert len(list(read_rows(source(server.url)))) == 20_000
    assert server.sent == len(LINES)


def test_a_download_that_stays_cut_says_how_far_it_came(server: _Server) -> None:
    server.cuts = [100 * KIB, 50 * KIB, 10 * KIB]
    with pytest.raises(
        DataError, match=r"cut after 160.0 KiB of 4\d\d.\d KiB, and 2 tries more failed"
    ) as caught:
        list(read_rows(source(server.url)))
    assert caught.value.hint
    assert not [file for file in downloads.cached(server.url).parent.iterdir() if file.is_file()]


@pytest.mark.parametrize(
    ("status", "said"), [(404, "404"), (403, "403"), (503, "no answer, and 2 tries more .*503")]
)
def test_a_server_that_refuses_is_named(server: _Server, status: int, said: str) -> None:
    server.status = status
    with pytest.raises(DataError, match=said):
        list(read_rows(source(server.url)))
    assert len(server.asked) == (3 if status == 503 else 1)


def test_a_file_that_is_too_large_is_refused_before_it_is_fetched(server: _Server, monkeypatch) -> None:
    monkeypatch.setattr(downloads, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match="at most 1000 B are downloaded"):
        list(read_rows(source(server.url)))


def test_nothing_is_opened_that_was_not_allowed(server: _Server) -> None:
    with pytest.raises(DataError, match="opened only when that is allowed") as caught:
        list(read_rows(source("https://example.org/rows.jsonl", allow_https=False)))
    assert "allow_https: true" in caught.value.hint
    with pytest.raises(DataError, match="http:// is not encrypted"):
        list(read_rows(source(server.url, allow_private_addresses=False)))
    assert server.asked == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "10.1.2.3",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fd00::1]",
        "0.0.0.0",
    ],
)
def test_private_addresses_are_refused(server: _Server, host: str) -> None:
    with pytest.raises(DataError, match="private address|a name of this machine") as caught:
        list(
            read_rows(
                source(f"https://{host}:{server.server_port}/rows.jsonl", allow_private_addresses=False)
            )
        )
    assert "allow_private_addresses" in caught.value.hint
    assert server.asked == []


def test_a_name_that_leads_elsewhere_the_second_time_is_refused(server: _Server, monkeypatch) -> None:
    """The name is public when it is looked at, and this machine when it is connected to."""
    real, answers = socket.getaddrinfo, ["93.184.215.14", "127.0.0.1"]

    def resolve(host: object, port: object, *rest: object, **settings: object):
        return real(answers.pop(0) if host == "rebound.example" else host, port, *rest, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(downloads, "_require_allowed", lambda *_, **__: None)
    with pytest.raises(DataError, match="127.0.0.1, a private address"):
        list(
            read_rows(
                source(
                    f"http://rebound.example:{server.server_port}/rows.jsonl", allow_private_addresses=False
                )
            )
        )
    assert answers == []
    assert server.asked == []


@pytest.mark.parametrize(
    ("target", "said"),
    [("http://10.0.0.1/x.jsonl", "not https://"), ("https://10.0.0.1/x.jsonl", "private address")],
)
def test_a_redirection_is_looked_at_like_an_address(
    server: _Server, monkeypatch, target: str, said: str
) -> None:
    server.redirect = target
    real = downloads.require_public
    monkeypatch.setattr(downloads, "_require_allowed", lambda *_, **__: None)
    monkeypatch.setattr(
        downloads, "require_public", lambda host, **how: None if host == "127.0.0.1" else real(host, **how)
    )
    with pytest.raises(DataError, match=said):
        list(read_rows(source(server.url, allow_private_addresses=False)))
