"""What trainers do beside the mathematics: what they upcast, materialise and keep. Facts with sources, no fits.

A row is given the habits of the trainer that its source or its author's remarks name, of the usual one (transformers'
Trainer with PEFT) if none is named. What the row states itself always wins over a habit.
"""

import re
from dataclasses import dataclass, replace

from fitune.records.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """The loss hump: bytes per logit, and hidden-sized 16-bit copies per token, at its worst moment."""

    per_logit: int
    hidden_copies: int = 2
    chunks: int = 1
    """More than one: ``per_logit`` counts in one chunk only; ``whole`` counts for all logits."""
    whole: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """One trainer. The defaults are those of transformers' Trainer with PEFT."""

    name: str
    source: str
    is_fitune: bool = False
    """Priced by the estimate as it is: none of the other habits counts."""
    adapter_bytes: int = 4
    """Of an adapter's weight, gradient and states each; PEFT casts to fp32 (``autocast_adapter_dtype``)."""
    dropout: float = 0.0
    """Of adapters, where the row does not say and the trainer's published settings do."""
    upcasts_packed: bool = True
    """Quantised base: PEFT's prepare_model_for_kbit_training makes embedding, head and norms fp32."""
    fp32_stream: bool = True
    """… and so the residual stream; TRL casts embedding and head back, norms not."""
    fused_norms: bool = False
    """The kernel keeps the 16-bit input and a reciprocal root instead of fp32 copies (Liger, Unsloth)."""
    fused_mlp: bool = False
    """… and gate and up alone beside their product; the activation is made again (Liger, Unsloth)."""
    remakes_product: bool = False
    """… and so is the product (a compiled block)."""
    foreach: bool = True
    """torch's AdamW of many tensors at once, which holds one more set of what it steps (adamw_torch)."""
    checkpoints_units: bool = True
    """Reentrant checkpoints around FSDP1's units (transformers) rather than inside them."""
    own_fsdp: bool = False
    """fully_shard (FSDP2) instead of FullyShardedDataParallel, FSDP1."""
    fp32_shards: bool = False
    """Sharded weights in fp32 whatever is computed in, as accelerate does it under mixed precision."""
    repeats_keys: tuple[str, ...] = ()
    """Model types whose grouped keys and values it copies to all heads before attention (repeat_kv)."""
    clamps_scores: bool = False
    """Eager attention of transformers 4.28–4.30: scores kept once more, by the maximum they are clamped with."""
    expandable_segments: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which keeps torch's cache close to what is allocated."""
    logits: Logits = Logits(per_logit=14, hidden_copies=3)
    """transformers 4.45 to 4.5x: 16-bit logits, their fp32 copy, its shifted copy, log-softmax: 2 + 4 + 4 + 4."""
    missing: str = ""
    """The fact that its tables do not give and that errors are owed to."""


TRANSFORMERS = Habits(
    name="transformers Trainer with PEFT",
    source="transformers trainer.py, modeling_llama.py (loss); peft tuners/tuners_utils.py, utils/other.py",
    repeats_keys=("mistral", "mixtral"),
)

FAST_LOGITS = Logits(per_logit=8, hidden_copies=2)
"""Triton cross-entropy on logits in fp32: the logits and a shifted copy, over which the gradient is written."""

_FMS = replace(
    TRANSFORMERS,
    name="fms-acceleration",
    source="fms-acceleration: accelerated-peft and fused-ops-and-kernels plugins; transformers Trainer",
    upcasts_packed=False,
    fp32_stream=False,
)

