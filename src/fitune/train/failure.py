"""One error for people from whatever stopped a run: where it was, why, and what to try.

Where memory ran out, what was known then is kept, and everything is let go of for the next attempt. What is tried next
is not decided here: the caller asks the planner and runs again.
"""

import gc
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fitune.checkpoint.commit import last_saved
from fitune.credentials import without_credentials
from fitune.engine.ranks import Ranks, is_peer_gone, local_part
from fitune.errors import (
    FituneError,
    OutOfMemory,
    PeerGone,
    Shortage,
    TrainingFailed,
    first_line,
    is_out_of_memory,
)
from fitune.measure.memory import CudaMeter, MemoryMeter, process_bytes
from fitune.models.weights import first_of, not_finite
from fitune.units import GIB, KIB, MIB
from fitune.values.plan import Plan
from fitune.values.reports import Failure
from fitune.values.run_directory import traceback_of
from fitune.values.words import describe_plan

TRACEBACK = "traceback.txt"


@dataclass(slots=True)
class Whereabouts:
    """Activity of a run at this moment."""

    doing: str = "starting"
    step: int = 0
    """Counted from 1; 0 before the first."""
    signs: int = 0
    """Signs of life: phases and batches begun so far."""

    def sign(self) -> None:
        """Counts one more sign of life."""
        self.signs += 1

    def __str__(self) -> str:
        return f"{self.doing}, step {self.step}" if self.step else self.doing

    def failure(self, error: FituneError) -> Failure:
        """The kind of ``error``, where it came, and the shortage where memory ran out."""
        shortage = error.shortage if isinstance(error, OutOfMemory) else None
        return Failure(error=error.kind, doing=self.doing, step=self.step, shortage=shortage)


def explain_failure(error: Exception, plan: Plan, where: Whereabouts, *, rank: int) -> FituneError:
    """``error`` itself when it is one for people, else one that says where it happened and what to try.

    What fails once steps are under way exits with 1: it is no refusal any more.
    """
    if isinstance(error, FituneError):
        if where.step and error.exit_code == FituneError.exit_code:
            error.exit_code = TrainingFailed.exit_code
        return error
    if is_peer_gone(error):
        return PeerGone(f"another rank is gone ({where})")
    told = f"({where}): {first_line(error)}\n  the plan: {describe_plan(plan)}, on {plan.hardware.gpu.name}"
    if is_out_of_memory(error):
        batch, wanted = plan.batch, ["`fitune plan --details` shows what takes it"]
        if batch.micro_batch_size > 1:
            wanted.append(f"micro_batch_size: {batch.micro_batch_size // 2}")
        if plan.recompute.blocks < plan.model.num_layers:
            wanted.append("gradient_checkpointing: true")
        wanted.append(f"seq_len: {max(1, batch.seq_len // 2)}")
        return OutOfMemory(f"out of memory {told}", hint="; ".join(wanted) + _going_on(plan))
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename is not None else ""
        return TrainingFailed(
            f"{file}{error.strerror or error} ({where})",
            hint=f"check the path, its rights and the free disk space{_going_on(plan)}",
        )
    return TrainingFailed(
        f"{type(error).__name__} {told}",
        hint=f"the cause is in {Path(plan.run.output_dir) / traceback_of(rank)}{_going_on(plan)}",
    )


def require_finite_step(step: int, tensors: Mapping[str, Tensor], *, ranks: Ranks) -> None:
    """Raises TrainingFailed, on every rank, naming what is NaN or infinite after ``step``: it is neither saved nor
    exported."""
    found = ranks.gathered(not_finite({name: local_part(tensor) for name, tensor in tensors.items()}))
    bad = sorted({name for names in found for name in names})
    if bad:
        raise TrainingFailed(
            f"after step {step} these are NaN or infinite: {first_of(bad)}; they are neither saved nor exported",
            hint="lower learning_rate, or train in bf16 or fp32 instead of fp16; --resume goes on from the last "
            "checkpoint, if there is one",
        )


def traceback_text(error: BaseException) -> str:
    """The whole traceback with its causes; secrets are hidden."""
    return without_credentials("".join(traceback.format_exception(error)))


def _going_on(plan: Plan) -> str:
    """Words on what --resume would do; empty where there is nothing to go on from."""
    saved = last_saved(Path(plan.run.output_dir))
    return f"; --resume goes on from step-{saved.step}" if saved else ""


def shortage_of(error: BaseException, where: Whereabouts, *, meter: MemoryMeter) -> Shortage:
    """Facts of the shortage, taken while the tensors of the step that failed are still there."""
    asked = asked_bytes(str(error))
    if isinstance(meter, CudaMeter) and isinstance(error, torch.OutOfMemoryError):
        device = meter.device
        # everything torch's allocator has and could still get, within the share that this process was given
        free, total = torch.cuda.mem_get_info(device)
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return Shortage(
            doing=where.doing, step=where.step, kind="cuda allocated", asked_bytes=asked,
            in_use_bytes=torch.cuda.max_memory_allocated(device),
            capacity_bytes=min(torch.cuda.memory_reserved(device) + free, share),
        )  # fmt: skip
    peaks = meter.take_peaks()
    return Shortage(
        doing=where.doing,
        step=where.step,
        kind="live tensors" if peaks else "process resident",
        in_use_bytes=max(peaks.values(), default=0) or process_bytes(torch.device("cpu")),
        asked_bytes=asked,
    )


_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)?", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": KIB, "mib": MIB, "gib": GIB}


def asked_bytes(message: str) -> int:
    """Bytes of the allocation that failed, as torch's allocators say it; 0 when the message does not."""
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
        torch.cuda.synchronize()  # a copy may still write into what is given back: only its own stream is waited for
        torch.cuda.empty_cache()
