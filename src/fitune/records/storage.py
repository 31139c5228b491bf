"""How wide the trained parameters are kept: weight, gradient, fp32 copy, moments. Bytes an element."""

from dataclasses import dataclass

from fitune.records.habits import Habits
from fitune.records.row import Row
from fitune.records.unrepresented import Unrepresented
from fitune.spec.plan import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """``autocast``: 16-bit copies are made where linears need them, because weights are wider or stay so."""

    weight: int
    gradient: int
    master: int
    moment: int
    autocast: bool


def precision_of(row: Row) -> Precision:
    """The plan's word for what is computed in and stepped. Raises Unrepresented for eight bits."""
    words = row.words["precision_mode"]
    if "fp8" in words:
        raise Unrepresented(f"precision {words!r}: no plan computes in 8 bit")
    if "fp16" in words and "bf16" not in words:
        return Precision.FP16
    if "bf16" not in words and ("fp32" in words or "tf32" in words):
        return Precision.FP32
    return Precision.BF16_MASTER if trains_all(row) and _steps_fp32(row) else Precision.BF16


def trains_all(row: Row) -> bool:
    return row.says("method", "full", "pretrain", "sft")


def storage_of(row: Row, habits: Habits, precision: Precision) -> Storage:
    autocast = row.says("precision_mode", "autocast", "amp", "mixed")
    if by_deepspeed(row) and precision is not Precision.FP32:
        # its engine makes everything 16 bit and steps fp32 copies (deepspeed/runtime/engine.py)
        return Storage(weight=2, gradient=2, master=4, moment=4, autocast=False)
    if not trains_all(row):
        width = _adapter_bytes(row, habits, precision)
        return Storage(weight=width, gradient=width, master=0, moment=width, autocast=autocast)
    if precision is Precision.FP32:
        return Storage(weight=4, gradient=4, master=0, moment=4, autocast=False)
    if not _steps_fp32(row):
        return Storage(weight=2, gradient=2, master=0, moment=2, autocast=False)
    if _weights_are_fp32(row, habits):
        return Storage(weight=4, gradient=4, master=0, moment=4, autocast=True)
    return Storage(weight=2, gradient=2, master=4, moment=4, autocast=False)


def _adapter_bytes(row: Row, habits: Habits, precision: Precision) -> int:
    if row.says("optimizer_dtype", "fp32") or precision is Precision.FP32:
        return 4
    return 2 if row.says("optimizer_dtype", "bf16", "fp16") else habits.adapter_bytes


def _steps_fp32(row: Row) -> bool:
    """As stated; mixed precision means an fp32 copy unless it is called pure."""
    if row.says("optimizer_dtype", "fp32") or row.says("precision_mode", "master", "fp32"):
        return True
    if row.says("optimizer_dtype", "bf16", "fp16") or row.says("precision_mode", "pure"):
        return False
    return by_deepspeed(row) or row.says("precision_mode", "mixed", "amp", "fp16")


def by_deepspeed(row: Row) -> bool:
    return row.says("sharding", "deepspeed", "zero")


def _weights_are_fp32(row: Row, habits: Habits) -> bool:
    """Under autocast, and in FSDP's shards under mixed precision, the weights themselves are fp32.

    Apex and fairscale keep 16-bit weights beside an fp32 copy.
    """
    sharded = row.says("sharding", "fsdp", "hsdp")
    return sharded or habits.fp32_shards or row.says("precision_mode", "autocast", "amp")
