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
    """Whether scores n·s² are written out: eager attention, and Gemma-2, which caps them.

    A sliding window that cuts needs a mask, which on CUDA is counted like scores: more than the mask takes, and
    not measured by us. Gemma-3's global blocks are counted like its windowed ones.
    """
    model = plan.model
    if plan.attention == "eager" or model.model_type == "gemma2":
        return True
    if plan.hardware.gpu.is_cpu or masks_whole_stream(model):
        return False
    return model.num_kv_heads != model.num_heads and window_cuts(model, plan.batch.seq_len)


def window_cuts(model: ModelSpec, seq_len: int) -> bool:
    """Whether a sliding window hides anything from rows of this length."""
    return 0 < model.sliding_window < seq_len


def attended_kv_dim(plan: Plan) -> int:
    """What attention reads as keys: grouped heads as they are, or repeated to all heads.

    Falcon repeats them itself. On GPUs before Ampere fitune does (models/attention.py), because the
    memory-efficient kernel takes no groups.
    """
    model, gpu = plan.model, plan.hardware.gpu
    if masks_whole_stream(model):
        return model.q_dim if model.num_kv_heads > 1 else model.kv_dim
    return model.kv_dim if gpu.is_cpu or gpu.has_flash_attention else model.q_dim