_TRAINERS: tuple[tuple[tuple[str, ...], Habits], ...] = (
    (
        ("fitune",),
        Habits(
            name="fitune",
            source="fitune train",
            is_fitune=True,
            adapter_bytes=2,
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            expandable_segments=True,
        ),
    ),
    (
        ("fms-acceleration", "fms_accel"),
        _FMS,
    ),
    (
        ("fsdp_qlora",),
        replace(
            TRANSFORMERS,
            name="fsdp_qlora",
            source="AnswerDotAI/fsdp_qlora train.py: LoRA in the compute type, FSDP1, no upcast",
            adapter_bytes=2,
            dropout=0.1,
            checkpoints_units=False,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=12, hidden_copies=3),
            missing="what loading and quantising left in torch's cache, which reserved memory counts",
        ),
    ),
    (
        ("qwenlm/qwen", "qwen_readme", "qwenlm"),
        replace(
            TRANSFORMERS,
            name="Qwen finetune.py",
            source="QwenLM/Qwen finetune.py and modeling_qwen.py: no upcast of logits, but autocast's of the loss",
            dropout=0.05,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=8, hidden_copies=2),
            missing="the instrument: nvidia-smi and torch's counters differ by gigabytes here",
        ),
    ),
    (
        ("torchtune",),
        Habits(
            name="torchtune",
            source="torchtune recipes: everything in bf16, fully_shard, chunked cross-entropy in 8 parts",
            adapter_bytes=2,
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            own_fsdp=True,
            expandable_segments=True,
            logits=Logits(per_logit=8, hidden_copies=2, chunks=8, whole=6),
        ),
    ),
    (
        ("torchtitan",),
        Habits(
            name="torchtitan",
            source="torchtitan: fully_shard with fp32 shards, fused AdamW; logits in 16 bit, cross-entropy in fp32",
            upcasts_packed=False,
            fp32_stream=False,
            foreach=False,
            own_fsdp=True,
            expandable_segments=True,
            fp32_shards=True,
            logits=Logits(per_logit=12, hidden_copies=2),
        ),
    ),
    (
        ("unsloth",),
        replace(
            TRANSFORMERS,
            name="unsloth",
            source="unslothai/unsloth: Triton norms, SwiGLU and cross-entropy, norms and embedding stay 16 bit",
            upcasts_packed=False,
            fp32_stream=False,
            fused_norms=True,
            fused_mlp=True,
            logits=FAST_LOGITS,
        ),
    ),
    (
        ("axolotl", "llama-factory", "llamafactory", "ms-swift"),
        replace(
            TRANSFORMERS,
            name="transformers Trainer without upcast",
            source="axolotl utils/models.py and LLaMA-Factory model/adapter.py cast back or never upcast",
            upcasts_packed=False,
            fp32_stream=False,
        ),
    ),
    (
        ("litgpt", "lit-gpt", "lit_gpt"),
        replace(
            TRANSFORMERS,
            name="litgpt",
            source="Lightning-AI/litgpt finetune scripts: bf16-true, LoRA in bf16, cross-entropy in chunks of 128",
            adapter_bytes=2,
            dropout=0.05,
            upcasts_packed=False,
            fp32_stream=False,
            logits=Logits(per_logit=2, hidden_copies=2, whole=4),
        ),
    ),
    (
        ("trl", "sfttrainer"),
        replace(
            TRANSFORMERS,
            name="TRL SFTTrainer with PEFT",
            source="trl trainer/utils.py, peft_module_casting_to_bf16: norms fp32, embedding and head cast back",
            upcasts_packed=False,
        ),
    ),
    (
        ("llm-foundry", "mosaicml", "composer"),
        Habits(
            name="LLM Foundry",
            source="mosaicml/llm-foundry: Composer, FSDP1 with fp32 shards, cross-entropy of flash-attention",
            foreach=False,
            fp32_shards=True,
            checkpoints_units=False,
            logits=Logits(per_logit=4, hidden_copies=2),
        ),
    ),
    (
        ("2306.09782", "openlmlab/lomo"),
        replace(
            TRANSFORMERS,
            name="LOMO",
            source="OpenLMLab/LOMO with transformers 4.28 (modeling_llama.py, LlamaAttention) and DeepSpeed",
            logits=Logits(per_logit=14, hidden_copies=3),
            clamps_scores=True,
            missing="what of the profiled activations is counted: the authors leave out the working memory of backward",
        ),
    ),
    (
        ("huggingface/blog",),
        replace(
            TRANSFORMERS,
            name="blog post on 4-bit training",
            source="huggingface/blog 4bit-transformers-bitsandbytes; transformers 4.30, peft 0.4",
            clamps_scores=True,
            missing="which linears have adapters, and what loading left in torch's cache",
        ),
    ),
    (
        ("fms-fsdp",),
        Habits(
            name="fms-fsdp",
            source="foundation-model-stack/fms-fsdp: FSDP1 with fp32 shards, compiled blocks, fused AdamW",
            foreach=False,
            fp32_shards=True,
            checkpoints_units=False,
            logits=Logits(per_logit=12, hidden_copies=2),
            missing="how many blocks selective recompute covers (half are assumed)",
        ),
    ),
    (
        ("llama-recipes", "llama-cookbook", "llama_cookbook"),
        replace(
            TRANSFORMERS,
            name="llama-recipes",
            source="meta-llama/llama-recipes: FSDP1, AnyPrecision or torch AdamW, PEFT",
            checkpoints_units=False,
            logits=Logits(per_logit=12, hidden_copies=3),
        ),
    ),
)


