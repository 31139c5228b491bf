"""What trainers do beside the mathematics: what they upcast, materialise and keep. Facts with sources, no fits."""

from dataclasses import dataclass
from typing import Literal


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
    prefetches: bool = False
    """FSDP1's backward prefetch: the next block is gathered while one goes back."""
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
    autocast_logits: Logits | None = None
    """Instead, under autocast: its cross-entropy runs in fp32."""
    compiled_logits: Logits | None = None
    """Instead, where blocks and loss are compiled."""
    counter: Literal["allocated", "reserved", "device"] = "device"
    """What it prints as its memory, where a row does not say; else people read nvidia-smi."""
    missing: str = ""
    """The fact that its tables do not give and that errors are owed to."""
