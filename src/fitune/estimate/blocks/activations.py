"""Bytes that autograd keeps of a decoder block from forward to backward.

Symbols as in site.py. Each function counts storages once, as the allocator does; the modules are those of
transformers 5, the counts were checked storage by storage with a dispatch mode on CPU (tests/estimate).
"""

from fitune.estimate.blocks.site import FP32, Site, kept_keys
from fitune.values.model.traits import Activation


def norm_kept(site: Site, *, size: int, groups: int, passes: bool) -> int:
    """Kept by a norm of t · ``size`` elements; 0 where no gradient ``passes`` (the first block under LoRA).

    LayerNorm: t · (e·size + 8·groups), the input and fp32 mean and reciprocal deviation (aten::native_layer_norm).
    Liger's RMSNorm: t · (e·size + 4·groups), the input and the fp32 reciprocal root (liger_kernel.ops.rms_norm 0.8.5).
    transformers': t · (4·size + 4·groups), + e·size (4·size) when the weight trains. The input is squared and scaled in
    fp32: a copy under 16 bit, the residual stream itself under fp32, so 4·size either way. The weight's gradient needs
    what it multiplies: e·size in Llama's order (cast, then weight), 4·size in Gemma's (weight, then cast).
    ``groups`` is 1, or the heads of a q/k norm. LlamaRMSNorm, GemmaRMSNorm.
    """
    if not (passes or site.full):
        return 0
    if site.model.norm_type == "layer":
        return site.t * (site.e * size + 2 * FP32 * groups)
    if site.fused:
        return site.t * (site.e * size + FP32 * groups)
    return site.t * (FP32 * size + FP32 * groups + site.scaled_bytes * size)


def queries_keys_values_kept(site: Site, *, one_linear: bool, read_as_projected: bool) -> int:
    """e · (t·q + 2·keys): what attention's backward reads; + e·(q + k) per token when one rotated projection makes all.

    ``keys`` are the elements of all keys as attention reads them, and as many of the values: t·k where it takes groups.

    Rotary positions write queries and keys anew and keep only their shared table; values stay as projected.
    Where ``one_linear`` makes all three (Phi-3), the values are a view that keeps the whole projection alive; Falcon
    copies those of its one key head.
    """
    model = site.model
    keys = kept_keys(site.plan, site.shape, window=site.masking_window)
    keeps_all = one_linear and read_as_projected and not (model.learned_positions or model.is_multi_query)
    copies = model.q_dim + model.kv_dim if keeps_all else 0
    return site.e * (site.t * (model.q_dim + copies) + 2 * keys)


def written_queries_kept(site: Site) -> int:
    """e·q per token when attention is written out: keys and values are kept repeated, not as projected.

    Without rotary positions the queries are a view that keeps the fused projection alive, e·(q + 2k).
    """
    return site.t * site.e * (site.q + (2 * site.model.kv_dim if site.model.learned_positions else 0))


def fused_attention_kept(site: Site, *, rows: int, output_needed: bool) -> int:
    """t · (e·q + 4n): output and fp32 log-sum-exp (Dao 2023, arXiv 2307.08691, section 3.1).

    With several rows the outputs are joined into one more copy of e·q, kept if the output projection trains.
    + e·p, a sliding window's masks, e·s² for each row that it cuts: SDPA turns the mask of booleans into one of the
    compute type, and its backward reads that; every block makes and keeps its own.
    """
    joined = site.e * site.q if rows > 1 and output_needed else 0
    masks = site.e * site.shape.pairs(in_rows_over=site.masking_window) if site.masks_rows else 0
    return site.t * (site.e * site.q + FP32 * site.n + joined) + masks


def written_scores_kept(site: Site, *, pairs: int) -> int:
    """p·n·(4, + e when 16 bit) probabilities in fp32 and in the compute type, p of mask.

    With dropout the dropped ones, e·n·p, instead of those in the compute type, and the masks.
    Capped scores (Gemma-2) keep their hyperbolic tangent too, e·n·p. ``pairs`` are p or a part of it.
    models/attention.py ``rows_eager``.
    """
    mask_bytes = site.score_mask_bytes
    written = site.e if mask_bytes or site.e < FP32 else 0
    probabilities = FP32 + written + mask_bytes + site.e * site.model.caps_scores
    return pairs * (site.n * probabilities + 1)


def written_attention_kept(site: Site, *, output_needed: bool) -> int:
    """The scores of all rows; + t·2e·q repeated keys and values [+ t·e·q output]."""
    output = site.q if output_needed else 0
    return written_scores_kept(site, pairs=site.shape.pairs()) + site.t * site.e * (2 * site.q + output)


def fallback_attention_kept(site: Site, *, pairs: int, output_needed: bool, dropped: bool) -> int:
    """4·n·p · (1, or 3 with dropout) + t · (4·(q + 2k) [+ e·q]): attention that no fused kernel takes.

    The softmax; with dropout a mask of noise and the dropped probabilities. Queries, keys and values in fp32, those
    of grouped heads repeated. For Falcon-7B, whose one key head is broadcast and whose rows are masked, not separate,
    ``pairs`` are t². aten::_scaled_dot_product_attention_math.
    """
    output = site.e * site.q if output_needed else 0
    scores = FP32 * site.n * pairs * (3 if dropped else 1)
    return scores + site.t * (FP32 * (site.q + 2 * site.k) + output)


def gated_mlp_tensors_kept(activation: Activation, *, halves: bool) -> int:
    """Tensors of the MLP's width that are kept, output and up included: 3 for SiLU, 2 for ReLU, 6 for gelu_new.

    The product of the last two belongs to the down projection's input. Where one linear makes gate and up
    (``halves``), both live as long as up does.
    """
    return 2 + (activation.inner + activation.makes_output if halves else activation.kept)
