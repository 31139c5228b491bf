"""Threads beside the steps: they give way to them."""

import os
import threading
from contextlib import suppress

NICENESS = 10
"""Niceness of threads that write or send (man 2 setpriority: Linux has it by thread): hashing and copying take a core,
and where all are busy the steps come first. On two busy cores a matrix product slowed by half beside the writing of a
checkpoint, so by a tenth."""


def give_way() -> None:
    """Let the calling thread run only where the steps leave a core."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
