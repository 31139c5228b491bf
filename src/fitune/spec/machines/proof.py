"""A Proof: what ``fitune doctor --prove`` saw on one card, and what all proofs of a kind of card say together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from fitune.spec.machines.hardware import Measured

MOST_MEMORY_ERROR = 0.03
"""Share of its prediction by which a measured peak may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCheck:
    """One comparison: its figures, and whether they are within the tolerance."""

    name: str
    passed: bool | None
    """None: it could not run, or its figures are told and not judged."""
    figures: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """The fault, or the reason why it did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedPlan:
    """One plan's step on the card, beside its prediction; ``fitune records check`` reads it as a row."""

    id: str
    predicted: int
    """Peak bytes of tensors."""
    measured: int
    reserved_predicted: int
    """Bytes of the device in all: tensors, the allocator's slack, libraries."""
    reserved: int
    """What torch's allocator reserved, and the driver's context; 0 on a processor."""
    predicted_s: float
    """Seconds of a step."""
    measured_s: float
    tokens: int
    """Tokens of a step."""

    @property
    def passed(self) -> bool:
        """True if memory is as predicted; speed is told and not judged."""
        return abs(self.measured / self.predicted - 1) <= MOST_MEMORY_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All checks of one card on one day."""

    device: str
    """The name that calibrations of its kind have too."""
    card: str
    """A digest of the card's own number: two proofs of one card count once."""
    date: str
    """YYYY-MM-DDThh:mm:ss."""
    gpu: str
    """The name that the driver gives."""
    capability: tuple[int, int]
    memory_bytes: int
    versions: dict[str, str]
    checks: tuple[ProofCheck, ...]
    rows: tuple[ProvedPlan, ...]

    @property
    def failed(self) -> tuple[ProofCheck | ProvedPlan, ...]:
        """Checks and plans that did not come out as they should."""
        everything: tuple[ProofCheck | ProvedPlan, ...] = (*self.checks, *self.rows)
        return tuple(one for one in everything if one.passed is False)


def measured_by(proofs: Sequence[Proof]) -> Measured | None:
    """What the newest proof of each card measured of its plans; None where no plan was measured.

    Memory is the largest |measured / predicted − 1| of all plans, speed the median of measured / predicted − 1.
    """
    newest = {proof.card: proof for proof in sorted(proofs, key=lambda proof: proof.date) if proof.rows}
    rows = [row for proof in newest.values() for row in proof.rows]
    if not rows:
        return None
    return Measured(
        cards=len(newest),
        memory_error=max(abs(row.measured / row.predicted - 1) for row in rows),
        speed_error=median(row.predicted_s / row.measured_s for row in rows) - 1,
    )
