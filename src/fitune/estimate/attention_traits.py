"""Which attention a plan really runs: fused, written out, or an architecture's own."""

from fitune.spec.model import ModelSpec
from fitune.spec.plan import Plan

_OWN_ATTENTION = ("falcon",)
"""Architectures that bring their attention classes and take a mask over the whole stream."""


def is_multi_query(model: ModelSpec) -> bool:
    """Falcon-7B: one key head and attention code of its own."""
    return model.model_type in _OWN_ATTENTION and model.num_kv_heads == 1


def masks_whole_stream(model: ModelSpec) -> bool:
    """Attention code of its own, which knows rows only by a mask of t × t."""
    return model.model_type in _OWN_ATTENTION


def materialises_scores(plan: Plan) -> bool:
    """Whether scores n·s² are written out: eager attention, and where no fused kernel takes the model's attention.

    Gemma-2 caps its scores. On CUDA, grouped heads are taken by FlashAttention alone, so before Ampere, or with
    the mask that a sliding window shorter than the rows needs, torch falls back to its math kernel (aten's
    sdp_utils; not measured by us on a GPU). Gemma-3's global blocks are counted like its windowed ones.
    """
    model, gpu = plan.model, plan.hardware.gpu
    if plan.attention == "eager" or model.model_type == "gemma2":
        return True
    if gpu.is_cpu or model.num_kv_heads == model.num_heads or masks_whole_stream(model):
        return False
    return not gpu.has_flash_attention or window_cuts(model, plan.batch.seq_len)


def window_cuts(model: ModelSpec, seq_len: int) -> bool:
    """Whether a sliding window hides anything from rows of this length."""
    return 0 < model.sliding_window < seq_len


def attended_kv_dim(model: ModelSpec) -> int:
    """What attention reads as keys: Falcon repeats them to all heads where they are grouped."""
    repeated = model.model_type in _OWN_ATTENTION and model.num_kv_heads > 1
    return model.q_dim if repeated else model.kv_dim
