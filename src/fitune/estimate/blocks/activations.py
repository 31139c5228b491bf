"""Bytes that autograd keeps of a decoder block from forward to backward.

Symbols, everywhere in these files: t tokens in the micro-batch, h hidden size, q = heads · head size,
k = key/value heads · head size, n heads, f MLP width, e bytes of one element of the compute type.
Each function counts storages once, as the allocator does; the modules are those of transformers 5,
the counts were checked storage by storage with a dispatch mode on CPU (tests/estimate).
"""

from fitune.spec.model.block_profile import BatchShape
from fitune.spec.model.traits import Activation
from fitune.spec.plan import ChunkedLoss, Loss, PlainLoss

FP32 = 4
INDEX = 8
"""An int64 index."""


def rms_norm_kept(
    *,
    tokens: int,
    size: int,
    groups: int,
    element_bytes: int,
    gradient_passes: bool,
    trained: bool,
    scaled_in_fp32: bool,
) -> int:
    """t · (4·size + 4·groups) for the fp32 input and the reciprocal root; + e·size (4·size) when the weight trains.

    The input is squared and scaled in fp32: a copy under 16 bit, the residual stream itself under fp32, so
    4·size either way. The weight's gradient needs what it multiplies: e·size in Llama's order (cast, then
    weight), 4·size in Gemma's (weight, then cast). ``groups`` is 1, or the heads of a q/k norm. Nothing is kept
    when no gradient passes (the first block under LoRA). LlamaRMSNorm, GemmaRMSNorm.
    """
    if not (gradient_passes or trained):
        return 0
    scaled = (FP32 if scaled_in_fp32 else element_bytes) * size if trained else 0
    return tokens * (FP32 * size + FP32 * groups + scaled)


def fused_rms_norm_kept(
    *, tokens: int, size: int, groups: int, element_bytes: int, gradient_passes: bool, trained: bool
) -> int:
    """t · (e·size + 4·groups): the input and the fp32 reciprocal root (liger_kernel.ops.rms_norm 0.8.5)."""
    if not (gradient_passes or trained):
        return 0
    return tokens * (element_bytes * size + FP32 * groups)


def layer_norm_kept(
    *, tokens: int, size: int, groups: int, element_bytes: int, gradient_passes: bool, trained: bool
) -> int:
    """t · (e·size + 8·groups): the input and fp32 mean and reciprocal deviation (aten::native_layer_norm).

    ``groups`` is 1, or the heads of a q/k norm (Phi).
    """
    if not (gradient_passes or trained):
        return 0
    return tokens * (element_bytes * size + 2 * FP32 * groups)


def linear_input_kept(*, tokens: int, size: int, element_bytes: int, needed: bool) -> int:
    """e·size per token, once for all linears that read it; kept when a weight or an adapter's A trains on it."""
    return tokens * size * element_bytes if needed else 0


def adapter_kept(
    *, tokens: int, in_features: int, rank: int, element_bytes: int, dropout: float, mask_bytes: int
) -> int:
    """e·r per token for A's output; with dropout also the dropped input and its mask, (e + mask)·in.

    CUDA's masks take 1 byte, the CPU's have the compute type. peft.tuners.lora.Linear.
    """
    dropped = (element_bytes + mask_bytes) * in_features if dropout > 0 else 0
    return tokens * (element_bytes * rank + dropped)


def dora_kept(*, tokens: int, in_features: int, out_features: int, element_bytes: int, unpacked: bool) -> int:
    """2·e·out per token: the base's and the adapter's output, which the gradient of the magnitude multiplies.

    + e·out·in, a weight made whole: with dropout PEFT multiplies the dropped input with it a second time, in a product
    of torch's own that keeps it. peft.tuners.lora.dora.DoraLinearLayer.forward.
    """
    whole = in_features * out_features if unpacked else 0
    return element_bytes * (2 * tokens * out_features + whole)


