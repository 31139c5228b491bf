"""Memory that ran out: what was known then, and letting go of everything for the next attempt.

What is tried next is not decided here: the caller asks the planner and runs again.
"""

import gc
import re

import torch

from fitune.errors import Shortage
from fitune.measure.memory import MemoryMeter, process_bytes
from fitune.train.failure import Whereabouts
from fitune.units import GIB, KIB, MIB


def shortage_of(error: BaseException, where: Whereabouts, *, meter: MemoryMeter) -> Shortage:
    """What is known while the tensors of the step that failed are still there."""
    asked = asked_bytes(str(error))
    if meter.kind == "cuda allocated" and isinstance(error, torch.OutOfMemoryError):
        device = torch.device("cuda", 0)
        return Shortage(
            doing=where.doing, step=where.step, kind="cuda allocated", asked_bytes=asked,
            in_use_bytes=torch.cuda.max_memory_allocated(device), capacity_bytes=_capacity(device),
        )  # fmt: skip
    peaks = meter.take_peaks()
    return Shortage(
        doing=where.doing,
        step=where.step,
        kind="live tensors" if peaks else "process resident",
        in_use_bytes=max(peaks.values(), default=0) or process_bytes(torch.device("cpu")),
        asked_bytes=asked,
    )


def _capacity(device: torch.device) -> int:
    """Everything torch's allocator has and could still get, within the share that this process was given."""
    free, total = torch.cuda.mem_get_info(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(torch.cuda.memory_reserved(device) + free, share)


_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)?", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": KIB, "mib": MIB, "gib": GIB}


def asked_bytes(message: str) -> int:
    """Of the allocation that failed, as torch's allocators say it; 0 when the message does not."""
    found = _ASKED.search(message)
    return 0 if found is None else round(float(found[1]) * _UNITS[(found[2] or "bytes").lower()])


def release(error: BaseException) -> None:
    """Let go of all that the failed attempt held: its model lives on in the frames of the traceback."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
            one.__traceback__ = one.__cause__ = one.__context__ = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
