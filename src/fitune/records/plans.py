"""From a row to the plan it ran: every stated choice honoured, or the reason why no plan says it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fitune.errors import HardwareError
from fitune.recipe.targets import resolve_targets
from fitune.records.row import Row
from fitune.units import GIB
from fitune.values.counts import count_parameters
from fitune.values.machines.gpus import find_gpu, gpus_called, hardware_for
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.model.known_models import find_known_model
from fitune.values.model.model_config import spec_from_config
from fitune.values.model.model_spec import Linear, ModelSpec
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Batch,
    ChunkedLoss,
    ClipByValue,
    Ddp,
    Dense,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Loss,
    Nf4,
    Offload,
    Optimizer,
    PlainLoss,
    Plan,
    Precision,
    Quantiser,
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

PEFT_RANK = 8
"""PEFT's default, where a row does not say."""
TOLERATED = 0.05
"""Between the parameters that shapes make and those that the row states: biases, padding of the vocabulary."""
GPUS_PER_NODE = 8
_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_OTHER_NAMES = {
    "c_attn": _QKV, "wqkv": _QKV, "qkv_proj": _QKV, "query_key_value": _QKV, "attn": (*_QKV, "o_proj"), "mlp": _MLP,
    "wq": _QKV[:1], "wk": _QKV[1:2], "wv": _QKV[2:], "wo": ("o_proj",), "q": _QKV[:1], "k": _QKV[1:2], "v": _QKV[2:],
    "o": ("o_proj",), "output_proj": ("o_proj",), "w1": _MLP[:1], "w2": _MLP[1:2], "w3": _MLP[2:],
    "c_proj": ("o_proj", "down_proj"), "lm_head": (), "embed_tokens": (),
}  # fmt: skip
"""Names of the linears in other code -> Llama's names. Adapters of the two tables are left out: r · (V + h) each."""
_OPTIMIZERS: dict[str, Optimizer | None] = {
    "lomo": Sgd(), "sgd.*momentum|momentum.*sgd": Sgd(momentum=0.9), "sgd": Sgd(),
    "galore|badam|adam mini|adafactor|apollo|muon|lion|lisa|4bit": None, "^$|adam": AdamW(),
}  # fmt: skip
"""Pattern of an author's words -> what a plan says; the first that is found counts, None: no plan says it."""
_SHARDINGS: dict[str, Sharding | None] = {
    "device map|model parallel|naive|pipeline|tensor": None,
    "hsdp|hybrid": Zero(stage=3, backend="fsdp", hybrid=True),
    "^$|^none|no shard": Ddp(),
    "grad op": Zero(stage=2, backend="fsdp"),
    "zero ?1|stage ?1": Zero(stage=1, backend="deepspeed"),
    "zero ?2|stage ?2": Zero(stage=2, backend="deepspeed"),
    "zero ?3|stage ?3|infinity": Zero(stage=3, backend="deepspeed"),
    "fsdp|full shard|fully": Zero(stage=3, backend="fsdp"),
    "ddp|data parallel": Ddp(),
}
T = TypeVar("T")


class Unrepresented(Exception):
    """The reason why no plan says what a row says. Such a row is counted, not hidden."""


