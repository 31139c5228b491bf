"""The state of a run while it goes on, and what its caller is told and asked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.commit import Descent
from fitune.data.conversations.messages import Conversation
from fitune.data.ledger import Watch, ignore_reading
from fitune.data.loader import Loader, LoaderState
from fitune.data.making import PreparedData
from fitune.engine.ranks import Ranks
from fitune.measure.communication import Waits
from fitune.measure.memory import CpuMeter, MemoryMeter
from fitune.models.language_model import LanguageModel
from fitune.models.weight_files import OnBytes, nobody
from fitune.track.metrics import MetricsLog, Sink
from fitune.train.evaluate import Answer
from fitune.train.failure import Whereabouts
from fitune.train.prepare import Prepared
from fitune.train.uploading import Uploads
from fitune.values.plan import Plan
from fitune.values.reports import RankReport, Restart, Retry, StepReport
from fitune.values.schedule import is_due


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Functions by which the caller is told and asked while the run goes on."""

    on_data: Callable[[PreparedData, Loader, int], None]
    """Once the data is read and before the model is: what every batch will hold is known from here on. The number is
    of the steps that were done under another plan, before a resume."""
    on_note: Callable[[str], None]
    """A line for people: what is being done, a checkpoint that was passed over."""
    stop_asked: Callable[[], bool]
    """Asked after every step and before each batch of an evaluation that follows one; True saves and ends the run as
    interrupted. The evaluation is made by the run that goes on."""
    answer: Answer
    """Answers held-out prompts with the model as it is, for the samples before and after."""
    on_bytes: OnBytes = nobody
    """While weights are read: bytes so far and in all."""
    on_reading: Watch = ignore_reading
    """While data is read and tokenised, several times a second. May raise KeyboardInterrupt: there is no step yet that
    could be finished first, and nothing is left half-made."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run while it goes on: what its parts share."""

    plan: Plan
    callbacks: Callbacks
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    loader: Loader
    log: MetricsLog | None
    """The first rank's; the others write none."""
    sinks: Sequence[Sink]
    base: str
    """Identity of the frozen weights as they were loaded; empty where all are trained."""
    descent: Descent
    """The checkpoints that this attempt comes from, its own too."""
    began: float
    """``time.perf_counter`` when the run was asked for, earlier by the time of its steps before a resume."""
    steps_of_other_plan: int = 0
    """Done before a resume that changed what memory and speed depend on: they are not measured for this one."""
    uploads: Uploads | None = None
    """Sends checkpoints to the run's store, where it has one; the first rank's."""
    retries: tuple[Retry, ...] = ()
    """Attempts before this one that ran out of memory and that no step in the log tells of yet."""
    restarts: tuple[Restart, ...] = ()
    """Why these ranks are not the first of this run, until their first step tells of it."""
    where: Whereabouts = field(default_factory=Whereabouts)
    prepared: Prepared | None = None
    """None until the model is loaded."""
    meter: MemoryMeter = field(default_factory=CpuMeter)
    waits: Waits | None = None
    position: LoaderState = field(default_factory=lambda: LoaderState(epoch=0, position=0))
    is_trained: bool = False
    """The last step is done."""
    exported: str = ""
    """Folder in which the export is saved and verified; empty until then."""
    kept: str = ""
    """Folder from which an export that failed can be done again; empty until then, and where nothing holds it."""
    done: list[StepReport] = field(default_factory=list)
    """Steps of this process, where several train together."""
    rows: tuple[RankReport, ...] = ()
    """Reports of all of them, once the last step is done or the run was asked to stop."""
    best_eval_loss: float = math.inf
    """The lowest of all evaluations, those before a resume too."""

    @property
    def directory(self) -> Path:
        """The output directory, where everything of the run lies."""
        return Path(self.plan.run.output_dir)

    @property
    def model(self) -> LanguageModel:
        """The model that trains, once it is loaded."""
        return self.loaded.model

    @property
    def loaded(self) -> Prepared:
        """The prepared parts, model included; AssertionError before they are there."""
        assert self.prepared is not None, "the model is loaded before anything asks for it"
        return self.prepared

    @property
    def samples(self) -> Sequence[Conversation]:
        """The held-out conversations that are answered before and after training; none by several processes, where a
        word would be gathered from all of them at a time."""
        return self.data.eval_examples[: self.plan.run.samples] if self.ranks.is_alone else ()

    def is_due(self, report: StepReport, *, every: int, per_epoch: int) -> bool:
        """True if what happens ``every`` steps, or so often an epoch, is due after the step of ``report``."""
        steps = self.loader.steps_per_epoch
        return is_due(report.step, every=every, per_epoch=per_epoch, steps_per_epoch=steps)
