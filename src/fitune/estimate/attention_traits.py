"""Which attention a plan really runs: fused, written out, or an architecture's own."""

from fitune.spec.plan import Plan, Precision
from fitune.spec.shape import BatchShape
from fitune.spec.traits import falls_back_to_scores, has_scores, writes_scores


def attends_in_one_call(plan: Plan) -> bool:
    """True if FlashAttention takes the whole stream with its rows and windows (models/attention.py, ``one_call``)."""
    model, gpu = plan.model, plan.hardware.gpu
    takes_shape = model.head_dim % 8 == 0 and model.head_dim <= 256
    kernel = gpu.has_flash_attention and plan.precision is not Precision.FP32 and takes_shape
    own = model.masks_whole_stream or writes_scores(plan)
    return plan.attention == "flash" and kernel and not own


def masking_window(plan: Plan) -> int:
    """Rows of more tokens than this keep a mask of s × s each, in the blocks that have a window; 0 where none does."""
    model = plan.model
    by_rows = not (model.masks_whole_stream or has_scores(plan) or attends_in_one_call(plan))
    some = by_rows and any(model.has_window(layer) for layer in range(model.num_layers))
    return model.sliding_window if some else 0


def masks_window(plan: Plan) -> bool:
    """True if a full row takes a mask for its window, in some block."""
    return 0 < masking_window(plan) < plan.batch.seq_len


def attended_kv_dim(plan: Plan, *, masked: bool) -> int:
    """Width of the keys that attention reads: grouped heads as they are, or repeated to all heads.

    Falcon repeats them itself. Where FlashAttention cannot run, on GPUs before Ampere, in fp32 and with a window's
    mask, fitune does (models/attention.py), because the memory-efficient kernel takes no groups. Torch does where it
    writes the scores out.
    """
    model, gpu = plan.model, plan.hardware.gpu
    if model.masks_whole_stream:
        return model.q_dim if model.num_kv_heads > 1 else model.kv_dim
    if falls_back_to_scores(plan):
        return model.q_dim
    flash = gpu.has_flash_attention and plan.precision is not Precision.FP32 and not masked
    return model.kv_dim if gpu.is_cpu or flash else model.q_dim


def kept_keys(plan: Plan, shape: BatchShape, *, window: int) -> int:
    """Elements of all keys that attention keeps in a block whose rows over ``window`` tokens take a mask (0: none).

    Rows whose keys are repeated have a copy of their own; one row that reads them as they are keeps all.
    """
    masked = shape.tokens_in_rows_over(window) if window else 0
    wide, narrow = (attended_kv_dim(plan, masked=masked) for masked in (True, False))
    if wide == narrow:
        return shape.tokens * narrow
    return masked * wide + (shape.tokens * narrow if masked < shape.tokens else 0)


def values_are_read_as_projected(plan: Plan, *, masked: bool) -> bool:
    """True if attention reads a view of the projection; repeated heads are copies, by Falcon too."""
    return attended_kv_dim(plan, masked=masked) == plan.model.kv_dim
