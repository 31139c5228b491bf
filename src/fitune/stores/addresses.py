"""Private addresses: a recipe may be a stranger's, so this machine and its network are opened only when that is
allowed."""

import ipaddress
import socket


class PrivateAddress(Exception):
    """The address may not be connected to."""


def require_public(host: str, *, resolve: bool) -> None:
    """Raises PrivateAddress for a host of this machine or network. ``resolve``: a name is looked up, too."""
    try:
        found = [ipaddress.ip_address(host.strip("[]"))]
    except ValueError:
        if host.lower().rstrip(".").endswith(("localhost", ".local", ".internal")):
            raise PrivateAddress(f"{host} is a name of this machine or network") from None
        if not resolve:
            return
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    for address in found:
        inner = getattr(address, "ipv4_mapped", None) or address
        if not inner.is_global or inner.is_multicast:
            raise PrivateAddress(f"{host} leads to {address}, a private address")
