"""Plans that are run to see what they take, of ``fitune doctor --prove`` and of bench/: shapes, random models and rows;
and their steps: peaks by phase and seconds, and losses on one device beside another's.

Plans are written down here and models are random, drawn where they are trained: no data and no files are needed.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fitune.errors import HardwareError
from fitune.estimate.predict import predict
from fitune.measure.measurements import ProofCheck, ProvedPlan
from fitune.measure.memory import memory_meter
from fitune.models.readers import config_from, empty_model, model_config, with_layers
from fitune.models.weights import compute_dtype
from fitune.rehearse.step import RowStream
from fitune.rehearse.trace import BLOCK
from fitune.session.proving.kernels import TOLERANCES, judged
from fitune.train.prepare import Prepared, prepare_loaded, training_device
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.machines.hardware import Hardware, Numbers
from fitune.values.model.model_config import spec_from_config
from fitune.values.model.traits import flash_refused
from fitune.values.plan import (
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
from fitune.values.predictions import Estimate, Phase
from fitune.values.rules import require_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's widths and how many of its blocks, and how its rows are packed."""

    model: str
    """A model of the built-in table; empty: a Llama of width 128."""
    layers: int
    seq_len: int
    chunk_tokens: int


TINY = Shape(model="", layers=4, seq_len=128, chunk_tokens=64)
_TINY = {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 2000, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train; adapters are on all linears of the model's blocks."""

    tuning: Tuning
    precision: Precision = Precision.BF16
    optimizer: Optimizer = field(default_factory=AdamW)
    offload: Offload = field(default_factory=Offload)


ADAPTER = Lora(rank=16, alpha=32, dropout=0.0, targets=())
CLIP = ClipByValue(value=1.0)
CASES = {
    "lora": Case(tuning=ADAPTER, precision=Precision.BF16_MASTER),
    "qlora": Case(tuning=replace(ADAPTER, base=Nf4()), precision=Precision.BF16_MASTER),
    "hqq": Case(tuning=replace(ADAPTER, base=Hqq(bits=4)), precision=Precision.BF16_MASTER),
    "dora": Case(tuning=replace(ADAPTER, dora=True), precision=Precision.BF16_MASTER),
    "full": Case(tuning=Full()),
    "full-8bit-in-backward": Case(tuning=Full(update=InBackward(clip=CLIP)), optimizer=AdamW8bit()),
    "lomo": Case(tuning=Lomo(adaptive=False, clip=CLIP), optimizer=Sgd()),
    "full-optimizer-away": Case(tuning=Full(), offload=Offload(optimizer="cpu")),
    "lora-activations-away": Case(tuning=ADAPTER, offload=Offload(activations="cpu")),
    "lora-weights-away": Case(tuning=ADAPTER, offload=Offload(parameters="cpu")),
}
"""The ten that a proof measures."""


def config_of(shape: Shape) -> PretrainedConfig:
    """The model's own config cut to the shape's layers, or that of a tiny Llama where no model is named."""
    if shape.model:
        return with_layers(model_config(shape.model), shape.layers)
    return config_from({"model_type": "llama", "num_hidden_layers": shape.layers, **_TINY})


def plan_of(case: Case, shape: Shape, *, hardware: Hardware, rows: int, recompute: int = 0) -> Plan:
    """A plan for one device: micro-batches of ``rows`` rows of the shape's tokens, ``recompute`` blocks recomputed."""
    model, tuning = (
        spec_from_config(config_of(shape).to_dict(), name=shape.model or "bench/tiny"),
        case.tuning,
    )
    if isinstance(tuning, Lora):
        tuning = replace(tuning, targets=model.adaptable_names)
    return Plan(
        model=model,
        model_path=model.name,
        hardware=hardware,
        tuning=tuning,
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
            max_grad_norm=1.0,
        ),
        run=RunPlan(output_dir="runs/bench"),
    )  # fmt: skip