def habits_of(row: Row) -> Habits:
    """The trainer that is named, changed by the kernels that are."""
    found = _named_in(row.source.lower()) or _named_in(row.remarks) or TRANSFORMERS
    return _with_kernels(row, _as_remarked(row, _with_autocast(row, found)))


_DROPOUT = re.compile(r"dropout[ =:of]*(0?\.\d+|0)(?!\d)")


def _as_remarked(row: Row, habits: Habits) -> Habits:
    """What the row's own remarks say of one run wins over what its trainer usually does."""
    remarks = f"{row.words['must_assume']} {row.words['notes']}"
    dropout = _DROPOUT.search(remarks)
    if dropout:
        habits = replace(habits, dropout=float(dropout.group(1)))
    if "expandable_segments" in remarks:
        habits = replace(habits, expandable_segments=True)
    if "non-reentrant" in remarks or "use_reentrant=false" in remarks:
        habits = replace(habits, checkpoints_units=False)
    return habits


def _named_in(text: str) -> Habits | None:
    return next((habits for names, habits in _TRAINERS if any(name in text for name in names)), None)


def _with_autocast(row: Row, habits: Habits) -> Habits:
    """Cross-entropy runs in fp32 under autocast: logits 2, shifted 2, fp32 4, log-softmax 4 where it were 2 each."""
    if (
        habits.logits.per_logit == 8
        and habits.name.startswith("Qwen")
        and row.says("precision_mode", "autocast")
    ):
        return replace(habits, logits=replace(habits.logits, per_logit=12))
    return habits


def _with_kernels(row: Row, habits: Habits) -> Habits:
    remarks = row.remarks + " " + row.words["fused_ce"]
    if "foak" in remarks:
        habits = replace(habits, fused_norms=True)
    if row.switches["compile"]:
        # inductor fuses what is elementwise and makes it again in backward rather than keep it
        habits = replace(habits, fused_norms=True, fused_mlp=True, remakes_product=True)
        if habits.name == "torchtune":
            # its loss is compiled too, and a chunk's logits are let go as soon as its gradient is made
            habits = replace(habits, logits=Logits(per_logit=6, chunks=8, whole=2))
    if "baseline-peft-bnb" in remarks and (row.size("n_gpus") or 1) == 1:
        habits = replace(habits, fp32_stream=True)
    if "granite" in remarks or "powerlm" in row.model.lower():
        # GraniteForCausalLM divides its logits by a scale: the 16-bit ones are let go
        habits = replace(habits, logits=Logits(per_logit=12, hidden_copies=4))
    if row.says("fused_ce", "liger", "linear", "cut"):
        return replace(habits, logits=Logits(per_logit=0, hidden_copies=2))
    if row.switches["fused_ce"]:
        # fms-acceleration's first reference run is older than its cross-entropy update: 16-bit logits stay beside
        first = "refs/a100_80gb.csv" in remarks
        return replace(habits, logits=replace(FAST_LOGITS, per_logit=10) if first else FAST_LOGITS)
    return habits
