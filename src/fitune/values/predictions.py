"""Predictions: bytes by phase, seconds of a step, the planner's answer; reports.py holds what is measured."""

from dataclasses import dataclass, field
from enum import StrEnum

from fitune.values.model.block_profile import BatchShape
from fitune.values.plan import Plan


class Phase(StrEnum):
    """The moments of one optimizer step at which memory is compared. Values are peaks within the moment."""

    IDLE = "idle"
    """Between steps: weights and optimizer states."""
    FORWARD = "forward"
    """Embedding and blocks, until the last hidden state."""
    LOSS = "loss"
    """Head and cross-entropy, forward and backward, down to the gradient of the last hidden state."""
    BACKWARD = "backward"
    """Through the blocks."""
    UPDATE = "update"
    """Clipping and the optimizer."""

    @classmethod
    def _missing_(cls, value: object) -> "Phase | None":
        return cls.IDLE if value == "ready" else None  # as reports of earlier versions call it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes per phase and term, on one device. ``outside`` is what no tensor explains (contexts, workspaces)."""

    phases: dict[Phase, dict[str, int]]
    outside: dict[str, int] = field(default_factory=dict)
    reclaimable: int = 0
    """Bytes that torch's cache holds beyond the peak for streams that share nothing, until memory would run out."""

    @property
    def reserved_bytes(self) -> int:
        """The peak, and the cache that is given back only where a device is full."""
        return self.peak_bytes + self.reclaimable

    @property
    def tensor_peak_bytes(self) -> int:
        """Bytes of tensors in the largest phase."""
        return max(sum(terms.values()) for terms in self.phases.values())

    @property
    def peak_phase(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase, and what is outside of tensors."""
        return self.tensor_peak_bytes + sum(self.outside.values())


WORKSPACE = "cuBLAS workspace"
"""The term of ``outside`` that CUDA's count of allocated bytes has among the tensors."""
SLACK = "allocator slack"
TORCHS_OWN = (WORKSPACE, SLACK)
"""Terms of ``outside`` that torch's allocator holds; the driver's context and NCCL's buffers it does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted seconds of one optimizer step by phase (FORWARD, LOSS, BACKWARD, UPDATE), and what limits each."""

    phases: dict[Phase, float]
    limits: dict[Phase, str]
    """``compute``, ``memory bandwidth``, ``launch``, ``communication``, ``host link``, ``NVMe``, ``CPU optimizer``."""

    @property
    def step_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted bytes and seconds of one Plan."""

    memory: MemoryBreakdown
    usable_bytes: int
    """Device memory that may be filled: total less what the driver and the reserve keep."""
    time: StepTime
    tokens_per_second: float
    """Tokens/s of all devices together."""
    host: dict[str, int] = field(default_factory=dict)
    """Bytes of a node's own memory by term; empty on a CPU."""
    usable_host_bytes: int = 0
    """Bytes of a node's memory; 0 when its size is not known or nothing leaves the device."""
    nvme_bytes: int = 0
    """On each node."""
    usable_nvme_bytes: int = 0
    """Bytes of a node's NVMe; 0 when its size is not known or nothing goes there."""
    checkpoint_bytes: int = 0
    """One checkpoint on disk, over all devices; 0 in estimates made before it was counted."""
    communication_bytes: int = 0
    """Bytes that one device sends in one optimizer step."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of a device at its peak."""
        return self.memory.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """Largest that torch counts as reserved: its cache takes what room there is, the context is not counted."""
        whole = max(self.peak_bytes, min(self.memory.reserved_bytes, self.usable_bytes))
        return whole - sum(size for name, size in self.memory.outside.items() if name not in TORCHS_OWN)

    @property
    def host_bytes(self) -> int:
        """Bytes of a node's host memory."""
        return sum(self.host.values())

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.time.step_seconds

    @property
    def fits(self) -> bool:
        """True if device, host and disk have room."""
        on_host = not self.usable_host_bytes or self.host_bytes <= self.usable_host_bytes
        on_disk = not self.usable_nvme_bytes or self.nvme_bytes <= self.usable_nvme_bytes
        return self.peak_bytes <= self.usable_bytes and on_host and on_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Bytes that the Plan's own step took on fake tensors, on one device."""

    phases: dict[Phase, dict[str, int]]
    """At the worst moment of each phase, bytes by kind: weights, optimizer, batch, gradients, activations, loss,
    temporaries."""
    outside: dict[str, int] = field(default_factory=dict)
    """Bytes that are in no tensor, as the estimate has them: a trace cannot see them."""
    reserved_bytes: int
    """Bytes that torch's caching allocator would reserve for the tensors."""
    layers_traced: int
    """Blocks that were traced; what the others do was repeated."""

    @property
    def tensor_peak_bytes(self) -> int:
        """Bytes of tensors in the largest phase."""
        return max(sum(kinds.values()) for kinds in self.phases.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase, and what is outside of tensors."""
        return self.tensor_peak_bytes + sum(self.outside.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A method that was not taken, and the arithmetic why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One pass over the training data."""

    rows: int
    tokens: int
    longest_row: int
    """Tokens."""
    units: int
    """Rows, or packs where rows are packed: what a batch counts."""
    usual: BatchShape
    """A micro-batch of average size: what a step's time is made of."""
    guess: str = ""
    """Way in which lengths and counts were estimated; empty when every row was counted."""
    bad_rows: dict[str, int] = field(default_factory=dict)
    """Reason -> rows, among those that were read for a guess, that cannot be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """The whole training on its data: without reading data and weights, evaluating, saving and exporting."""

    epoch: Epoch
    steps_per_epoch: int
    steps: int
    warmup_steps: int
    step_seconds: float
    cost: float
    """US dollars; 0 when no price is known."""

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return self.steps * self.step_seconds

    @property
    def epochs(self) -> float:
        """Epochs of the whole run."""
        return self.steps / self.steps_per_epoch


class ShownInNotebooks:
    """A value that a notebook shows in words: the first screen of a plan, the outcome of a run, grades."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        import fitune  # words are made in rooms above this one, and only a notebook asks for them

        return fitune._notebook_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport(ShownInNotebooks):
    """The planner's answer: the plan to run, the next best, what was rejected, what was decided for the user."""

    chosen: Priced
    runners_up: tuple[Priced, ...]
    rejected: tuple[Rejection, ...]
    decisions: tuple[str, ...]
    """One line for each thing the user left open."""
    price_per_gpu_hour: float = 0.0
    """US dollars; 0 when it is not known."""
    run: WholeRun | None = None
    """The run of ``taken``; None where the rows of the data are not known yet."""
    trained: Priced | None = None
    """The plan that training takes where ``chosen`` is only planned; None where it is ``chosen``, or none fits."""

    @property
    def taken(self) -> Priced:
        """The plan that training takes; ``chosen``, which is only planned, where none that is trained fits."""
        return self.trained or self.chosen
