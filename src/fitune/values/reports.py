"""Measurements of steps, runs and scores, in the words of the predictions so that both can be laid side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fitune.errors import Shortage
from fitune.values.predictions import Phase, ShownInNotebooks


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The ranks of a run were lost, all or some of them, and others went on."""

    cause: str
    workers_before: int
    workers: int
    after_step: int
    """The step that the new ranks began behind; 0 is the start."""
    lost_steps: int
    """Steps done after it by the former ranks, and done again."""
    lost_at: float
    """``time.time`` at the last sign of life of the former ranks."""
    repeated_seconds: float
    """Seconds that the lost steps took."""
    again_at: float = 0.0
    """``time.time`` when the new ranks began their first step; 0 before that."""

    @property
    def lost_seconds(self) -> float:
        """Time without a step, and that of the steps that were done twice."""
        return self.repeated_seconds + max(0.0, self.again_at - self.lost_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. The log line, metrics.jsonl and every tracker are made of this."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    """Mean negative log-likelihood per supervised token of the global batch, in nats."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    supervised_tokens: int
    step_seconds: float
    """Without the wait for data."""
    data_seconds: float
    tokens_per_second: float
    """tokens / step_seconds."""
    mfu: float
    """Model FLOPs utilisation: values/counts.py says what is counted. 0 when the device's peak is not known."""
    loss_scale: float = 1.0
    skipped: bool = False
    """True when fp16 gradients overflowed and no update was made."""
    waiting_seconds: float | None = None
    """Part of step_seconds in which this rank waited in collectives; None for one process, and on GPUs, where the
    device waits."""
    memory_bytes: dict[Phase, int] = field(default_factory=dict)
    """Measured peaks of this step; empty when the step was not measured."""
    jumped_rows: tuple[int, ...] = ()
    """Rows of a step whose loss lies far above the last ones, counted from 0 in the kept rows; empty in all others."""
    eval_loss: float | None = None
    """Set on the steps after which the held-out rows were evaluated."""
    eval_loss_before: float | None = None
    """Set on step 1: the loss on the held-out rows before it."""
    retries: tuple[Retry, ...] = ()
    """On the first step of an attempt that follows one out of memory: how it came to that."""
    restarts: tuple[Restart, ...] = ()
    """On the first step of ranks that were started in the place of lost ones."""


MeterKind = Literal["live tensors", "cuda allocated"]


def settled_steps(steps: Sequence[StepReport], *, kind: MeterKind | None) -> Sequence[StepReport]:
    """The steps nobody disturbed, which speed is taken over; all of them when no other is left.

    Not the first, which warms up, nor those whose live tensors were counted one by one: CUDA's own counter
    (``kind``) costs nothing.
    """
    counting_slows = kind != "cuda allocated"
    return [step for step in steps[1:] if not (counting_slows and step.memory_bytes)] or steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Peaks by phase over the measured steps."""

    kind: MeterKind
    phases: dict[Phase, int]
    process_bytes: int
    """Largest resident set of the process (CPU) or reserved bytes (CUDA)."""
    expandable_segments: bool | None = None
    """CUDA: False where torch used a GPU before fitune could set it, or the user's own setting is without them. Then
    more is reserved than plans count on. None on a CPU."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase; 0 where none was measured."""
        return max(self.phases.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Figures of one process of several, over its measured steps."""

    rank: int
    memory: dict[Phase, int]
    """Peaks."""
    step_seconds: float
    """Mean, without the first."""
    waiting_seconds: float | None = None
    """Part of step_seconds in collectives: for the bytes and for the ranks that come later. None on GPUs."""
    busiest_step: int = 0
    """The step, of the same ones, in which this rank was busy longest."""
    busiest_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float | None:
        """Mean of a step outside of collectives."""
        return None if self.waiting_seconds is None else self.step_seconds - self.waiting_seconds

    @property
    def peak_bytes(self) -> int:
        """Bytes at the largest of the measured moments; 0 where none was measured."""
        return max(self.memory.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of every row and token of one dataset: read, kept, cut, dropped."""

    rows_read: int
    rows_kept: int
    dropped: dict[str, int]
    """Reason -> rows."""
    rows_cut: int
    tokens_read: int
    tokens_cut: int
    tokens_kept: int
    tokens_supervised: int
    longest_row: int
    formats: tuple[str, ...]
    """Format that each source was read as."""
    packs: int = 0
    """Packs the kept rows were put into; 0 without packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One held-out prompt answered before and after training."""

    prompt: str
    expected: str
    before: str
    after: str


Status = Literal["complete", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended a run before its time, and where it was then."""

    error: str
    """Name of the error, as in ``errors``: TrainingFailed, OutOfMemory, CheckpointError, …"""
    doing: str
    """A phase of the step (forward, loss, backward, update), or what was done between two: saving, evaluating, …"""
    step: int
    """Counted from 1; 0 before the first."""
    shortage: Shortage | None = None
    """Only of memory that ran out."""


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

    def lines(self) -> tuple[str, ...]:
        """Both losses in one sentence; where the base was packed, what to serve instead in another."""
        kind = "held-out rows" if self.held_out else "training rows (none are held out)"
        base = "its packed base" if self.packed_base else "its base"
        losses = (
            f"loss over {self.rows:,} {kind}: {self.trained:.4f} trained (the adapter on {base}), "
            f"{self.merged:.4f} merged"
        )
        advice = (
            "a merge has the base as it is on disk, which the adapter was not trained on; to serve exactly what was "
            "trained, load the adapter on the base packed in the same way"
        )
        return (losses, advice) if self.packed_base else (losses,)


AFTER_TRAINING = ("exporting", "answering samples")
"""Stages of a run after its last step."""
STOPPED_IN_EXPORT = "it was stopped during its export"
"""Reason of the report that is written before the export, true once the run's process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport(ShownInNotebooks):
    """Result of a run; written even when it ended badly."""

    status: Status
    reason: str
    steps: int
    total_steps: int
    first_loss: float
    final_loss: float
    best_eval_loss: float | None
    """Before training is not among them."""
    seconds: float
    tokens: int
    supervised_tokens: int
    tokens_per_second: float
    tokens_per_second_with_data: float
    mfu: float
    memory: MeasuredMemory | None
    train_data: Ledger
    eval_data: Ledger | None
    trainable_parameters: int
    total_parameters: int
    samples: tuple[Sample, ...] = ()
    exported: str = ""
    failure: Failure | None = None
    """Only when the status is failed."""
    merged_loss: MergedLoss | None = None
    """Losses of an export that was merged; None where there is none, or it could not be measured."""
    retries: tuple[Retry, ...] = ()
    """Attempts that ran out of memory before this end, in their order."""
    restarts: tuple[Restart, ...] = ()
    """Each time that lost ranks were replaced, in their order."""
    steps_of_other_plan: int = 0
    """Done before a resume under other settings: memory and speed are of the steps after them."""
    ranks: tuple[RankReport, ...] = ()
    """One for each of several processes; empty where one trained alone, and where the run was cut short."""
    versions: dict[str, str] = field(default_factory=dict)
    eval_loss_before: float | None = None
    """On the held-out rows, in nats per supervised token; None without such rows."""
    eval_loss: float | None = None
    """The last one on the held-out rows."""
    contents: tuple[str, ...] = ()
    """A hash of every source of the data, those for evaluation last; empty in reports of before."""

    @property
    def lacks_export(self) -> bool:
        """True if the last step is done and what came after it failed."""
        if self.status == "complete" or not 0 < self.steps == self.total_steps:
            return False
        return bool(self.exported) or (self.failure is not None and self.failure.doing in AFTER_TRAINING)


Scale = Literal["share", "points", "nats", "perplexity", "value"]
"""Kind of a grader's mean: a share of 1, points of a judge, nats of a row, a perplexity (lower is better), a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReport(ShownInNotebooks):
    """Grades of a model's answers to a dataset."""

    model: str
    adapter: str
    data: str
    rows: int
    answered: int
    failed: int
    grades: dict[str, float]
    """Grader -> mean, on its scale."""
    seconds: float
    generated_tokens: int
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Grader -> ends of the 95 % interval of the mean."""
    cut_off: int = 0
    """Answers that reached max_new_tokens and did not end by themselves."""
    scales: dict[str, Scale] = field(default_factory=dict)
    """Grader -> scale of its mean; a share where it is not named."""
    measures: dict[str, str] = field(default_factory=dict)
    """Grader -> its mean in words."""
    ungraded: dict[str, int] = field(default_factory=dict)
    """Grader -> rows that are not in its mean."""
    grader_errors: dict[str, int] = field(default_factory=dict)
    """Grader -> rows for which the grader itself failed."""
    weighed_tokens: int = 0
    """Tokens of given answers, where their log-likelihoods were computed and none were written."""
    prompt_tokens: int = 0
    rows_asked: int = 0
    """In ``seconds``: a scoring that was stopped asks in its last start only what was missing."""
    measured_bytes: int = 0
    """Peak of tensors over the watched passes of each shard's first batch; 0 where none was watched."""
    predicted_bytes: int = 0
    """Peak of the same passes, predicted from their rows and widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScore:
    """Two scorings of the same rows by one grader: ``difference`` is this one minus the other, with its interval."""

    grader: str
    rows: int
    mean: float
    other: float
    difference: float
    low: float
    high: float
    better: int
    """Rows that this scoring grades better."""
    worse: int
    p_value: float | None
    """McNemar's exact test, two-sided; None where grades are not all 0 or 1."""
    scale: Scale = "share"
