"""What a row trains, on what base and by which optimizer."""

from fitune.errors import RecipeError
from fitune.records.habits import Habits
from fitune.records.row import Row
from fitune.records.storage import trains_all
from fitune.records.unrepresented import Unrepresented
from fitune.spec.model import ModelSpec
from fitune.spec.plan import (
    AdamW,
    AdamW8bit,
    ClipByValue,
    Dense,
    Full,
    Hqq,
    Lomo,
    Lora,
    Nf4,
    Optimizer,
    Sgd,
    Tuning,
)
from fitune.spec.targets import resolve_targets

PEFT_RANK = 8
"""PEFT's default, where a row does not say."""
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


def tuning_of(row: Row, model: ModelSpec, habits: Habits) -> Tuning:
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


def optimizer_of(row: Row) -> Optimizer:
    name = row.words["optimizer"]
    if "lomo" in name:
        return Sgd()
    if any(other in name for other in _NOT_ADAMW):
        raise Unrepresented(f"optimizer {name!r} is none a plan has")
    if "8bit" in name or "8-bit" in name or row.says("optimizer_dtype", "8bit", "8-bit", "int8"):
        return AdamW8bit()
    if "adam" in name or not name:
        return AdamW()
    if "sgd" in name:
        return Sgd(momentum=0.9 if "momentum" in name else 0.0)
    raise Unrepresented(f"optimizer {name!r} is none a plan has")
