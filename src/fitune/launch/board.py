"""A board of short texts that the launchers of several nodes write and read: a store of torch, which node 0 serves.

One thread speaks to the store, since a call to a machine that is off does not return.
"""

import re
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import psutil

from fitune.errors import HardwareError

_BEAT_SECONDS = 2.0
LOOK_SECONDS = 0.1
_ASKING_SECONDS = 2.0


class Board:
    """``known``: texts by key, of those that were ``wanted``. Every node gives a sign of life in it."""

    def __init__(self, store: Any, *, node: int, nodes: int) -> None:
        self._store, self._node = store, node
        self._lock = threading.Lock()
        self._to_tell: list[tuple[str, str, bool]] = []
        self._wanted: set[str] = set()
        self.known: dict[str, str] = {}
        self.error = ""
        """Why the store cannot be reached any more."""
        self._signs = {each: (0, time.monotonic()) for each in range(nodes)}
        self._answered = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="board", daemon=True)
        self._thread.start()

    def tell(self, key: str, text: str, *, unless_told: bool = False) -> None:
        with self._lock:
            self._to_tell.append((key, text, unless_told))

    def want(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._wanted.update(key for key in keys if key not in self.known)

    @property
    def has_told_all(self) -> bool:
        return not self._to_tell

    def silence_s(self, node: int) -> float:
        """Seconds since ``node`` gave a sign of life; of node 0, since its store answered."""
        now = time.monotonic()
        since_answer = now - self._answered
        return since_answer if node == 0 else now - self._signs[node][1] - since_answer

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(timeout=1.0)

    def _talk(self) -> None:
        beaten = 0.0
        try:
            while not self._is_over.wait(LOOK_SECONDS):
                self._send()
                self._look()
                if time.monotonic() - beaten > _BEAT_SECONDS:
                    beaten = time.monotonic()
                    self._beat()
                self._answered = time.monotonic()
        except RuntimeError as error:  # DistNetworkError and its kind
            self.error = str(error).splitlines()[0]

    def _send(self) -> None:
        while self._to_tell:
            key, text, unless_told = self._to_tell[0]
            if unless_told:
                self._store.compare_set(key, "", text)
            else:
                self._store.set(key, text)
            with self._lock:
                self._to_tell.pop(0)

    def _look(self) -> None:
        with self._lock:
            wanted = list(self._wanted)
        found = {key: self._store.get(key).decode() for key in wanted if self._store.check([key])}
        with self._lock:
            self._wanted.difference_update(found)
            self.known |= found

    def _beat(self) -> None:
        for node, (last, _) in self._signs.items():
            count = self._store.add(f"sign/{node}", int(node == self._node))
            if count != last:
                self._signs[node] = (count, time.monotonic())


def host_and_port(address: str) -> tuple[str, int] | None:
    """The two parts of ``HOST:PORT``; None for anything else."""
    found = re.fullmatch(r"([^\s/]+):(\d{1,5})", address, re.ASCII)
    return (found[1], int(found[2])) if found and 0 < int(found[2]) < 2**16 else None


def served_store(host: str, port: int) -> Any:
    """The store that this machine serves at ``port``. Raises HardwareError when the port is taken."""
    from torch.distributed import DistNetworkError, TCPStore

    try:
        return TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    except (DistNetworkError, OSError) as error:
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise HardwareError(
                f"node 0 cannot serve port {port}: {str(error).splitlines()[0]}",
                hint="another port in --rendezvous",
            ) from error
        raise HardwareError(
            f"port {port} of --rendezvous {host}:{port} is taken on this machine, node 0",
            hint=f"another port on every node, e.g. --rendezvous {host}:{port + 1}; or end what has it",
        ) from error


def reached_store(host: str, port: int, *, timeout_s: float) -> Any:
    """The store that node 0 serves. Raises HardwareError when nobody answers there within ``timeout_s``.

    Asked by short tries, so that a signal ends the waiting.
    """
    from torch.distributed import DistError, TCPStore

    until = time.monotonic() + timeout_s
    while (why := _refusal(host, port)) and time.monotonic() < until:
        time.sleep(min(_ASKING_SECONDS, timeout_s))
    if why:
        raise HardwareError(
            f"waited {timeout_s:g} s for node 0 at {host}:{port}: {why}",
            hint=f"start fitune train … --node-rank 0 --rendezvous {host}:{port} there; can this machine reach that "
            f"address and port? Longer: --rendezvous-timeout {2 * timeout_s:g}",
        )
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    except DistError as error:
        raise HardwareError(
            f"{host}:{port} answers, and it is not node 0 of a job: {str(error).splitlines()[0]}",
            hint="the address that node 0 was started with, and a port that nothing else has",
        ) from error


def _refusal(host: str, port: int) -> str:
    """Reason why nobody answers; empty when somebody does."""
    try:
        socket.create_connection((host, port), timeout=_ASKING_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def interface_towards(host: str, port: int) -> str:
    """The name of this machine's network interface on the way to ``host``; empty when it is not found."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)  # of datagrams: nothing is sent
            own = asking.getsockname()[0]
    except OSError:
        return ""
    found = (
        name for name, all_of in psutil.net_if_addrs().items() if own in (each.address for each in all_of)
    )
    return next(found, "")


def is_own_address(host: str) -> bool:
    """True if ``host`` names this machine."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {each.address for all_of in psutil.net_if_addrs().values() for each in all_of}
    return bool(found & own) or any(address.startswith("127.") for address in found)
