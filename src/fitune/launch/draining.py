"""A worker pod of KubeRay before it is stopped: it tells Ray that its node goes away, and the ranks save.

    python -m fitune.launch.draining SECONDS

Ray itself ends at SIGTERM and takes its workers with it. A node that is drained gives notice to the run instead, which
finishes the step, saves and lets go of the node. This ends when no rank is left here, or when SECONDS are over.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

_WORKER = "RayTrainWorker"
"""In the command line of a process of Ray Train that is a rank."""
_LOOK_SECONDS = 1.0


def drain(seconds: float, *, trains: Callable[[], bool]) -> None:
    """Give notice, and wait while this node ``trains``. Where it does not, nothing is to be waited for."""
    if not trains():
        return
    until = time.monotonic() + seconds
    notice = [
        "ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is stopped",
        "--deadline-remaining-seconds", str(round(seconds)),
    ]  # fmt: skip
    subprocess.run(notice, check=False, timeout=seconds)  # what it prints is in the events of the pod
    while trains() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def has_ranks() -> bool:
    """True if a process here is a rank of Ray Train."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any(_WORKER in words[0] for words in found if words)


if __name__ == "__main__":
    drain(float(sys.argv[1]), trains=has_ranks)
