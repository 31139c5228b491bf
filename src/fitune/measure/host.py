"""Memory, cores and disk of this machine, as much of them as this process may use."""

import math
import os
import shutil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def host_memory_bytes(*, cgroup: Path = _CGROUP, membership: str | None = None) -> int:
    """Memory of the machine, or of the container when that is less."""
    import psutil

    limits = memory_limits(cgroup, _own_cgroups() if membership is None else membership)
    return min([int(psutil.virtual_memory().total), *limits])


def memory_limits(cgroup: Path, membership: str) -> list[int]:
    """Limits on the way from the process's own cgroup up to the root; ``membership`` is /proc/self/cgroup.

    Its lines are ``0::/path`` (version 2, file memory.max) or ``4:memory:/path`` (version 1).
    """
    limits = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, file = (
            (cgroup, "memory.max") if not controllers else (cgroup / "memory", "memory.limit_in_bytes")
        )
        own = root / path.strip("/")
        limits += [_read(place / file).strip() for place in (own, *own.parents) if place.is_relative_to(root)]
    return [int(text) for text in limits if text.isdecimal() and int(text) > 0]


def cpu_cores(*, cgroup: Path = _CGROUP) -> int:
    """Cores this process may use: its affinity, or the container's share when that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for share in _cpu_shares(cgroup))]))


def has_bf16_products(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True where the processor names instructions that multiply bf16: AVX512-BF16, AMX, or Arm's bf16."""
    words = set(_read(cpuinfo).lower().split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_shares(cgroup: Path) -> list[float]:
    """``cpu.max`` is "quota period" in microseconds, or "max period" without a limit."""
    words = _read(cgroup / "cpu.max").split()
    return [int(words[0]) / int(words[1])] if len(words) == 2 and words[0].isdecimal() else []


def free_disk_bytes(path: Path) -> int:
    """Free bytes where ``path`` is, or would be created."""
    existing = next((place for place in (path.absolute(), *path.absolute().parents) if place.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None else 0


def _own_cgroups() -> str:
    return _read(Path("/proc/self/cgroup"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
