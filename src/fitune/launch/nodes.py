"""The launchers of several nodes meet at one address: they compare what they run and tell one another how it ends.

They write short texts into a store of torch that node 0 serves; their ranks meet in the same store later, so one port
of node 0 has to be open. One thread speaks to the store: a call to a machine that is off does not return, and torch's
own timeouts do not end it (``TCPStore.check`` on a stopped server hung for 40 s with timeout=5 s).
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from fitune.errors import FituneError, HardwareError, NodeFailed, first_line
from fitune.launch.place import Place

SILENCE_SECONDS = 60.0
"""A launcher that gives no sign for so long is lost: its machine is off, or the network between them is."""

_GOODBYE_SECONDS = 30.0
_BEAT_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_ASKING_SECONDS = 2.0
_FAILED = "failed"


class OneNode:
    """The launchers of a job: here that of this machine alone. Every one of them calls ``gathered`` and ``from_first``
    in the same order."""

    place: Place | None = None
    """This node's place among several; None where there is one node."""

    @property
    def number(self) -> int:
        """This node's number."""
        return 0 if self.place is None else self.place.node

    @property
    def trouble(self) -> str:
        """Reason why this node's ranks cannot go on: another node has ended or is silent. Empty while all is well."""
        return ""

    def name(self, node: int) -> str:
        """``node 1 (its host)``."""
        return f"node {node}"

    def gathered(self, text: str) -> list[str]:
        """The ``text`` of every node, in their order. Raises NodeFailed where one of them fails instead."""
        return [text]

    def from_first(self, make: Callable[[], str]) -> str:
        """Returns what ``make`` returns on node 0, the only one that calls it."""
        return make()

    def call_off(self, cause: str) -> None:
        """Let the other nodes stop their ranks, before the next ``gathered``."""


ONE_NODE = OneNode()


