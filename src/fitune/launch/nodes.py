"""The launchers of several nodes meet at one address: they compare what they run and tell one another how it ends.

Their ranks meet in the same store later, so one port of node 0 has to be open.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fitune.errors import FituneError, HardwareError, NodeFailed, RecipeError
from fitune.launch.board import (
    LOOK_SECONDS,
    Board,
    host_and_port,
    is_own_address,
    reached_store,
    served_store,
)

TIMEOUT_SECONDS = 600.0
"""Longest wait of a node for the others to come: machines of one job may start minutes apart."""

SILENCE_SECONDS = 60.0
"""A launcher that gives no sign for so long is lost: its machine is off, or the network between them is."""

_GOODBYE_SECONDS = 30.0
_FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node of a job, and the address at which all meet."""

    node: int
    nodes: int
    host: str
    port: int
    timeout_s: float = TIMEOUT_SECONDS

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(*, node: int | None, nodes: int, rendezvous: str, timeout_s: float = TIMEOUT_SECONDS) -> Place:
    """The place that the command line says. Raises RecipeError for one that cannot be."""
    if nodes < 2:
        raise RecipeError(
            f"--node-rank and --rendezvous are for several nodes, and the recipe says nodes: {nodes}",
            hint="--nodes 2, or leave both out",
        )
    if node is None:
        raise RecipeError("--rendezvous has no --node-rank", hint=f"--node-rank 0 to {nodes - 1}, one each")
    if not 0 <= node < nodes:
        raise RecipeError(f"--node-rank is {node}, and nodes is {nodes}", hint=f"0 to {nodes - 1}")
    if not rendezvous:
        raise RecipeError(
            f"--node-rank {node} has no --rendezvous",
            hint="--rendezvous HOST:PORT, the same on every node: an address of node 0 and a free port there",
        )
    host, port = meeting_address(rendezvous)
    if not 0 < timeout_s < float("inf"):
        raise RecipeError(f"--rendezvous-timeout {timeout_s:g} is no number of seconds", hint="e.g. 600")
    return Place(node=node, nodes=nodes, host=host.strip("[]"), port=port, timeout_s=timeout_s)


def meeting_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of --rendezvous. Raises RecipeError."""
    found = host_and_port(rendezvous)
    if found is None:
        raise RecipeError(f"--rendezvous {rendezvous!r} is not HOST:PORT", hint="--rendezvous 10.0.0.1:29400")
    return found


class Nodes(Protocol):
    """The launchers of a job. Every one of them calls ``gathered`` and ``from_first`` in the same order."""

    @property
    def place(self) -> Place | None:
        """This node's place among several; None where there is one node."""

    @property
    def trouble(self) -> str:
        """Reason why this node's ranks cannot go on: another node has ended or is silent. Empty while all is well."""

    def name(self, node: int) -> str:
        """``node 1 (its host)``."""

    def gathered(self, text: str) -> list[str]:
        """The ``text`` of every node, in their order. Raises NodeFailed where one of them fails instead."""

    def from_first(self, make: Callable[[], str]) -> str:
        """Returns what ``make`` returns on node 0, the only one that calls it."""

    def call_off(self, cause: str) -> None:
        """Let the other nodes stop their ranks, before the next ``gathered``."""


class OneNode:
    """The launcher of a job on this machine alone."""

    place: Place | None = None
    trouble = ""

    def name(self, node: int) -> str:
        return f"node {node}"

    def gathered(self, text: str) -> list[str]:
        return [text]

    def from_first(self, make: Callable[[], str]) -> str:
        return make()

    def call_off(self, cause: str) -> None:
        return


ONE_NODE = OneNode()


