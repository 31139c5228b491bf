"""Two machines on one: network namespaces that a cable (a veth pair) joins. Needs root."""

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

NAMES = (f"fitune-{os.getpid()}-a", f"fitune-{os.getpid()}-b")
"""Two runs of the tests at once do not meet."""


@dataclass(frozen=True, slots=True)
class Cable:
    """``addresses`` of the two machines; ``on(0)`` before a command runs it on the first."""

    addresses: tuple[str, str] = ("10.77.1.1", "10.77.1.2")

    def on(self, machine):
        return ["ip", "netns", "exec", NAMES[machine]]

    def pull(self):
        _ip("-n", NAMES[1], "link", "set", "cable", "down")


@contextmanager
def two_machines():
    """Skips the test where the system has no ``ip`` or does not allow namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("no program ip (iproute2), which makes network namespaces")
    cable = Cable()
    try:
        try:
            for name in NAMES:
                _ip("netns", "add", name)
            _ip(*f"link add cable netns {NAMES[0]} type veth peer name cable netns {NAMES[1]}".split())
            for name, address in zip(NAMES, cable.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield cable
    finally:
        for name in NAMES:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