def queries_keys_values_kept(
    *, tokens: int, q_dim: int, kv_dim: int, keys: int, element_bytes: int, rotary: bool, fused: bool
) -> int:
    """e · (t·q + 2·keys): what attention's backward reads; + e·(q + k) per token when one fused, rotated projection.

    ``keys`` are the elements of all keys as attention reads them, and as many of the values: t·k where it takes groups.

    Rotary positions write queries and keys anew and keep only their shared table; values stay as projected.
    Where one linear makes all three (Phi-3), the values are a view that keeps the whole projection alive.
    """
    copies = q_dim + kv_dim if rotary and fused else 0
    return element_bytes * (tokens * (q_dim + copies) + 2 * keys)


def queries_kept(*, tokens: int, q_dim: int, kv_dim: int, element_bytes: int, rotary: bool) -> int:
    """e·q per token when attention is written out: keys and values are kept repeated, not as projected.

    Without rotary positions the queries are a view that keeps the fused projection alive, e·(q + 2k).
    """
    return tokens * element_bytes * (q_dim if rotary else q_dim + 2 * kv_dim)


def fused_attention_kept(
    *, tokens: int, rows: int, q_dim: int, num_heads: int, element_bytes: int, output_needed: bool
) -> int:
    """t · (e·q + 4n): output and fp32 log-sum-exp (Dao 2023, arXiv 2307.08691, section 3.1).

    With several rows the outputs are joined into one more copy of e·q, kept if the output projection trains.
    """
    joined = element_bytes * q_dim if rows > 1 and output_needed else 0
    return tokens * (element_bytes * q_dim + FP32 * num_heads + joined)


def eager_attention_kept(
    *,
    tokens: int,
    pairs: int,
    q_dim: int,
    num_heads: int,
    element_bytes: int,
    output_needed: bool,
    softcapped: bool,
    mask_bytes: int,
) -> int:
    """p·n·(4, + e when 16 bit) probabilities in fp32 and in the compute type, p of mask, t·2e·q repeated K, V.

    With dropout (``mask_bytes`` > 0) the dropped ones, e·n·p, instead of those in the compute type, and the masks.
    Capped scores (Gemma-2) keep their hyperbolic tangent too, e·n·p. p is Σ s² over the rows of s tokens.
    models/attention.py ``rows_eager``.
    """
    written = element_bytes if mask_bytes or element_bytes < FP32 else 0
    probabilities = FP32 + written + mask_bytes + (element_bytes if softcapped else 0)
    scores = pairs * (num_heads * probabilities + 1)
    output = element_bytes * q_dim if output_needed else 0
    return scores + tokens * (2 * element_bytes * q_dim + output)


def fallback_attention_kept(
    *,
    tokens: int,
    pairs: int,
    q_dim: int,
    kv_dim: int,
    num_heads: int,
    element_bytes: int,
    output_needed: bool,
    dropped: bool,
) -> int:
    """4·n·p · (1, or 3 with dropout) + t · (4·(q + 2k) [+ e·q]): attention that no fused kernel takes.

    The softmax; with dropout a mask of noise and the dropped probabilities. Queries, keys and values in fp32, those
    of grouped heads repeated. p is Σ s² over the rows; for Falcon-7B, whose one key head is broadcast and whose rows
    are masked, not separate, it is t². aten::_scaled_dot_product_attention_math.
    """
    output = element_bytes * q_dim if output_needed else 0
    scores = FP32 * num_heads * pairs * (3 if dropped else 1)
    return scores + tokens * (FP32 * (q_dim + 2 * kv_dim) + output)


def dropout_kept(*, tokens: int, size: int, mask_bytes: int) -> int:
    """mask·size per token: the mask that the gradient is multiplied with (1 byte on CUDA, e on a CPU)."""
    return tokens * size * mask_bytes


def stream_mask_bytes(*, tokens: int, element_bytes: int) -> int:
    """e·t²: the mask over the whole stream that architectures with their own attention build once."""
    return element_bytes * tokens**2


