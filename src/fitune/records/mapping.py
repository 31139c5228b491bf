"""From a row to the plan it ran: every stated choice honoured, or the reason why that cannot be."""

from dataclasses import dataclass
from typing import Literal

from fitune.errors import FituneError, RecipeError
from fitune.records.habits import Habits, habits_of
from fitune.records.hardware import hardware_of
from fitune.records.row import Row
from fitune.records.shapes import model_of
from fitune.records.storage import Storage, by_deepspeed, precision_of, storage_of, trains_all
from fitune.records.unrepresented import Unrepresented
from fitune.spec.model import ModelSpec
from fitune.spec.parameters import resolve_targets
from fitune.spec.plan import (
    AdamW,
    AdamW8bit,
    Attention,
    Batch,
    ChunkedLoss,
    ClipByValue,
    Ddp,
    Dense,
    Full,
    Hqq,
    Lomo,
    Lora,
    Loss,
    Nf4,
    Offload,
    Optimizer,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Sgd,
    Sharding,
    Single,
    Steps,
    Tuning,
    Zero,
)
from fitune.spec.shape import BatchShape

PEFT_RANK = 8
"""PEFT's default, where a row does not say."""
_STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
_NOT_ADAMW = (
    "galore",
    "badam",
    "adam-mini",
    "adam_mini",
    "adafactor",
    "apollo",
    "muon",
    "lion",
    "lisa",
    "4bit",
)
"""Names that contain AdamW's, or that no plan has, and keep other states."""
_EVERY_LINEAR = ("all linear", "all-linear", "all_linear")
_OTHER_NAMES = {
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "wqkv": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "wq": ("q_proj",), "wk": ("k_proj",), "wv": ("v_proj",), "wo": ("o_proj",),
    "q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",), "o": ("o_proj",),
    "w1": ("gate_proj",), "w2": ("up_proj",), "w3": ("down_proj",),
    "c_proj": ("o_proj", "down_proj"),
    "output_proj": ("o_proj",), "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
"""What other model code calls the linears that ours names after Llama's."""


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
    seq_len, micro_batch = row.size("seq_len"), row.size("micro_batch")
    if seq_len is None or micro_batch is None:
        raise Unrepresented("seq_len or micro_batch not stated")
    sharding = _sharding(row)
    plan = Plan(
        model=model,
        model_path=row.model,
        hardware=hardware,
        tuning=_tuning(row, model, habits),
        precision=precision,
        optimizer=_optimizer(row),
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
        shape=_whole_rectangle(micro_batch, seq_len),
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


def _tuning(row: Row, model: ModelSpec, habits: Habits) -> Tuning:
    if row.says("optimizer", "lomo"):
        return Lomo(adaptive=row.says("optimizer", "adalomo"), clip=ClipByValue(value=1.0))
    if trains_all(row):
        return Full()
    if not row.says("method", "lora", "dora"):
        raise Unrepresented(f"method {row.words['method']!r} is not known")
    rank = row.size("lora_rank") or PEFT_RANK
    return Lora(
        rank=rank,
        alpha=rank,
        dropout=habits.dropout,
        targets=_targets(row, model),
        base=_base(row),
        dora=row.says("method", "dora"),
    )


def _targets(row: Row, model: ModelSpec) -> tuple[str, ...]:
    words = row.words["lora_targets"]
    known = model.adaptable_names
    if not words or any(every in words for every in _EVERY_LINEAR):
        return known
    named = [word.strip(" ()[]'\"").split(" ")[0] for word in words.replace("+", ",").split(",")]
    if "q,v assumed" in words:
        named = ["q_proj", "v_proj"]
    wanted = tuple(dict.fromkeys(ours for name in named for ours in _our_names(name, known)))
    try:
        return resolve_targets(model, wanted)
    except RecipeError as error:
        raise Unrepresented(f"lora_targets {words!r}: {error.message}") from None


def _our_names(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """``c_proj`` is both output projections in a decoder of ours that has them apart."""
    if name in known:
        return (name,)
    return tuple(ours for ours in _OTHER_NAMES.get(name, (name,)) if ours in known) or (name,)


def _base(row: Row) -> Dense | Nf4 | Hqq:
    quant = row.words["quant"]
    if not quant or quant in ("none", "false"):
        if row.says("method", "qlora"):
            return Nf4(double_quant=row.switches["double_quant"] is not False)
        return Dense()
    if "8bit" in quant or "int8" in quant or "8-bit" in quant:
        return Hqq(bits=8, group_size=4096)  # one scale a row: nothing beside the bytes
    if "gptq" in quant or "awq" in quant:
        # 4 bit, and per 128 weights a 16-bit scale and a 4-bit zero: 4.16 bit to NF4's 4.13
        return Nf4(double_quant=True)
    if "hqq" in quant:
        return Hqq(bits=2 if "2" in quant else 3 if "3" in quant else 4)
    if any(word in quant for word in ("nf4", "fp4", "4bit", "4-bit", "int4", "bnb")):
        return Nf4(double_quant=row.switches["double_quant"] is not False)
    raise Unrepresented(f"quant {quant!r} is not known")


def _optimizer(row: Row) -> Optimizer:
    name = row.words["optimizer"]
    if "lomo" in name:
        return Sgd()
    if any(other in name for other in _NOT_ADAMW):
        raise Unrepresented(f"optimizer {name!r} is none a plan has")
    if "8bit" in name or "8-bit" in name:
        return AdamW8bit()
    if "adam" in name or not name:
        return AdamW()
    if "sgd" in name:
        return Sgd(momentum=0.9 if "momentum" in name else 0.0)
    raise Unrepresented(f"optimizer {name!r} is none a plan has")


def _sharding(row: Row) -> Sharding:
    words = row.words["sharding"]
    if (row.size("n_gpus") or 1) == 1:
        return Single()
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
    return ChunkedLoss(chunk_tokens=1024) if row.says("fused_ce", "liger", "linear", "cut") else PlainLoss()
