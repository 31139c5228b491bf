"""Loss before and after an adapter was folded into its base."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLoss:
    """Mean loss per supervised token, in nats, of the trained model and of the merged one on the same rows."""

    trained: float
    """The adapter on the base that it was trained on, packed if that was."""
    merged: float
    rows: int
    held_out: bool
    """False: nothing was held out, and these are the first training rows."""
    packed_base: bool

    def describe(self) -> str:
        """Both losses in one sentence."""
        kind = "held-out rows" if self.held_out else "training rows (none are held out)"
        base = "its packed base" if self.packed_base else "its base"
        return (
            f"loss over {self.rows:,} {kind}: {self.trained:.4f} trained (the adapter on {base}), "
            f"{self.merged:.4f} merged"
        )

    def lines(self) -> tuple[str, ...]:
        """Both sentences for people."""
        return tuple(filter(None, (self.describe(), self.alternative())))

    def alternative(self) -> str:
        """Advice on what to serve instead, empty where the base was not packed."""
        if not self.packed_base:
            return ""
        return (
            "a merge has the base as it is on disk, which the adapter was not trained on; to serve exactly what was "
            "trained, load the adapter on the base packed in the same way"
        )
