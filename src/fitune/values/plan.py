"""The Plan: everything decided, nothing "auto".

A Recipe says what the user wants and may leave things open; a Plan has no opening left. ``train``
executes it, ``rehearse`` traces it, the estimate prices it. A choice carries its own settings, so a
union of small types stands where other programs keep flags that contradict each other. What is trained
(choices.py) and how its states are divided have a file of their own; this module is the door to all of them.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import PurePath
from typing import Literal

from fitune.values.choices import (
    AdamW,
    AdamW8bit,
    AfterBackward,
    Backend,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Full,
    InBackward,
    Lomo,
    Lora,
    Offload,
    Optimizer,
    Place,
    Sgd,
    Sharding,
    Single,
    Tuning,
    Zero,
    clip_in_backward,
    trains_embeddings,
    trains_every_weight,
    trains_head,
    updates_in_backward,
)
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.quantisers import Dense, Hqq, Nf4, Quantiser

__all__ = [
    "AdamW", "AdamW8bit", "AfterBackward", "Attention", "Backend", "Batch", "ChunkedLoss", "ClipByNorm",
    "ClipByValue", "DataPlan", "DataSource", "Ddp", "Dense", "Epochs", "Fraction", "Full", "Hqq", "InBackward",
    "Kernels", "Lomo", "Lora", "Loss", "Nf4", "Offload", "Optimizer", "Place", "PlainLoss", "Plan", "Precision",
    "Quantiser", "Recompute", "RunPlan", "Schedule", "Sgd", "Sharding", "Single", "Steps", "Tuning", "Zero",
    "base_of", "clip_in_backward", "trains_embeddings", "trains_every_weight", "trains_head", "updates_in_backward",
]  # fmt: skip


class Precision(StrEnum):
    """Number formats of weights, gradients and optimizer states.

    ``BF16`` and ``FP32`` keep all of them in that one type. ``BF16_MASTER`` and ``FP16`` compute in
    16 bit and let the optimizer work on an fp32 copy of the trained weights; ``FP16`` also scales the loss.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_MASTER = "bf16-master"
    FP16 = "fp16"

    @property
    def compute_bytes(self) -> int:
        """Bytes of one weight, gradient or activation element."""
        return 4 if self is Precision.FP32 else 2

    @property
    def has_master(self) -> bool:
        """True if an fp32 copy of the trained weights is kept."""
        return self in (Precision.BF16_MASTER, Precision.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The first ``blocks`` decoder blocks keep only their input and run again in backward.

    The first ones, because backward reaches them last, when the others' activations are gone.
    """

    blocks: int


Attention = Literal["flash", "sdpa", "eager"]

Kernels = Literal["torch", "liger"]
"""Norms, gated MLP, rotary positions and loss as torch's small operations, or as Liger's and one of ours on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoss:
    """All logits at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """Head and cross-entropy over ``chunk_tokens`` tokens at a time: the logits never exist whole."""

    chunk_tokens: int


Loss = PlainLoss | ChunkedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes that make steps of samples.

    A micro-batch is one flat stream of tokens without padding: ``micro_batch_size`` rows, or packs of
    rows when ``packing``, each at most ``seq_len`` tokens; rows never attend to one another.
    """

    micro_batch_size: int
    accumulation: int
    seq_len: int
    packing: bool
    example_rows: int = 1
    """Rows that one example of the data becomes and that one micro-batch holds: what a batch counts without packing."""
    mean_row_tokens: int = 0
    """Tokens of an average row, for which speeds are predicted; 0: not known, and every row counts as full."""

    @property
    def usual_row_tokens(self) -> int:
        """Tokens of the rows that speeds are of: average ones, or full ones."""
        return self.mean_row_tokens or self.seq_len

    @property
    def unit(self) -> str:
        """Word for what a batch counts."""
        return "pack" if self.packing else "row" if self.example_rows == 1 else "example"

    @property
    def full_rows(self) -> tuple[int, ...]:
        """Lengths of the rows (or packs) of the largest micro-batch."""
        return (self.seq_len,) * (self.micro_batch_size * self.example_rows)

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens one forward pass sees."""
        return self.micro_batch_size * self.example_rows * self.seq_len

    @property
    def most_labels(self) -> int:
        """Every token of them but the first of each row (or pack) is predicted."""
        return self.micro_batch_tokens - len(self.full_rows)

    @property
    def global_batch_size(self) -> int:
        """Units per optimizer step on one process."""
        return self.micro_batch_size * self.accumulation

    def of_units(self, units: int) -> "Batch":
        """This batch with the micro-batches that a step really has where one process sees so many ``units`` in all."""
        return replace(self, accumulation=min(self.accumulation, -(-units // self.micro_batch_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """A length of training in epochs."""

    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A number of optimizer steps."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fraction:
    """A share of all steps (warm-up ratio)."""

    of: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the run: linear warm-up, then ``kind`` down to ``min_ratio`` of it (or flat)."""

    learning_rate: float
    kind: Literal["constant", "linear", "cosine"]
    warmup: Steps | Fraction
    duration: Epochs | Steps
    max_grad_norm: float
    """0 turns clipping off."""
    min_ratio: float = 0.0
    """Share of ``learning_rate`` that the decay ends at."""


DataFormat = Literal[
    "auto", "alpaca", "messages", "sharegpt", "prompt_completion", "question_answer", "dialogue_summary", "text",
    "columns",
]  # fmt: skip
"""data/conversations/formats.py says what each looks like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One file, folder, URL or Hub dataset and how to read it.

    ``format`` is ``auto`` only until the data is opened: the ledger records what was found.
    ``columns`` maps a role (system, prompt, completion, text) to the name of a column.
    ``sample`` 0 means every row. ``allow_https`` and ``allow_private_addresses`` say which addresses may be opened.
    """

    path: str
    format: DataFormat = "auto"
    split: str = "train"
    columns: tuple[tuple[str, str], ...] = ()
    sample: int = 0
    weight: float = 1.0
    allow_https: bool = False
    allow_private_addresses: bool = False
    streaming: bool = False
    """A dataset of the Hub is read over the network, row by row, and never downloaded as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Rows to train on, rows held out, and what happens to rows that do not fit."""

    sources: tuple[DataSource, ...] = ()
    eval_sources: tuple[DataSource, ...] = ()
    val_fraction: float = 0.0
    """Share of the rows that are held out; from 2 on the number of them."""
    chat_template: str = ""
    """Path of a Jinja file, its text, or a name of named_templates.py; empty: the tokenizer's own, or fitune's plain
    one when it has none."""
    chat_template_date: str = ""
    """Date that the template writes, as 2026-01-31; empty: 26 July 2024, whatever day it is."""
    train_on_prompt: bool = False
    train_on_empty_thinking: bool = False
    on_bad_row: Literal["error", "skip"] = "error"
    on_long_row: Literal["truncate", "drop", "split", "error"] = "truncate"
    cache_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Place of the run in the trackers of ``report_to``; empty: as the tracker's own environment variables say."""

    run_name: str = ""
    """Empty: the name of output_dir."""
    project: str = ""
    """Project of wandb and Comet, experiment of MLflow."""
    team: str = ""
    """Entity of wandb, workspace of Comet."""
    server: str = ""
    """Tracking URI of MLflow."""
    run_id: str = ""
    """A run there to go on with; empty: a new one."""
    offline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Directory of the run and what it writes. 0 means never for the ``every`` and ``per_epoch`` settings."""

    output_dir: str
    upload_to: str = ""
    """URL of a folder in a store that is sent what ``output_dir`` holds; empty for none."""
    seed: int = 42
    log_every: int = 1
    eval_every: int = 0
    evals_per_epoch: int = 0
    save_every: int = 0
    saves_per_epoch: int = 0
    keep_checkpoints: int = 2
    async_save: bool = False
    """True if a checkpoint is copied to the host between two steps and written while the next ones run."""
    export: Literal["adapter", "merged", "full"] = "adapter"
    push_to_hub: str = ""
    """Repository on the Hub that is sent the export; empty for none."""
    hub_public: bool = False
    report_to: tuple[str, ...] = ()
    tracking: Tracking = field(default_factory=Tracking)
    samples: int = 4
    """Held-out prompts answered before and after training, for the report."""

    @property
    def name(self) -> str:
        """Name of the run for people."""
        return self.tracking.run_name or PurePath(self.output_dir).name

    @property
    def saves(self) -> bool:
        """True if checkpoints are kept on the way."""
        return self.save_every > 0 or self.saves_per_epoch > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One exact way of training, ready to run."""

    model: ModelSpec
    model_path: str
    hardware: Hardware
    tuning: Tuning
    precision: Precision
    optimizer: Optimizer
    sharding: Sharding
    offload: Offload = field(default_factory=Offload)
    recompute: Recompute
    attention: Attention
    kernels: Kernels = "torch"
    compile_blocks: bool = False
    """True if torch compiles each decoder block."""
    tf32: bool = False
    """True if products of fp32 numbers take 10 bits of their mantissas (TensorFloat-32)."""
    loss: Loss
    batch: Batch
    schedule: Schedule
    data: DataPlan = field(default_factory=DataPlan)
    run: RunPlan
    added_tokens: tuple[str, ...] = ()
    """Tokens that the tokenizer learns; ``model.vocab_size`` counts their rows."""

    @property
    def goes_back_twice(self) -> bool:
        """True if gradients are used in backward and a first backward only measures, to clip by norm or to see whether
        fp16 overflows."""
        clip = clip_in_backward(self.tuning)
        if clip is None:
            return False
        return self.precision is Precision.FP16 or (isinstance(clip, ClipByNorm) and clip.max_norm > 0)

    @property
    def tokens_per_step(self) -> int:
        """The most tokens one optimizer step sees on all devices."""
        return self.batch.micro_batch_tokens * self.batch.accumulation * self.hardware.num_gpus


def base_of(plan: Plan) -> Dense | Quantiser:
    """Quantiser of the frozen base; Dense() where every weight is trained."""
    return plan.tuning.base if isinstance(plan.tuning, Lora) else Dense()
