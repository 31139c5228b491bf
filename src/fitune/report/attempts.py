"""Attempts that ran out of memory: what was predicted, what was measured, what was tried in their place."""

from fitune.errors import Shortage
from fitune.spec.reports import Retry
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


def begins(retry: Retry) -> str:
    return f"goes on from step {retry.after_step}" if retry.after_step else "begins anew"