def window_mask_kept(*, pairs: int, element_bytes: int) -> int:
    """e·p: a sliding window's masks, e·s² for each row of s tokens that it cuts; every block makes and keeps its own.

    SDPA turns the mask of booleans into one of the compute type, and its backward reads that.
    """
    return pairs * element_bytes


def gated_mlp_tensors_kept(activation: Activation, *, halves: bool) -> int:
    """Tensors of the MLP's width that are kept, output and up included: 3 for SiLU, 2 for ReLU, 6 for gelu_new.

    The product of the last two belongs to the down projection's input. Where one linear makes gate and up
    (``halves``), both live as long as up does.
    """
    if halves:
        return 2 + activation.inner + activation.makes_output
    return activation.kept + 2


def gated_mlp_kept(
    *, tokens: int, width: int, element_bytes: int, activation: Activation, halves: bool
) -> int:
    """e·f per token for each of its tensors."""
    return gated_mlp_tensors_kept(activation, halves=halves) * tokens * width * element_bytes


def fused_gated_mlp_kept(*, tokens: int, width: int, element_bytes: int) -> int:
    """2·e·f per token: gate and up; the activated gate is computed again (liger_kernel.ops.swiglu, geglu 0.8.5)."""
    return 2 * tokens * width * element_bytes


def plain_mlp_kept(*, tokens: int, width: int, element_bytes: int, activation: Activation) -> int:
    """e·f per token for each tensor that the activation keeps: 1 for GELU in one kernel, 4 for gelu_new."""
    return (activation.kept + activation.keeps_output) * tokens * width * element_bytes


def block_input_kept(*, tokens: int, hidden: int, element_bytes: int) -> int:
    """e·h per token: all that a recomputed block keeps (Chen et al. 2016, arXiv 1604.06174)."""
    return tokens * hidden * element_bytes


def rotary_table_bytes(*, tokens: int, head_dim: int, element_bytes: int) -> int:
    """2·e·d per token: cosines and sines, made once and read by every block."""
    return 2 * tokens * head_dim * element_bytes


def chunk_tokens(loss: Loss, shape: BatchShape) -> int:
    """Supervised tokens whose logits exist at once."""
    match loss:
        case ChunkedLoss(chunk_tokens=size):
            return min(size, shape.supervised_tokens)
        case PlainLoss():
            return shape.supervised_tokens


def num_chunks(loss: Loss, shape: BatchShape) -> int:
    """⌈supervised tokens / chunk⌉ passes over the head; 0 where no token is supervised."""
    size = chunk_tokens(loss, shape)
    return -(-shape.supervised_tokens // size) if size else 0


def bytes_per_logit(*, element_bytes: int) -> int:
    """4 in fp32: the softmax overwrites the logits. 6 in 16 bit: fp32 work 4, beside the logits or their gradient 2.

    transformers' own loss needs 10 forward and 12 backward (docs/memory-model.md).
    """
    return 4 if element_bytes == 4 else element_bytes + 4


def logits_bytes(*, tokens: int, vocab_size: int, element_bytes: int, softcapped: bool) -> int:
    """c · V · bytes per logit, while softmax and gradient are formed.

    A soft cap keeps its tangent, e more; the way back through it overwrites the gradient.
    """
    return tokens * vocab_size * (bytes_per_logit(element_bytes=element_bytes) + softcapped * element_bytes)


def head_backward_bytes(
    *, tokens: int, hidden: int, vocab_size: int, element_bytes: int, fp32_stream: bool
) -> int:
    """c · e · V: the logits' gradient; + 2h where the stream is fp32: input and gradient in the head's type."""
    return tokens * element_bytes * (vocab_size + 2 * hidden * fp32_stream)


def loss_buffers_bytes(*, supervised_tokens: int, hidden: int, element_bytes: int) -> int:
    """2·e·h per supervised token: the gathered hidden states and the gradient written chunk by chunk."""
    return 2 * supervised_tokens * hidden * element_bytes
