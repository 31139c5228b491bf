"""A server of completions on this machine, for tests of what asks one."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(reply):
    """A real HTTP server on this machine; ``reply`` is given the body and how often that prompt was asked before."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before = sum(earlier["prompt"] == body["prompt"] for earlier in bodies)
            bodies.append(body)
            status, content, headers = reply(body, before)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(text, **more):
    choice = {"index": 0, "text": text, "finish_reason": "stop", **more}
    return 200, json.dumps({"choices": [choice]}).encode(), {}
