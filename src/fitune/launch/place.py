"""Where a node of a job stands among several, by the command line, and on which of its networks the others are."""

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from fitune.errors import RecipeError

TIMEOUT_SECONDS = 600.0
"""Longest wait of a node for the others to come: machines of one job may start minutes apart."""


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
        """``host:port``, with brackets around an IPv6 host."""
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


def host_and_port(address: str) -> tuple[str, int] | None:
    """The two parts of ``HOST:PORT`` (``[::1]:PORT`` for IPv6); None for anything else."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(\d{1,5})", address, re.ASCII)
    return (found[1], int(found[2])) if found and 0 < int(found[2]) < 2**16 else None


def meeting_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of --rendezvous. Raises RecipeError."""
    found = host_and_port(rendezvous)
    if found is None:
        raise RecipeError(f"--rendezvous {rendezvous!r} is not HOST:PORT", hint="--rendezvous 10.0.0.1:29400")
    return found


def interface_towards(host: str, port: int) -> str:
    """The name of this machine's network interface on the way to ``host``; empty when it is not found."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)  # of datagrams: nothing is sent
            return next(interfaces_at(asking.getsockname()[0]), "")
    except OSError:
        return ""


def interfaces_at(address: str) -> Iterator[str]:
    """Names of this machine's network interfaces with that address."""
    for name, all_of in psutil.net_if_addrs().items():
        if address in (each.address for each in all_of):
            yield name