def plan_of(row: Row, *, dropout: float = 0.0) -> Plan:
    """Raises Unrepresented, or FituneError for what no plan may say. ``dropout``: of adapters, if not stated."""
    for key, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        if (row.size(key) or 1) > 1:
            raise Unrepresented(f"{key} = {row.size(key)}: no plan has {name} parallelism")
    model, hardware, stated = model_of(row), _hardware(row), row.flag("act_ckpt")
    rows, length, blocks = row.size("micro_batch"), row.size("seq_len"), row.size("recompute_blocks")
    if length is None or rows is None:
        raise Unrepresented("seq_len or micro_batch not stated")
    if blocks is None and stated is None:
        raise Unrepresented("whether blocks are recomputed is not stated")
    if blocks is None:  # selective recompute without its share stated counts as every second block
        blocks = model.num_layers // (2 if row.says("act_ckpt", "selective") else 1) if stated else 0
    leaves = row.flag("act_offload") or row.says("act_ckpt", "unsloth", "offload")
    fused = any(word in row.remarks for word in ("foak", "liger")) or row.flag("compile")
    return Plan(
        model=model, model_path=str(row.facts.get("model") or ""), hardware=hardware,
        tuning=_tuning(row, model, dropout),
        precision=_precision(row, hardware.gpu), optimizer=_optimizer(row), sharding=_sharding(row),
        offload=Offload(
            parameters="cpu" if row.flag("offload_params") else "device",
            optimizer="cpu" if row.flag("offload_optimizer") else "device",
            activations="cpu" if leaves else "device",
        ),
        recompute=Recompute(blocks=min(blocks, model.num_layers)),
        attention="eager" if row.says("attention", "eager") else "flash",
        kernels="liger" if fused and model.norm_type == "rms" else "torch",
        loss=_loss(row, model, rows * length),
        batch=Batch(
            micro_batch_size=rows, accumulation=row.size("grad_accum") or 1, seq_len=length, packing=False
        ),
        schedule=Schedule(
            learning_rate=1e-4, kind="constant", warmup=Steps(count=0), duration=Steps(count=1), max_grad_norm=0.0
        ),
        run=RunPlan(output_dir=""),
    )  # fmt: skip


def model_of(row: Row) -> ModelSpec:
    """A known model where the row's shapes are its own; else a plain decoder of these shapes."""
    name = str(row.facts.get("model") or "")
    known = find_known_model(name) if name else None
    spec = spec_from_config(known.config, name=known.name) if known else None
    sizes = (spec.num_layers, spec.hidden_size, spec.vocab_size) if spec else ()
    stated = [row.size(key) for key in ("layers", "hidden", "vocab")]
    if spec is None or any(said not in (None, size) for said, size in zip(stated, sizes, strict=True)):
        spec = _decoder(row, name)
    tied = row.flag("tied_embeddings")
    if tied is not None:
        other = replace(spec, tied_embeddings=tied)
        spec = other if _weighs(other, row) or not _weighs(spec, row) else spec
    if spec.num_experts:  # before transformers 5 each expert's matrices were linears, which quantisers packed
        linears = (replace(m, adaptable=m.adaptable or m.part == "experts") for m in spec.linears)
        spec = replace(spec, linears=tuple(linears))
    if not _weighs(spec, row):
        raise Unrepresented(
            f"{name}: its shapes make {count_parameters(spec).total / 1e9:.2f} B parameters, "
            f"the row says {row.amount('params_b'):.2f} B"
        )
    return spec


def _weighs(spec: ModelSpec, row: Row) -> bool:
    """True if the shapes make the parameters that the row states, if it states any."""
    said = row.amount("params_b")
    return said is None or abs(count_parameters(spec).total / 1e9 / said - 1) <= TOLERATED


def _decoder(row: Row, name: str) -> ModelSpec:
    """Llama of the row's shapes; Qwen2 where the name is Qwen's, for its biases; plain MLP and LayerNorms as MPT's."""
    needed = ("layers", "hidden", "heads", "intermediate", "vocab")
    if missing := [key for key in needed if row.size(key) is None]:
        raise Unrepresented(f"{name or 'model'}: {', '.join(missing)} not stated")
    layers, hidden, heads, intermediate, vocab = (row.size(key) or 0 for key in needed)
    config: dict[str, Any] = {
        "model_type": "qwen2" if "qwen" in name.lower() else "llama", "num_hidden_layers": layers,
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": row.size("kv_heads") or heads,
        "head_dim": row.size("head_dim") or hidden // heads, "intermediate_size": intermediate, "vocab_size": vocab,
        "max_position_embeddings": row.size("seq_len") or 1, "tie_word_embeddings": False,
    }  # fmt: skip
    spec = spec_from_config(config, name=name)
    if not row.says("mlp_type", "plain"):
        return spec
    mlp = (
        Linear(name="ffn.up_proj", in_features=hidden, out_features=intermediate, part="mlp"),
        Linear(name="ffn.down_proj", in_features=intermediate, out_features=hidden, part="mlp"),
    )
    linears = (*(m for m in spec.linears if m.part == "attention"), *mlp)
    return replace(
        spec, model_type="mpt", mlp_type="plain", norm_type="layer", activation="gelu", linears=linears
    )