class Meeting(OneNode):
    """This launcher among those of the other nodes. Every node gives a sign of life in the store every other second."""

    place: Place

    def __init__(self, place: Place, store: Any) -> None:
        self.place, self._store = place, store
        self._hosts: list[str] = []
        self._calls = 0
        self._lock = threading.Lock()
        self._to_tell: list[tuple[str, str, bool]] = []
        self._wanted, self._known = {_FAILED}, dict[str, str]()
        self._error = ""  # why the store cannot be reached any more
        self._signs = {each: (0, time.monotonic()) for each in range(place.nodes)}
        self._answered = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="nodes", daemon=True)
        self._thread.start()

    def name(self, node: int) -> str:
        """Without the host until all have met."""
        return f"node {node} ({self._hosts[node]})" if self._hosts else f"node {node}"

    @property
    def trouble(self) -> str:
        """A node's ``call_off`` since the last ``gathered`` comes before what ends the whole meeting."""
        return self._known.get(f"{self._calls}/stop", "") or self._fatal_trouble

    @property
    def _fatal_trouble(self) -> str:
        """Reason why this node will hear nothing more from another one."""
        if _FAILED in self._known:
            return str(json.loads(self._known[_FAILED])["message"])
        if self._error or self._silence_s(0) > SILENCE_SECONDS:
            why = f": {self._error}" if self._error else ""
            return f"{self.name(0)} no longer answers at {self.place.address}{why}"
        silent = [node for node in range(1, self.place.nodes) if self._silence_s(node) > SILENCE_SECONDS]
        if silent and self._hosts:
            return f"{self.name(silent[0])} has given no sign of life for {SILENCE_SECONDS:g} s"
        return ""

    def meet(self) -> None:
        """Wait until every node is there. Raises HardwareError when one does not come in time, or comes twice."""
        place, until = self.place, time.monotonic() + self.place.timeout_s
        mine = {"host": socket.gethostname(), "nodes": place.nodes, "pid": os.getpid()}
        keys = self._said(json.dumps(mine), once=True)
        while True:
            missing = [node for node, key in enumerate(keys) if key not in self._known]
            found = [json.loads(self._known.get(key, "{}")) for key in keys]
            if missing:
                self._require_well()
            for node, theirs in enumerate(found):
                _require_fitting(place, node, theirs, mine)
            if not missing:
                self._hosts = [theirs["host"] for theirs in found]
                return
            others = [
                node for node in missing if node != place.node
            ]  # this one's own thread may not have spoken
            if others and time.monotonic() > until:
                raise _never_came(place, others)
            time.sleep(_LOOK_SECONDS)

    def gathered(self, text: str) -> list[str]:
        """Waits for the slowest node."""
        return [self._told(key) for key in self._said(text)]

    def from_first(self, make: Callable[[], str]) -> str:
        """Waits for node 0, and for all others too."""
        return self._told(self._said(make() if self.place.node == 0 else "")[0])

    def call_off(self, cause: str) -> None:
        """The first node to call off is the one that is heard."""
        self._tell(f"{self._calls}/stop", f"{self.name(self.place.node)}: {cause}", unless_told=True)

    def fail(self, message: str, exit_code: int) -> None:
        """Tell the others that this node cannot go on; the first to say so is the cause."""
        said = {"message": f"{self.name(self.place.node)}: {message}", "exit_code": exit_code}
        self._tell(_FAILED, json.dumps(said), unless_told=True)

    def close(self) -> None:
        """Say goodbye. Node 0 serves the store until the others have, too."""
        nodes = range(self.place.nodes)
        left = [f"left/{node}" for node in nodes]
        expected = set(left[1:]) if self.place.node == 0 else set()
        if self._hosts:
            self._want(expected)
            self._tell(left[self.place.node], "")
        until = time.monotonic() + (_GOODBYE_SECONDS if self._hosts else 1.0)
        while not (self._error or time.monotonic() > until):
            silent = {left[node] for node in nodes if self._silence_s(node) > SILENCE_SECONDS}
            if self._hosts and not self._to_tell and self._known.keys() >= expected - silent:
                break
            time.sleep(_LOOK_SECONDS)
        self._is_over.set()
        self._thread.join(timeout=1.0)

    def _said(self, text: str, *, once: bool = False) -> list[str]:
        """Say ``text`` under the number of this call, which is the same on every node; the keys of all nodes."""
        keys = [f"{self._calls}/{node}" for node in range(self.place.nodes)]
        self._calls += 1
        self._want([*keys, f"{self._calls}/stop"])
        self._tell(keys[self.place.node], text, unless_told=once)
        return keys

    def _told(self, key: str) -> str:
        while key not in self._known:
            self._require_well()
            time.sleep(_LOOK_SECONDS)
        return self._known[key]

    def _require_well(self) -> None:
        if trouble := self._fatal_trouble:
            failed = json.loads(self._known.get(_FAILED, "{}"))
            raise NodeFailed(trouble, exit_code=failed.get("exit_code"))

    def _silence_s(self, node: int) -> float:
        """Seconds since ``node`` gave a sign of life; of node 0, since its store answered."""
        now = time.monotonic()
        since_answer = now - self._answered
        return since_answer if node == 0 else now - self._signs[node][1] - since_answer

    def _tell(self, key: str, text: str, *, unless_told: bool = False) -> None:
        with self._lock:
            self._to_tell.append((key, text, unless_told))

    def _want(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._wanted.update(key for key in keys if key not in self._known)

    def _talk(self) -> None:
        """The thread: sends what is to be told, looks for what is wanted, and counts every node's signs of life."""
        beaten = 0.0
        try:
            while not self._is_over.wait(_LOOK_SECONDS):
                while self._to_tell:
                    key, text, unless_told = self._to_tell[0]
                    if unless_told:
                        self._store.compare_set(key, "", text)
                    else:
                        self._store.set(key, text)
                    with self._lock:
                        self._to_tell.pop(0)
                with self._lock:
                    wanted = list(self._wanted)
                found = {key: self._store.get(key).decode() for key in wanted if self._store.check([key])}
                with self._lock:
                    self._wanted.difference_update(found)
                    self._known |= found
                if time.monotonic() - beaten > _BEAT_SECONDS:
                    beaten = time.monotonic()
                    for node, (last, _) in self._signs.items():
                        count = self._store.add(f"sign/{node}", int(node == self.place.node))
                        if count != last:
                            self._signs[node] = (count, time.monotonic())
                self._answered = time.monotonic()
        except RuntimeError as error:  # DistNetworkError and its kind
            self._error = first_line(error)


@contextmanager
def meeting(place: Place) -> Iterator[Meeting]:
    """Inside, the launchers of all nodes are together; an error that leaves the block ends it on every node.

    Raises HardwareError when they cannot meet.
    """
    store = _served_store(place) if place.node == 0 else _reached_store(place)
    nodes = Meeting(place, store)
    try:
        nodes.meet()
        yield nodes
    except NodeFailed:
        raise
    except FituneError as error:
        nodes.fail(error.message, error.exit_code)
        raise
    except (
        BaseException
    ) as error:  # a stop, or a fault of the program: the others need not wait for this node
        nodes.fail(f"{type(error).__name__} {error}".strip(), HardwareError.exit_code)
        raise
    finally:
        nodes.close()


def _require_fitting(place: Place, node: int, found: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raises for a node that was told another number of nodes, or whose number another launcher has already."""
    if found.get("nodes", place.nodes) != place.nodes:
        raise HardwareError(
            f"node {node} ({found['host']}) was started for {found['nodes']} nodes, and this one for {place.nodes}",
            hint="the same recipe and the same --nodes on every node",
        )
    if node == place.node and found and found != mine:
        raise NodeFailed(
            f"node {node} is at {place.address} already: process {found['pid']} on {found['host']}",
            exit_code=2,
        )


def _served_store(place: Place) -> Any:
    """The store that this machine serves. Raises HardwareError when the port is taken."""
    from torch.distributed import DistNetworkError, TCPStore

    host, port = place.host, place.port
    try:
        return TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    except (DistNetworkError, OSError) as error:
        raise HardwareError(
            f"node 0 cannot serve port {port} of --rendezvous {host}:{port}: {first_line(error)}",
            hint=f"another port on every node, e.g. --rendezvous {host}:{port + 1}; or end what has it",
        ) from error


def _reached_store(place: Place) -> Any:
    """The store that node 0 serves. Raises HardwareError when nobody answers there in time.

    Asked by short tries, so that a signal ends the waiting.
    """
    from torch.distributed import DistError, TCPStore

    host, port, timeout_s = place.host, place.port, place.timeout_s
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=_ASKING_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() >= until:
                raise HardwareError(
                    f"waited {timeout_s:g} s for node 0 at {host}:{port}: {error.strerror or error}",
                    hint=f"start fitune train … --node-rank 0 --rendezvous {host}:{port} there; can this machine reach "
                    f"that address and port? Longer: --rendezvous-timeout {2 * timeout_s:g}",
                ) from None
        time.sleep(min(_ASKING_SECONDS, timeout_s))
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    except DistError as error:
        raise HardwareError(
            f"{host}:{port} answers, and it is not node 0 of a job: {first_line(error)}",
            hint="the address that node 0 was started with, and a port that nothing else has",
        ) from error


def _never_came(place: Place, missing: list[int]) -> HardwareError:
    names = ", ".join(map(str, missing))
    return HardwareError(
        f"waited {place.timeout_s:g} s at {place.address} for {place.nodes} nodes: "
        f"node{'s' * (len(missing) > 1)} {names} did not come",
        hint=f"start fitune train … --node-rank {missing[0]} --rendezvous {place.address} there, an address of node 0; "
        f"or wait longer: --rendezvous-timeout {2 * place.timeout_s:g}",
    )
