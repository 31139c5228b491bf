"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2)."""


class LossScale:
    """Halves when gradients overflow, doubles after ``growth_interval`` clean steps."""

    def __init__(self, *, value: float = 2.0**16, growth_interval: int = 1000, minimum: float = 1.0) -> None:
        self.value = value
        self.growth_interval = growth_interval
        self.minimum = minimum
        self.clean_steps = 0

    def update(self, *, overflowed: bool) -> None:
        if overflowed:
            self.value = max(self.minimum, self.value / 2)
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps >= self.growth_interval:
            self.value *= 2
            self.clean_steps = 0

    def facts(self) -> dict[str, float]:
        return {"loss_scale": self.value, "clean_steps": self.clean_steps}

    def restore(self, facts: dict[str, float]) -> None:
        self.value = facts["loss_scale"]
        self.clean_steps = int(facts["clean_steps"])
