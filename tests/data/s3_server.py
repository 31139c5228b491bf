"""A real S3 server in this process, behind a wire that tests cut, slow down and answer in its place."""

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
import time
from functools import cache

from fitune.stores import opening

_VERBS = (b"GET", b"HEAD", b"PUT", b"POST", b"DELETE")


def refusal(status, code):
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + body


UNAVAILABLE = refusal("503 Service Unavailable", "ServiceUnavailable")
DENIED = refusal("403 Forbidden", "AccessDenied")


class Wire:
    """Forwards connections to a server: cuts them after ``cut_after`` bytes of answers or ``cut_sent_after`` bytes of
    what is sent, refuses while down, forwards nothing while silent, waits ``slow_s`` before each block that is sent,
    and answers the next ``refused`` requests that write by ``refusal``."""

    def __init__(self, host, port):
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.mend()
        threading.Thread(target=self._accept, daemon=True).start()

    def mend(self):
        """The wire is whole, and nobody was heard on it."""
        self.cut_after = self.cut_sent_after = None
        self.is_down = self.stays_down = self.is_silent = False
        self.refused, self.slow_s, self.refusal = 0, 0.0, UNAVAILABLE
        self.requests, self.headers = [], []

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if self.is_down:
                    connection.close()
                    continue
                upstream = socket.create_connection(self._server)
                # what an earlier test left under way stays in its own lists
                noted = self.requests, self.headers
                for source, sink, answers in ((connection, upstream, False), (upstream, connection, True)):
                    words = (source, sink, answers, *noted)
                    threading.Thread(target=self._pump, args=words, daemon=True).start()

    def _pump(self, source, sink, answers, requests, headers):
        with contextlib.suppress(OSError):
            while data := source.recv(16_384):
                while self.is_silent:
                    time.sleep(0.01)
                if answers and self.cut_after is not None:
                    data = data[: self.cut_after]
                    self.cut_after -= len(data)
                if not answers and data.startswith(_VERBS):
                    line, _, rest = data.partition(b"\r\n")
                    requests.append(line)
                    headers.append(rest.partition(b"\r\n\r\n")[0].lower())
                    if self.refused and data.startswith((b"PUT", b"POST", b"DELETE")):
                        self.refused -= 1
                        source.sendall(self.refusal)
                        break
                if not answers:
                    time.sleep(self.slow_s)
                    if self.cut_sent_after is not None and data.find(b"HTTP/1.1") < 0:
                        self.cut_sent_after -= len(data)
                        if self.cut_sent_after < 0:
                            self.cut_sent_after = None
                            break
                sink.sendall(data)
                if answers and self.cut_after == 0:
                    self.cut_after, self.is_down = None, self.stays_down
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def running_server():
    """moto's S3 alone, without a log: what it does besides takes half of its time."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        def log_request(self, *_):
            pass

    server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    wire = Wire(*server.server_address)
    try:
        yield wire
    finally:
        wire.close()
        server.shutdown()


@contextlib.contextmanager
def behind_tls(wire, certificate):
    """The https address of the server behind ``wire``, whose certificate is written to a file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.write_bytes(_certificate())
    context.load_cert_chain(certificate)

    async def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                sink.write(data)
                await sink.drain()
            sink.close()

    async def forward(reader, writer):
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", wire.port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(forward, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()


def _certificate():
    """A key and a certificate of 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret + made.public_bytes(pem)


@cache
def _descriptions(*_):
    """What clients know of S3, read once for all of them: it takes longer than what tests ask for."""
    from botocore.loaders import Loader

    return Loader()


SECRET = "a-secret-of-the-tests"


def environment_of(wire):
    """What a client of the server behind ``wire`` finds in its environment."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}", "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }  # fmt: skip


def use_server(wire, monkeypatch):
    """Let this process use the server, whose wire is whole, and try again at once."""
    import s3fs

    for name, value in environment_of(wire).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(opening, "WAITS_S", (0.01, 0.01))
    monkeypatch.setattr("botocore.session.create_loader", _descriptions)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    wire.mend()


def client():
    """A way around fitune to the server that the environment names."""
    import boto3

    return boto3.client("s3")


def make_bucket(name):
    client().create_bucket(Bucket=name)


def names(bucket):
    """The names in a bucket."""
    return {one["Key"] for one in client().list_objects_v2(Bucket=bucket).get("Contents", [])}


def objects(bucket):
    """Everything in a bucket, as the server itself has it."""
    server = client()
    return {name: server.get_object(Bucket=bucket, Key=name)["Body"].read() for name in names(bucket)}
