"""Sentences on attempts that ran out of memory and on ranks that were replaced."""

from fitune.errors import Shortage
from fitune.spec.reports import Restart, Retry
from fitune.units import format_bytes

_KINDS = {
    "live tensors": "tensors in use when it failed",
    "cuda allocated": "allocated when it failed",
    "process resident": "resident in the whole process when it failed",
}


def shortage_words(shortage: Shortage, *, predicted_bytes: int) -> str:
    """``predicted 52.0 MiB of tensors at the peak; measured 61.2 MiB allocated when it failed, 4.0 MiB more …``."""
    measured = f"{format_bytes(shortage.in_use_bytes)} {_KINDS[shortage.kind]}"
    asked = f", {format_bytes(shortage.asked_bytes)} more asked for" if shortage.asked_bytes else ""
    had = f", of {format_bytes(shortage.capacity_bytes)} there were" if shortage.capacity_bytes else ""
    return (
        f"predicted {format_bytes(predicted_bytes)} of tensors at the peak; measured {measured}{asked}{had}"
    )


def describe_retry(retry: Retry) -> str:
    """Lines for people: what ran out, predicted and measured bytes, and what is tried next."""
    takes = f"{format_bytes(retry.predicted_after_bytes)} predicted"
    return "\n".join(
        [
            f"attempt {retry.attempt}: {retry.reason}",
            f"  {shortage_words(retry.shortage, predicted_bytes=retry.predicted_bytes)}",
            f"  {retry.before} → {retry.after}: the same global batch, {takes}",
            f"  attempt {retry.attempt + 1} {begins(retry)}",
        ]
    )


def describe_restart(restart: Restart) -> str:
    """One line for people: why ranks were replaced, where the new ones began and the time lost."""
    workers = f"{restart.workers} workers"
    if restart.workers != restart.workers_before:
        workers += f" instead of {restart.workers_before}"
    where = f"from step {restart.after_step:,}" if restart.after_step else "from the beginning"
    lost = f"; {restart.lost_seconds:,.0f} s lost" if restart.again_at else ""
    again = f", {restart.lost_steps:,} step{'s' * (restart.lost_steps != 1)} done again" * bool(
        restart.lost_steps
    )
    return f"{restart.cause}; {workers} went on {where}{again}{lost}"


def begins(retry: Retry) -> str:
    """Start of the next attempt in words: ``goes on from step 40`` or ``begins anew``."""
    return f"goes on from step {retry.after_step:,}" if retry.after_step else "begins anew"
