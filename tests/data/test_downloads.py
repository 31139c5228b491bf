"""Files behind https addresses: opened when that is allowed, fetched once."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fitune.data.reading import files
from fitune.data.reading.sources import content_key, read_rows
from fitune.errors import DataError
from fitune.files import cache_folder
from fitune.stores import opening
from fitune.values.plan import DataSource

LINES = b"".join(b'{"text": "row %d"}\n' % number for number in range(20_000))


class _Server(ThreadingHTTPServer):
    """Gives LINES, or what a test puts in their place; each of the next answers is cut after so many bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content, self.tag, self.status = LINES, '"1"', 200
        self.cuts, self.asked, self.sent = [], [], 0
        self.url = f"http://127.0.0.1:{self.server_port}/rows.jsonl?download=true"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        server = self.server
        server.asked.append(self.path)
        self.send_response(server.status)
        if server.status == 200:
            self.send_header("ETag", server.tag)
            self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        if (server := self.server).status == 200:
            body = server.content[: server.cuts.pop(0)] if server.cuts else server.content
            server.sent += len(body)
            self.wfile.write(body)
            self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(opening, "WAITS_S", (0.0, 0.0))
    server = _Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def source(url, **allowed):
    return DataSource(path=url, **({"allow_https": True, "allow_private_addresses": True} | allowed))


def read(*words, **allowed):
    """The rows, as another process reads them."""
    files._fetched.cache_clear()
    return list(read_rows(source(*words, **allowed)))


def texts(url):
    return [row.fields["text"] for row in read(url)]


def test_a_file_is_fetched_once_and_its_rows_are_named_by_the_address(server):
    rows = read(server.url)
    assert (len(rows), rows[7].where) == (20_000, f"{server.url}:8")
    asked = len(server.asked)
    key = content_key(source(server.url))
    assert len(server.asked) == asked, "one process asks once"
    assert read(server.url) == rows
    assert server.sent == len(LINES), "the second process was told that nothing changed"
    server.content, server.tag = b'{"text": "new"}\n', '"2"'
    assert texts(server.url) == ["new"]
    assert content_key(source(server.url)) != key


def test_a_server_without_words_for_its_content_is_asked_for_it_by_every_process(server):
    server.tag = ""
    for text in ("one", "two"):
        server.content = f'{{"text": "{text}"}}\n'.encode()
        assert texts(server.url) == [text]


def test_a_cut_download_is_tried_again_and_leaves_nothing_behind(server):
    server.cuts = [100_000, 50_000]
    assert len(read(server.url)) == 20_000
    server.tag, server.cuts = '"3"', [100, 50, 10]
    with pytest.raises(DataError, match="rows.jsonl.*: cannot be downloaded") as caught:
        read(server.url)
    assert caught.value.hint
    assert len(list((cache_folder() / "downloads").iterdir())) == 1


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (503, 3)])
def test_a_server_that_refuses_is_named(server, status, tries):
    server.status = status
    with pytest.raises(DataError, match=f"cannot be downloaded: .*{status}"):
        read(server.url)
    assert len(server.asked) == 2 * tries, "HEAD, and GET where HEAD is refused"


def test_a_server_without_encryption_is_asked_only_when_that_is_allowed(server):
    with pytest.raises(DataError, match="http:// is not encrypted") as caught:
        read(server.url, allow_private_addresses=False)
    assert "allow_private_addresses" in caught.value.hint
    assert server.asked == []
