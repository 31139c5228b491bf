"""A server on this machine that speaks the part of the Hub's API which a push uses."""

import hashlib
import json
import threading
from base64 import b64decode
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from huggingface_hub import constants

TOKEN = "hf_" + "s3cretS3cret" * 3
OWNERS = ("me", "team")


class Hub:
    """What the server holds: repositories by their names, contents of large files by their hashes."""

    def __init__(self):
        self.private, self.files, self.large = {}, {}, {}
        self.asked, self.may_write, self.takes_large = [], True, True
        self.url = ""

    def answer(self, method, path, headers, body):
        """Status and JSON for a request."""
        self.asked.append((method, path))
        if method == "HEAD" or path == "/api/validate-yaml":
            return (200, {}) if method == "HEAD" else self._validated(json.loads(body)["content"])
        if path.startswith("/large/"):
            return self._put(path.removeprefix("/large/"), body)
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        parts = (
            path.removeprefix("/api/models/")
            .strip("/")
            .removesuffix(".git/info/lfs/objects/batch")
            .split("/")
        )
        name = "/".join(parts[:2])
        if name not in self.private:
            return 404, {"error": "Repository not found"}
        if method == "GET":
            return 200, {
                "id": name,
                "modelId": name,
                "private": self.private[name],
                "sha": "0" * 40,
                "tags": [],
            }
        if not self.may_write:
            return 403, {"error": "Forbidden: you must use a write token."}
        if path.endswith("/batch"):
            return self._batch(json.loads(body))
        return (
            self._preupload(name, json.loads(body)) if parts[2] == "preupload" else self._commit(name, body)
        )

    def _create(self, wanted):
        owner = wanted["organization"] or "me"
        name = f"{owner}/{wanted['name']}"
        if name in self.private:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        if owner not in OWNERS or not self.may_write:
            return 403, {
                "error": f'You don\'t have the rights to create a model under the namespace "{owner}"'
            }
        self.private[name], self.files[name] = wanted.get("visibility") == "private", {}
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _validated(self, card):
        """A base has to be a model on the Hub."""
        base = yaml.safe_load(card.split("---")[1]).get("base_model") if card.startswith("---") else None
        errors = [] if base is None or str(base).count("/") == 1 else [{"message": f'"{base}" is not valid'}]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def _preupload(self, name, wanted):
        there = self.files[name]
        oids = {path: hashlib.sha1(b"blob %d\0" % len(c) + c).hexdigest() for path, c in there.items()}
        return 200, {
            "files": [
                {
                    "path": file["path"], "shouldIgnore": False, "oid": oids.get(file["path"]),
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                }
                for file in wanted["files"]
            ]
        }  # fmt: skip

    def _batch(self, wanted):
        objects = []
        for one in wanted["objects"]:
            upload = {"upload": {"href": f"{self.url}/large/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.large else {"actions": upload})})
        return 200, {"objects": objects, "transfer": "basic"}

    def _put(self, oid, body):
        if not self.takes_large:
            return 400, {"error": "the store is closed"}
        assert hashlib.sha256(body).hexdigest() == oid
        self.large[oid] = body
        return 200, {}

    def _commit(self, name, body):
        for line in map(json.loads, body.splitlines()):
            what = line["value"]
            if line["key"] == "file":
                self.files[name][what["path"]] = b64decode(what["content"])
            elif line["key"] == "lfsFile":
                self.files[name][what["path"]] = self.large[what["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}


@contextmanager
def serving(monkeypatch):
    """A Hub that this process and its children push to, with a token that may."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, content = hub.answer(self.command, path, self.headers, body)
            text = b"" if self.command == "HEAD" else json.dumps(content).encode()
            self.send_response(status)
            if "error" in content:
                self.send_header("X-Error-Message", content["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_HEAD = _do

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    settings = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
