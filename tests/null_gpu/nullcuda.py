"""What was asked of the null GPU: counts, names of kernels, the most physical memory."""

import ctypes
import os

NAMES = (
    "launches",
    "syncs",
    "copies",
    "mallocs",
    "events",
    "waits",
    "to_device",
    "to_host",
    "within",
    "frees",
    "maps",
    "unmaps",
    "host_allocs",
    "host_bytes",
)
_lib = ctypes.CDLL(os.environ["NULLCUDA_LIB"])
_lib.nullcuda_most.restype = ctypes.c_size_t
_lib.nullcuda_overwritten.restype = ctypes.c_long


def counts():
    numbers = (ctypes.c_long * len(NAMES))()
    _lib.nullcuda_counts(numbers, len(NAMES))
    return dict(zip(NAMES, numbers, strict=True))


def since(before):
    return {name: n - before[name] for name, n in counts().items()}


def most_bytes(device=0, *, reset=False):
    """The most physical memory of a card that was held at once (what torch calls reserved)."""
    return int(_lib.nullcuda_most(device, int(reset)))


def overwritten():
    """How often pinned memory was changed before a copy out of it was waited for (NULLCUDA_LATE_COPIES)."""
    return int(_lib.nullcuda_overwritten())


def kernels(*, reset=False):
    """Launches by the kernel's (mangled) name."""
    found = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
    def tell(name, n):
        word = name.decode()
        found[word] = found.get(word, 0) + n

    _lib.nullcuda_kernels(tell, int(reset))
    return found
