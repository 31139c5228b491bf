"""A real S3 server in this process, behind a wire that tests cut."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Wire:
    """Forwards connections to a server. It cuts them after ``cut_after`` bytes of answers, and refuses while down."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut_after: int | None = None
        self.stays_down = False
        self.is_down = False
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if self.is_down:
                    connection.close()
                    continue
                upstream = socket.create_connection(self._server)
                for source, sink, answers in ((connection, upstream, False), (upstream, connection, True)):
                    threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16_384):
                if answers and self.cut_after is not None:
                    data = data[: self.cut_after]
                    self.cut_after -= len(data)
                if not answers:
                    self.requests.append(data.split(b"\r\n", 1)[0])
                sink.sendall(data)
                if answers and self.cut_after == 0:
                    self.cut_after, self.is_down = None, self.stays_down
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def running_server() -> Iterator[Wire]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    wire = Wire(*server.get_host_and_port())
    try:
        yield wire
    finally:
        wire.close()
        server.stop()
