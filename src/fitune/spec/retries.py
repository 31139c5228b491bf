"""An attempt that ran out of memory, and what was tried in its place."""

from dataclasses import dataclass

from fitune.errors import Shortage


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """One more attempt of the same run, under a plan that takes less."""

    attempt: int
    """The one that failed, counted from 1 in one start of the program."""
    reason: str
    shortage: Shortage
    before: str
    """The plan that ran out of memory, in words."""
    after: str
    """The plan in its place."""
    predicted_bytes: int
    """Peak of tensors of the plan that failed, for the largest batch it allows."""
    predicted_after_bytes: int
    after_step: int
    """The step that the next attempt begins behind; 0 is the start."""
