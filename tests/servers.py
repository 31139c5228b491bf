"""A server of completions on this machine, for tests of what asks one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes, dict[str, str]]


@contextmanager
def serving(reply: Callable[[dict[str, Any], int], Reply]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A real HTTP server on this machine; ``reply`` is given the body and how often that prompt was asked before."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before = sum(earlier["prompt"] == body["prompt"] for earlier in bodies)
            bodies.append(body)
            status, content, headers = reply(body, before)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(text: str, **more: Any) -> Reply:
    choice = {"index": 0, "text": text, "finish_reason": "stop", **more}
    return 200, json.dumps({"choices": [choice]}).encode(), {}
