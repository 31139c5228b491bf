"""Plans that are run to see what they take, of ``fitune doctor --prove`` and of bench/: shapes, random models, rows.

Plans are written down here and models are random, drawn where they are trained: no data and no files are needed.
"""

import importlib.util
import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fitune.models.readers import config_from, empty_model, model_config, with_layers
from fitune.models.weights import compute_dtype
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_config import spec_from_config
from fitune.spec.model.traits import flash_refused
from fitune.spec.plan import (
    AdamW,
    AdamW8bit,
    Batch,
    ChunkedLoss,
    ClipByValue,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Offload,
    Optimizer,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Sgd,
    Single,
    Steps,
    Tuning,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's widths and how many of its blocks, and how its rows are packed."""

    model: str
    """A model of the built-in table; empty: a Llama of width 128."""
    layers: int
    seq_len: int
    chunk_tokens: int


SHAPES = {
    "tiny": Shape(model="", layers=4, seq_len=128, chunk_tokens=64),
    "8b-4": Shape(model="llama-3.1-8b", layers=4, seq_len=2048, chunk_tokens=1024),
    "1b": Shape(model="llama-3.2-1b", layers=16, seq_len=2048, chunk_tokens=1024),
    "8b": Shape(model="llama-3.1-8b", layers=32, seq_len=4096, chunk_tokens=1024),
    "moe": Shape(model="qwen3-30b-a3b", layers=48, seq_len=2048, chunk_tokens=1024),
    "gemma": Shape(model="gemma-2-9b", layers=42, seq_len=2048, chunk_tokens=512),
}
_TINY = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 2000, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train; ``needs`` is the library that it cannot do without."""

    tuning: str
    precision: Precision = Precision.BF16
    optimizer: Optimizer = field(default_factory=AdamW)
    offload: Offload = field(default_factory=Offload)
    base: Nf4 | Hqq | None = None
    dora: bool = False
    needs: str = ""

    @property
    def missing(self) -> bool:
        """True if its library is not installed."""
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


CASES = {
    "lora": Case(tuning="lora", precision=Precision.BF16_MASTER),
    "qlora": Case(tuning="lora", precision=Precision.BF16_MASTER, base=Nf4(), needs="bitsandbytes"),
    "hqq": Case(tuning="lora", precision=Precision.BF16_MASTER, base=Hqq(bits=4), needs="hqq"),
    "dora": Case(tuning="lora", precision=Precision.BF16_MASTER, dora=True),
    "full": Case(tuning="full"),
    "full-8bit": Case(tuning="full", optimizer=AdamW8bit(), needs="bitsandbytes"),
    "full-8bit-in-backward": Case(tuning="in backward", optimizer=AdamW8bit(), needs="bitsandbytes"),
    "lomo": Case(tuning="lomo", optimizer=Sgd()),
    "adalomo": Case(tuning="adalomo", optimizer=Sgd()),
    "full-optimizer-away": Case(tuning="full", offload=Offload(optimizer="cpu")),
    "lora-activations-away": Case(tuning="lora", offload=Offload(activations="cpu")),
    "lora-weights-away": Case(tuning="lora", offload=Offload(parameters="cpu")),
}


def config_of(shape: Shape) -> PretrainedConfig:
    """The model's own config cut to the shape's layers, or that of a tiny Llama where no model is named."""
    if shape.model:
        return with_layers(model_config(shape.model), shape.layers)
    return config_from({"model_type": "llama", "num_hidden_layers": shape.layers, **_TINY})


def plan_of(
    case: Case, shape: Shape, *, hardware: Hardware, rows: int, recompute: int = 0, max_grad_norm: float = 1.0
) -> Plan:
    """A plan for one device: micro-batches of ``rows`` rows of the shape's tokens, ``recompute`` blocks recomputed."""
    model = spec_from_config(config_of(shape).to_dict(), name=shape.model or "bench/tiny")
    return Plan(
        model=model,
        model_path=model.name,
        hardware=hardware,
        tuning=_tuning(case, model.adaptable_names),
        precision=case.precision,
        optimizer=case.optimizer,
        sharding=Single(),
        offload=case.offload,
        recompute=Recompute(blocks=recompute),
        attention="sdpa" if flash_refused(model, hardware.gpu, case.precision) else "flash",
        loss=ChunkedLoss(chunk_tokens=shape.chunk_tokens),
        batch=Batch(micro_batch_size=rows, accumulation=1, seq_len=shape.seq_len, packing=False),
        schedule=Schedule(
            learning_rate=1e-5, kind="constant", warmup=Steps(count=0), duration=Steps(count=1000),
            max_grad_norm=max_grad_norm,
        ),
        run=RunPlan(output_dir="runs/bench"),
    )  # fmt: skip


def _tuning(case: Case, targets: tuple[str, ...]) -> Tuning:
    match case.tuning:
        case "full":
            return Full()
        case "in backward":
            return Full(update=InBackward(clip=ClipByValue(value=1.0)))
        case "lomo" | "adalomo":
            return Lomo(adaptive=case.tuning == "adalomo", clip=ClipByValue(value=1.0))
    lora = Lora(rank=16, alpha=32, dropout=0.0, targets=targets, dora=case.dora)
    return lora if case.base is None else replace(lora, base=case.base)


def random_model(plan: Plan, config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Weights drawn where they are trained: no file, no download, no second copy on the host."""
    on = torch.device("cpu") if plan.offload.parameters == "cpu" else device
    torch.manual_seed(0)
    with on:
        return empty_model(config, compute_dtype(plan.precision))


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch of random tokens; the first token of each row is its prompt."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]

    @property
    def supervised_tokens(self) -> int:
        """Tokens with a label."""
        return int((self.labels_T >= 0).sum())


def random_rows(lengths: tuple[int, ...], *, vocab_size: int) -> Rows:
    """Rows of ``lengths`` tokens end to end, each tensor of shape (tokens,); labels are the next tokens of the row."""
    ids = torch.randint(0, vocab_size, (sum(lengths),))
    labels = ids.roll(-1)
    ends = list(itertools.accumulate(lengths))
    labels[[end - 1 for end in ends]] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Rows(ids, labels, positions, lengths)


def full_rows(plan: Plan) -> Rows:
    """Rows of the plan's length in one stream, every token but the first of each supervised: the most it allows."""
    torch.manual_seed(1)  # the same rows for every side, whatever drew numbers before
    return random_rows((plan.batch.seq_len,) * plan.batch.micro_batch_size, vocab_size=plan.model.vocab_size)


def synchronise(device: torch.device) -> None:
    """Waits until a GPU has done its work; nothing to wait for on the processor."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