class Meeting:
    """This launcher among those of the other nodes."""

    def __init__(self, place: Place, board: Board) -> None:
        self._place, self._board = place, board
        self._hosts: list[str] = []
        self._calls = 0
        board.want([_FAILED])

    @property
    def place(self) -> Place | None:
        return self._place

    def name(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})" if self._hosts else f"node {node}"

    @property
    def trouble(self) -> str:
        return self._board.known.get(self._stop_key, "") or self._fatal_trouble

    @property
    def _stop_key(self) -> str:
        return f"{self._calls}/stop"

    @property
    def _fatal_trouble(self) -> str:
        """Reason why this node will hear nothing more from another one."""
        board, place = self._board, self._place
        if _FAILED in board.known:
            return str(json.loads(board.known[_FAILED])["message"])
        if board.error or board.silence_s(0) > SILENCE_SECONDS:
            return f"{self.name(0)} no longer answers at {place.address}" + f": {board.error}" * bool(
                board.error
            )
        silent = [node for node in range(1, place.nodes) if board.silence_s(node) > SILENCE_SECONDS]
        if silent and self._hosts:
            return f"{self.name(silent[0])} has given no sign of life for {SILENCE_SECONDS:g} s"
        return ""

    def meet(self) -> None:
        """Wait until every node is there. Raises HardwareError when one does not come in time, or comes twice."""
        place, board = self._place, self._board
        until = time.monotonic() + place.timeout_s
        mine = {"host": socket.gethostname(), "nodes": place.nodes, "pid": os.getpid()}
        keys = self._said(json.dumps(mine), once=True)
        while missing := [node for node, key in enumerate(keys) if key not in board.known]:
            self._require_well()
            for node, key in enumerate(keys):
                _require_fitting(place, node, json.loads(board.known.get(key, "{}")), mine)
            others = [
                node for node in missing if node != place.node
            ]  # this one is known once its thread has spoken
            if others and time.monotonic() > until:
                raise _never_came(place, others)
            time.sleep(LOOK_SECONDS)
        there = [json.loads(board.known[key]) for key in keys]
        for node, found in enumerate(there):
            _require_fitting(place, node, found, mine)
        self._hosts = [found["host"] for found in there]

    def gathered(self, text: str) -> list[str]:
        keys = self._said(text)
        return [self._told(key) for key in keys]

    def from_first(self, make: Callable[[], str]) -> str:
        return self._told(self._said(make() if self._place.node == 0 else "")[0])

    def call_off(self, cause: str) -> None:
        self._board.tell(self._stop_key, f"{self.name(self._place.node)}: {cause}", unless_told=True)

    def fail(self, message: str, exit_code: int) -> None:
        """Tell the others that this node cannot go on; the first to say so is the cause."""
        said = {"message": f"{self.name(self._place.node)}: {message}", "exit_code": exit_code}
        self._board.tell(_FAILED, json.dumps(said), unless_told=True)

    def close(self) -> None:
        """Say goodbye. Node 0 serves the store until the others have, too."""
        board, left = self._board, [f"left/{node}" for node in range(self._place.nodes)]
        expected = set(left[1:]) if self._place.node == 0 else set()
        if self._hosts:
            board.want(expected)
            board.tell(left[self._place.node], "")
        until = time.monotonic() + (_GOODBYE_SECONDS if self._hosts else 1.0)
        while not (board.error or time.monotonic() > until):
            silent = {
                left[node] for node in range(self._place.nodes) if board.silence_s(node) > SILENCE_SECONDS
            }
            if self._hosts and board.has_told_all and board.known.keys() >= expected - silent:
                break
            time.sleep(LOOK_SECONDS)
        board.close()

    def _said(self, text: str, *, once: bool = False) -> list[str]:
        """Say ``text`` under the number of this call, which is the same on every node; the keys of all nodes."""
        keys = [f"{self._calls}/{node}" for node in range(self._place.nodes)]
        self._calls += 1
        self._board.want([*keys, self._stop_key])
        self._board.tell(keys[self._place.node], text, unless_told=once)
        return keys

    def _told(self, key: str) -> str:
        while key not in self._board.known:
            self._require_well()
            time.sleep(LOOK_SECONDS)
        return self._board.known[key]

    def _require_well(self) -> None:
        trouble = self._fatal_trouble
        if trouble:
            failed = json.loads(self._board.known.get(_FAILED, "{}"))
            raise NodeFailed(trouble, exit_code=failed.get("exit_code"))


@contextmanager
def meeting(place: Place) -> Iterator[Meeting]:
    """Inside, the launchers of all nodes are together; an error that leaves the block ends it on every node.

    Raises HardwareError when they cannot meet.
    """
    if place.node == 0:
        store = served_store(place.host, place.port)
    else:
        store = reached_store(place.host, place.port, timeout_s=place.timeout_s)
    nodes = Meeting(place, Board(store, node=place.node, nodes=place.nodes))
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


def _never_came(place: Place, missing: list[int]) -> HardwareError:
    names = ", ".join(map(str, missing))
    there = (
        "" if is_own_address(place.host) or place.node else f" ({place.host} is no address of this machine)"
    )
    return HardwareError(
        f"waited {place.timeout_s:g} s at {place.address}{there} for {place.nodes} nodes: "
        f"node{'s' * (len(missing) > 1)} {names} did not come",
        hint=f"fitune train … --node-rank {missing[0]} --rendezvous {place.address} there; longer: "
        f"--rendezvous-timeout {2 * place.timeout_s:g}",
    )