def device_is_named(row: Row) -> bool:
    """True if the row can be held against a device's size and speed, not against bytes alone."""
    return bool(row.words("gpu")) and not row.says("gpu", "unspecified", "unknown")


def device_bytes(row: Row) -> int:
    """Bytes of the device that its author says can be used, else those that the driver reports."""
    usable = re.search(r"(\d+(?:\.\d+)?) ?gib usable", row.words("gpu"))
    return int(float(usable.group(1)) * GIB) if usable else _gpu(row).memory_bytes


def _gpu(row: Row) -> Gpu:
    """The GPU named before any bracket. Of a product with two sizes, the smaller that holds what was measured."""
    if not device_is_named(row):
        return find_gpu("a100-80gb")
    said = str(row.facts["gpu"]).lower()
    watts = re.search(r"\d{3} ?w\b(?! cap)", said)
    name = re.sub(r"^\d+ ?[x×] ?", "", said.split("(")[0].strip()) + (f" {watts.group()}" if watts else "")
    try:
        return find_gpu(name)
    except HardwareError:
        choices = gpus_called(name)
        if len(choices) < 2:
            raise
        held = (row.amount("peak_mem_gib") or 0) * GIB
        return next((gpu for gpu in choices if 0 < held <= gpu.memory_bytes), choices[-1])