def random_model(plan: Plan, config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Weights drawn where they are trained: no file, no download, no second copy on the host."""
    on = torch.device("cpu") if plan.offload.parameters == "cpu" else device
    torch.manual_seed(0)
    with on:
        return empty_model(config, compute_dtype(plan.precision))


def random_rows(lengths: tuple[int, ...], *, vocab_size: int) -> RowStream:
    """Rows of ``lengths`` tokens end to end, each tensor of shape (tokens,); labels are the next tokens of the row."""
    ids = torch.randint(0, vocab_size, (sum(lengths),))
    labels = ids.roll(-1)
    ends = list(itertools.accumulate(lengths))
    labels[[end - 1 for end in ends]] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])
    return RowStream(ids, labels, positions, lengths)


def full_rows(plan: Plan) -> RowStream:
    """Rows of the plan's length in one stream, every token but the first of each supervised: the most it allows."""
    torch.manual_seed(1)  # the same rows for every side, whatever drew numbers before
    return random_rows(plan.batch.full_rows, vocab_size=plan.model.vocab_size)


def synchronise(device: torch.device) -> None:
    """Waits until a GPU has done its work; nothing to wait for on the processor."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_OF_CARDS = (
    *(
        Shape(model="llama-3.1-8b", layers=layers, seq_len=4096, chunk_tokens=1024)
        for layers in (16, 8, 4, 2)
    ),
    *(Shape(model="llama-3.2-1b", layers=layers, seq_len=2048, chunk_tokens=1024) for layers in (16, 4)),
    TINY,
)
"""The largest first: sixteen blocks of an 8B model are drawn in seconds, and more are alike."""
_FILLED, _LONGEST_S = 0.8, 20.0
"""Share of the usable memory and seconds of all its steps that a plan may take by its own prediction."""
WARM_UP, _TIMED = 2, 3
"""Steps in which states, workspaces and the allocator's segments appear; steps that are timed."""


def sized_plan(case: Case, hardware: Hardware) -> tuple[Plan, Shape, Estimate]:
    """The case on the largest model that leaves this card room, half of its blocks recomputed.

    Raises FituneError for a case that this card does not train.
    """
    if not hardware.gpu.is_cpu and not hardware.gpu.has_bf16:
        case = replace(case, precision=Precision.FP16)
    for shape in _OF_CARDS[-1:] if hardware.gpu.is_cpu else _OF_CARDS:
        plan = plan_of(case, shape, hardware=hardware, rows=1, recompute=shape.layers // 2)
        require_rules(plan, "train")
        estimate = predict(plan)
        short = estimate.step_seconds * (WARM_UP + _TIMED + 1) <= _LONGEST_S or hardware.gpu.is_cpu
        if estimate.fits and estimate.peak_bytes <= _FILLED * estimate.usable_bytes and short:
            return plan, shape, estimate
    raise HardwareError(f"not even a model of width 128 fits {_FILLED:.0%} of this device")


def proved_plan(name: str, hardware: Hardware) -> ProvedPlan:
    """One of CASES, predicted and run: steps to warm up, timed steps, one measured by phase."""
    plan, shape, estimate = sized_plan(CASES[name], hardware)
    device = training_device(plan)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    prepared = prepare_loaded(random_model(plan, config_of(shape), device), plan, device=device)
    rows = full_rows(plan)
    for step in range(WARM_UP + _TIMED):
        if step == WARM_UP:
            synchronise(device)
            began = time.perf_counter()
        train_step(prepared, rows)
    synchronise(device)
    seconds = (time.perf_counter() - began) / _TIMED
    phases, outside = measured_step(prepared, rows, device)
    return ProvedPlan(
        id=f"{name} {shape.model or 'width 128'} × {shape.layers}", predicted=estimate.memory.tensor_peak_bytes,
        measured=max(phases.values()), reserved_predicted=estimate.peak_bytes,
        reserved=outside.get("reserved", 0) + outside.get("context", 0), predicted_s=estimate.step_seconds,
        measured_s=seconds, tokens=plan.tokens_per_step,
    )  # fmt: skip


def measured_step(
    prepared: Prepared, rows: Any, device: torch.device
) -> tuple[dict[Phase, int], dict[str, int]]:
    """Peaks by phase of one step without cuBLAS' workspace, and what lies outside of them; nothing outside on a CPU."""
    meter = memory_meter(device)
    with meter.measuring(prepared.resident_tensors, prepared.host):
        train_step(prepared, rows, meter.enter)
        synchronise(device)
    peaks = meter.take_peaks()
    if device.type != "cuda":
        return peaks, {}
    storages = {t.untyped_storage()._cdata: t for t in prepared.resident_tensors() if t.device == device}
    tensors = sum(-(-t.untyped_storage().nbytes() // BLOCK) * BLOCK for t in storages.values())
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    workspace = max(0, torch.cuda.memory_allocated(device) - tensors)
    outside = {
        "workspace": workspace,
        "slack": reserved - max(peaks.values()),  # the meter resets torch's own count of it
        "context": total - free - torch.cuda.memory_reserved(device),
        "reserved": reserved,
    }
    return {phase: peak - workspace for phase, peak in peaks.items()}, outside


def train_step(
    prepared: Prepared,
    rows: Any,
    enter: Callable[[Phase], None] = lambda phase: None,
    *,
    learning_rate: float = 1e-6,
) -> tuple[float, float]:
    """Loss of a token and the gradients' norm."""
    tokens = rows.supervised_tokens
    loss = prepared.engine.forward_backward(rows, divisor=tokens, enter_phase=enter)
    update = prepared.engine.update(learning_rate=learning_rate, enter_phase=enter)
    return loss.item() / tokens, update.grad_norm


_STEPS, _LEARNING_RATE = 20, 1e-3


def offloaded(name: str, numbers: Numbers, hardware: Hardware) -> ProofCheck:
    """Three steps of one of CASES that offloads, beside the same steps with everything on the device."""
    case = replace(CASES[name], precision=Precision(numbers))
    plan = plan_of(case, TINY, hardware=hardware, rows=1)
    require_rules(plan, "train")
    away, here = (losses(one, steps=3) for one in (plan, replace(plan, offload=Offload())))
    return judged(f"{name} {numbers}", [away], [here], tolerance=TOLERANCES[numbers])


def same_losses(tuning: str, numbers: Numbers, hardware: Hardware) -> ProofCheck:
    """Losses of twenty steps on this device beside those of eager attention in fp32 on the processor."""
    case = replace(CASES[tuning], precision=Precision(numbers))
    processor = hardware_for(gpu=cpu_gpu(memory_bytes=8 * GIB, cores=1))
    here = plan_of(case, TINY, hardware=hardware, rows=2)
    require_rules(here, "train")
    there = plan_of(replace(case, precision=Precision.FP32), TINY, hardware=processor, rows=2)
    found, expected = losses(here, steps=_STEPS), losses(replace(there, attention="eager"), steps=_STEPS)
    return judged(
        f"20 steps {tuning} {numbers}", [found[:, 0]], [expected[:, 0]], tolerance=TOLERANCES[numbers],
        first_loss=float(found[0, 0]), last_loss=float(found[-1, 0]),
    )  # fmt: skip


def losses(plan: Plan, *, steps: int) -> Tensor:
    """Loss of a token and the gradients' norm, [steps, 2]: the same weights and rows on every device."""
    device = training_device(plan)
    torch.manual_seed(0)
    model = random_model(plan, config_of(TINY), torch.device("cpu"))
    prepared = prepare_loaded(
        model if plan.offload.parameters == "cpu" else model.to(device), plan, device=device
    )
    found = []
    for step in range(steps):
        torch.manual_seed(step % 2)  # the same two batches, so that losses fall and an error would grow
        rows = random_rows((96, TINY.seq_len), vocab_size=plan.model.vocab_size)
        found.append(train_step(prepared, rows, learning_rate=_LEARNING_RATE))
    return torch.tensor(found)
