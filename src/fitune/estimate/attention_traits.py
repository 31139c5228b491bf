"""Which attention a plan really runs: fused, written out, or an architecture's own."""

from fitune.spec.model import ModelSpec
from fitune.spec.plan import Plan, Precision

_OWN_ATTENTION = ("falcon",)
"""Architectures that bring their attention classes and take a mask over the whole stream."""

_GLOBAL_EVERY = {"gemma3_text": 6}


def is_multi_query(model: ModelSpec) -> bool:
    """Falcon-7B: one key head and attention code of its own."""
    return model.model_type in _OWN_ATTENTION and model.num_kv_heads == 1


def masks_whole_stream(model: ModelSpec) -> bool:
    """Attention code of its own, which knows rows only by a mask of t × t."""
    return model.model_type in _OWN_ATTENTION


def materialises_scores(plan: Plan) -> bool:
    """Whether scores n·s² are written out: eager attention, and Gemma-2, which caps them."""
    return plan.attention == "eager" or plan.model.model_type == "gemma2"


def attends_in_one_call(plan: Plan) -> bool:
    """Whether FlashAttention takes the whole stream with its rows and windows (models/attention.py, ``one_call``)."""
    model, gpu = plan.model, plan.hardware.gpu
    takes_shape = model.head_dim % 8 == 0 and model.head_dim <= 256
    kernel = gpu.has_flash_attention and plan.precision is not Precision.FP32 and takes_shape
    own = masks_whole_stream(model) or materialises_scores(plan)
    return plan.attention == "flash" and kernel and not own


def window_cuts(model: ModelSpec, seq_len: int) -> bool:
    """Whether a sliding window hides anything from rows of this length."""
    return 0 < model.sliding_window < seq_len


def masks_window(plan: Plan) -> bool:
    """Whether attention row by row takes a mask of s × s for each, in the blocks that have a window."""
    by_rows = not (masks_whole_stream(plan.model) or materialises_scores(plan) or attends_in_one_call(plan))
    return by_rows and window_cuts(plan.model, plan.batch.seq_len)


def windowed_blocks(model: ModelSpec) -> int:
    """Blocks whose attention has a window; every sixth of Gemma-3's has none (Gemma3TextConfig.layer_types)."""
    return model.num_layers - model.num_layers // _GLOBAL_EVERY.get(model.model_type, model.num_layers + 1)


def attended_kv_dim(plan: Plan) -> int:
    """What attention reads as keys, where it reads most: grouped heads as they are, or repeated to all heads.

    Falcon repeats them itself. Where FlashAttention cannot run, on GPUs before Ampere, in fp32 and with a window's
    mask, fitune does (models/attention.py), because the memory-efficient kernel takes no groups.
    """
    return _attended_kv_dim(plan, masked=masks_window(plan))


def kept_kv_dim(plan: Plan) -> int:
    """The same on average over the blocks with and without a window: what they keep adds up."""
    windowed, layers = windowed_blocks(plan.model), plan.model.num_layers
    wide, narrow = attended_kv_dim(plan), _attended_kv_dim(plan, masked=False)
    return (windowed * wide + (layers - windowed) * narrow) // layers


def _attended_kv_dim(plan: Plan, *, masked: bool) -> int:
    model, gpu = plan.model, plan.hardware.gpu
    if masks_whole_stream(model):
        return model.q_dim if model.num_kv_heads > 1 else model.kv_dim
    flash = gpu.has_flash_attention and plan.precision is not Precision.FP32 and not masked
    return model.kv_dim if gpu.is_cpu or flash else model.q_dim


def values_are_read_as_projected(plan: Plan) -> bool:
    """Whether attention reads a view of the projection; Falcon's order and repeated heads are copies."""
    return not masks_whole_stream(plan.model) and attended_kv_dim(plan) == plan.model.kv_dim
