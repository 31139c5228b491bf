"""The plan of answering a dataset: engine, devices, rows at once; and the questions, as far as a plan needs them."""

from dataclasses import dataclass
from typing import Literal

from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Precision

EngineName = Literal["transformers", "server", "vllm"]
PlannedEngine = Literal["transformers", "vllm"]
"""Engines whose memory and speed are known before they run; a server has its own."""

NARROW = 512
"""Hidden size up to which a second thread of a processor brings nothing when tokens are written one by one."""

CACHE_ROOM = 32
"""Columns that the transformers engine adds to its keys and values together, each time by copying what is there."""


ROWS_AT_ONCE = 32
"""Rows that are answered together where nobody says how many, if as many fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Size of an adapter: elements of all its tensors; ``on_mlp``: it adapts inputs of the MLP."""

    elements: int = 0
    on_mlp: bool = False


NO_ADAPTER = Adapter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Rows to be answered, in tokens. ``new_tokens``: of one answer at most."""

    rows: int
    prompt_tokens: int
    """Prompt tokens of all rows together."""
    longest_prompt: int
    new_tokens: int
    guess: str = ""
    """Way in which tokens were estimated; empty when every prompt was encoded."""

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt on average."""
        return self.prompt_tokens / max(1, self.rows)

    @property
    def most_new_tokens(self) -> int:
        """Tokens of all answers, if each is as long as it may be."""
        return self.rows * self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Everything that decides bytes and seconds of answering. ``devices`` of one node share the weights."""

    engine: PlannedEngine
    model: ModelSpec
    hardware: Hardware
    precision: Precision
    batch_size: int
    devices: int = 1
    adapter: Adapter = NO_ADAPTER


def answering_precision(hardware: Hardware) -> Precision:
    """fp32 on a CPU; on a GPU bf16, or fp16 where there is none (before Ampere)."""
    gpu = hardware.gpu
    if gpu.is_cpu:
        return Precision.FP32
    return Precision.BF16 if gpu.has_flash_attention else Precision.FP16
