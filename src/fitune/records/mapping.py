"""From a row to the plan it ran: every stated choice honoured, or the reason why that cannot be."""

from dataclasses import dataclass
from typing import Literal

from fitune.errors import FituneError
from fitune.estimate.shape import largest_batch
from fitune.records.habits import Habits
from fitune.records.hardware import hardware_of
from fitune.records.lookup import habits_of
from fitune.records.methods import optimizer_of, tuning_of
from fitune.records.row import Row
from fitune.records.shapes import model_of
from fitune.records.storage import Storage, by_deepspeed, precision_of, storage_of
from fitune.records.unrepresented import Unrepresented
from fitune.spec.model import ModelSpec
from fitune.spec.plan import (
    Attention,
    Batch,
    ChunkedLoss,
    Ddp,
    Loss,
    Offload,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Sharding,
    Single,
    Steps,
    Zero,
)
from fitune.spec.shape import BatchShape

_SPLIT_MODELS = ("device_map", "model parallel", "naive", "pipeline", "tensor")
_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row as the arithmetic takes it."""

    row: Row
    plan: Plan
    shape: BatchShape
    habits: Habits
    storage: Storage
    trains_root: bool = False
    """LoRA that also trains whole copies of embedding and head (PEFT's modules_to_save)."""
    by_deepspeed: bool = False
    """Its engine runs, if only on one device."""
    by_operation: bool = False
    """Recompute is by operation, not by block: matrix products and attention are kept in part."""


def case_of(row: Row) -> Case:
    """Raises Unrepresented with the reason when no plan says what the row says."""
    try:
        return _case_of(row)
    except FituneError as error:
        raise Unrepresented(str(error).replace("\n ", ";")) from None


def _case_of(row: Row) -> Case:
    _refuse_parallel_models(row)
    model, habits, hardware = model_of(row), habits_of(row), hardware_of(row)
    precision = precision_of(row)
    if not hardware.gpu.has_bf16 and precision is not Precision.FP32:
        precision = Precision.FP16
    elif row.says("optimizer", "lomo") and precision is Precision.FP16:
        # in our fp16 LOMO goes back twice, for the loss scale; 7B at 770 tokens/s on a 3090 would then be
        # 16 · 6.7e9 · 770 = 83 TFLOP/s, more than the card's 71: published runs went back once
        precision = Precision.BF16
    seq_len, micro_batch = row.size("seq_len"), row.size("micro_batch")
    if seq_len is None or micro_batch is None:
        raise Unrepresented("seq_len or micro_batch not stated")
    sharding = _sharding(row)
    plan = Plan(
        model=model,
        model_path=row.model,
        hardware=hardware,
        tuning=tuning_of(row, model, habits),
        precision=precision,
        optimizer=optimizer_of(row),
        sharding=sharding,
        offload=_offload(row),
        recompute=_recompute(row, model),
        attention=_attention(row),
        loss=_loss(row),
        batch=Batch(
            micro_batch_size=micro_batch,
            accumulation=row.size("grad_accum") or 1,
            seq_len=seq_len,
            packing=False,
        ),
        schedule=Schedule(
            learning_rate=1e-4,
            kind="constant",
            warmup=Steps(count=0),
            duration=Steps(count=1),
            max_grad_norm=0.0,
        ),
        run=RunPlan(output_dir=""),
    )
    return Case(
        row=row,
        plan=plan,
        shape=largest_batch(plan) if habits.is_fitune else _whole_rectangle(micro_batch, seq_len),
        habits=habits,
        storage=storage_of(row, habits, precision),
        trains_root=row.says("method", "emb"),
        by_deepspeed=by_deepspeed(row),
        by_operation=row.says("act_ckpt", "selective") and row.says("act_ckpt", "op"),
    )


def _whole_rectangle(micro_batch: int, seq_len: int) -> BatchShape:
    """Others run one rectangle through attention, and all its tokens through the head."""
    tokens = micro_batch * seq_len
    return BatchShape(tokens=tokens, supervised_tokens=tokens, rows=1, longest_row=seq_len)


def _refuse_parallel_models(row: Row) -> None:
    for key, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        if (row.size(key) or 1) > 1:
            raise Unrepresented(f"{key} = {row.size(key)}: no plan has {name} parallelism")


def _sharding(row: Row) -> Sharding:
    words = row.words["sharding"]
    if (row.size("n_gpus") or 1) == 1:
        return Single()
    if any(word in words for word in _SPLIT_MODELS):
        raise Unrepresented(f"sharding {words!r}: no plan splits a model by layers or matrices")
    if "hsdp" in words or "hybrid" in words:
        return Zero(stage=3, backend="fsdp", hybrid=True)
    if "no_shard" in words or "ddp" in words or "data parallel" in words:
        return Ddp()
    if "grad_op" in words:
        return Zero(stage=2, backend="fsdp")
    for stage in _STAGES:
        if any(
            word in words for word in (f"zero-{stage}", f"zero{stage}", f"zero {stage}", f"stage {stage}")
        ):
            return Zero(stage=stage, backend="deepspeed")
    if "infinity" in words:
        return Zero(stage=3, backend="deepspeed")
    if "fsdp" in words or "full_shard" in words or "fully" in words:
        return Zero(stage=3, backend="fsdp")
    if not words or words.startswith("none"):
        return Ddp()
    raise Unrepresented(f"sharding {words!r} is not known")


def _offload(row: Row) -> Offload:
    """Unsloth's own checkpoints send the kept inputs to the host."""
    leaves = row.switches["act_offload"] or row.says("act_ckpt", "unsloth", "offload")
    return Offload(
        parameters="cpu" if row.switches["offload_params"] else "device",
        optimizer="cpu" if row.switches["offload_optimizer"] else "device",
        activations="cpu" if leaves else "device",
    )


def _recompute(row: Row, model: ModelSpec) -> Recompute:
    """Selective recompute without its share stated counts as every second block."""
    blocks = row.size("recompute_blocks")
    if blocks is not None:
        return Recompute(blocks=min(blocks, model.num_layers))
    if row.says("act_ckpt", "selective"):
        return Recompute(blocks=model.num_layers // 2)
    stated = row.switches["act_ckpt"]
    if stated is None:
        raise Unrepresented("whether blocks are recomputed is not stated")
    return Recompute(blocks=model.num_layers if stated else 0)


def _attention(row: Row) -> Attention:
    if row.says("attention", "eager"):
        return "eager"
    return "sdpa" if row.says("attention", "sdpa") else "flash"


def _loss(row: Row) -> Loss:
    chunk = row.size("loss_chunk_tokens")
    if chunk is not None:
        return ChunkedLoss(chunk_tokens=chunk)
    return ChunkedLoss(chunk_tokens=1024) if row.says("fused_ce", "liger", "linear", "cut") else PlainLoss()
