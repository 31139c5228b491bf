"""TrainState: all that a run needs to go on as if it had never stopped."""

from dataclasses import dataclass

from torch import Tensor

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """What is saved after ``step`` optimizer steps.

    ``tensors`` are groups of named tensors, one file each: "model" (the trained parameters), "optimizer"
    ("exp_avg/<parameter>"), "rng" (generator states as bytes). ``facts`` is everything that is no tensor:
    the plan, the position in the data, the loss scale, the best evaluation loss.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Json]
    log: bytes = b""
    """metrics.jsonl up to this step: a log that is lost or changed is put back from here."""