def _hardware(row: Row) -> Hardware:
    """Between nodes, where a row does not say: an adapter for each device, as NVIDIA's DGX data sheets have it, 8 × 200
    Gbit/s on A100 and 8 × 400 on H100; 100 Gbit/s in all for devices without NVLink."""
    gpus, gpu = row.size("n_gpus") or 1, _gpu(row)
    named = re.search(r"(\d+) nodes? x (\d+)", row.words("sharding"))
    nodes = max(1, int(named.group(1))) if named else -(-gpus // GPUS_PER_NODE)
    said = re.search(r"(\d+) ?gbps", row.words("gpu"))
    has_nvlink = gpu.link_bandwidth > gpu.host_bandwidth
    usual = 12.5e9 if not has_nvlink else 8 * (50e9 if gpu.capability >= (9, 0) else 25e9)
    network = float(said.group(1)) * 1e9 / 8 if said else usual
    return hardware_for(gpu=gpu, gpus=max(1, gpus // nodes), nodes=nodes, internode_bandwidth=network)


def trains_all(row: Row) -> bool:
    """True if the row says full training and no adapter."""
    return row.says("method", "full", "pretrain", "sft") and not row.says("method", "lora", "dora")


def steps_fp32(row: Row) -> bool:
    """Full fine-tuning with fp32 weights or masters, as stated; mixed precision means so unless it is called pure."""
    if row.says("optimizer_dtype", "fp32") or row.says("precision_mode", "master", "fp32"):
        return True
    if row.says("optimizer_dtype", "bf16", "fp16") or row.says("precision_mode", "pure"):
        return False
    return row.says("sharding", "deepspeed", "zero") or row.says("precision_mode", "mixed", "amp", "fp16")


def _precision(row: Row, gpu: Gpu) -> Precision:
    words = row.words("precision_mode")
    if "fp8" in words:
        raise Unrepresented(f"precision {words!r}: no plan computes in 8 bit")
    if "bf16" not in words and ("fp32" in words or "tf32" in words):
        return Precision.FP32
    if not gpu.has_bf16 or ("fp16" in words and "bf16" not in words):
        return Precision.FP16
    return Precision.BF16_MASTER if trains_all(row) and steps_fp32(row) else Precision.BF16


def _tuning(row: Row, model: ModelSpec, dropout: float) -> Tuning:
    if row.says("optimizer", "lomo"):
        return Lomo(adaptive=row.says("optimizer", "adalomo"), clip=ClipByValue(value=1.0))
    if trains_all(row):
        said = row.words("optimizer", "must_assume", "notes")
        steps_each = re.search(r"optimizer( step)? in (backward|bwd)", said)
        return Full(update=InBackward(clip=ClipByValue(value=1.0))) if steps_each else Full()
    if not row.says("method", "lora", "dora"):
        raise Unrepresented(f"method {row.words('method')!r} is not known")
    rank = row.size("lora_rank") or PEFT_RANK
    rate = re.search(r"dropout[ =:of]*(0?\.\d+|0)(?!\d)", row.remarks)
    return Lora(
        rank=rank, alpha=rank, dropout=float(rate.group(1)) if rate else dropout, targets=_targets(row, model),
        base=_base(row), dora=row.says("method", "dora"),
        modules_to_save=("embed_tokens", "lm_head") if row.says("method", "emb") else (),
    )  # fmt: skip


def _targets(row: Row, model: ModelSpec) -> tuple[str, ...]:
    said, known = str(row.facts.get("lora_targets") or "").lower(), model.adaptable_names
    if not said or re.search(r"all.linear", said):
        return known
    if "q,v assumed" in said:
        said = "q_proj,v_proj"
    wanted: list[str] = []
    for word in said.replace("+", ",").split(","):
        name = word.strip(" ()[]'\"").split(" ")[0]
        theirs = (name,) if name in known else _OTHER_NAMES.get(name, (name,))
        wanted += [one for one in theirs if one in known or len(theirs) == 1]
    return resolve_targets(model, tuple(dict.fromkeys(wanted)))


def _base(row: Row) -> Dense | Quantiser:
    quant = row.words("quant").replace(" ", "")
    four_bit = Nf4(double_quant=row.flag("double_quant") is not False)
    if quant in ("", "none", "false"):
        return four_bit if row.says("method", "qlora") else Dense()
    if re.search("8bit|int8", quant):
        return Hqq(bits=8, group_size=4096)  # one scale a row: nothing beside the bytes
    if "hqq" in quant:
        group = re.search(r"group(?:size)?=?([1-9]\d*)", quant)
        usual = 4096 if re.search("groupsize=?(none|0)", quant) else 64
        size = int(group.group(1)) if group else usual
        return Hqq(bits=2 if "2bit" in quant else 3 if "3bit" in quant else 4, group_size=size)
    if re.search("gptq|awq", quant):
        # per 128 weights a 16-bit scale and a 4-bit zero: 4.16 bit to NF4's 4.13
        return Nf4(double_quant=True)
    if re.search("nf4|fp4|4bit|int4|bnb", quant):
        return four_bit
    raise Unrepresented(f"quant {quant!r} is not known")


def _first(table: Mapping[str, T], words: str) -> T | None:
    return next((value for pattern, value in table.items() if re.search(pattern, words)), None)


def _optimizer(row: Row) -> Optimizer:
    name = row.words("optimizer")
    found = _first(_OPTIMIZERS, name)
    if found is None:
        raise Unrepresented(f"optimizer {name!r} is none a plan has")
    eight = re.search(r"8 ?bit|int8", row.words("optimizer", "optimizer_dtype"))
    return AdamW8bit() if eight and isinstance(found, AdamW) else found


def _sharding(row: Row) -> Sharding:
    if (row.size("n_gpus") or 1) == 1:
        return Single()
    words = row.words("sharding")
    if (found := _first(_SHARDINGS, words)) is None:
        raise Unrepresented(f"sharding {words!r} is not known, or splits a model by layers or matrices")
    return found


def fuses_head(row: Row) -> bool:
    """True if the loss makes its logits itself, chunk by chunk."""
    return row.says("fused_ce", "liger", "linear", "cut")


def _loss(row: Row, model: ModelSpec, tokens: int) -> Loss:
    """Liger's chunk: the next power of two of t / ⌈V/h⌉ (liger_kernel/ops/fused_linear_cross_entropy.py)."""
    if (chunk := row.size("loss_chunk_tokens")) is not None:
        return ChunkedLoss(chunk_tokens=chunk)
    if not fuses_head(row):
        return PlainLoss()
    size = -(-tokens // -(-model.vocab_size // model.hidden_size))
    return ChunkedLoss(chunk_tokens=1 << (size - 1).bit_length())
