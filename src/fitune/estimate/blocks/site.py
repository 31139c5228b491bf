"""The site of a formula: where in the model it is applied, what trains there, which attention a plan really runs.

Symbols, everywhere in these files: t tokens in the micro-batch, h hidden size, q = heads · head size, k = key/value
heads · head size, n heads, f MLP width, e bytes of one element of the compute type.
"""

from collections.abc import Sequence
from dataclasses import replace

from fitune.estimate.states import stepping_bytes
from fitune.values.model.block_profile import BatchShape, Stage
from fitune.values.model.model_spec import BlockAttention, Linear
from fitune.values.model.traits import (
    ACTIVATIONS,
    attends_in_one_call,
    falls_back_to_scores,
    masking_window,
)
from fitune.values.plan import Full, Lomo, Lora, Plan, Precision, base_of, trains_every_weight
from fitune.values.quantisers import Hqq, is_packed

FP32 = 4
INDEX = 8
"""An int64 index."""


def norms_keep_input(plan: Plan) -> bool:
    """True if a norm keeps the very tensor that it reads: others keep their fp32 copy of it."""
    return plan.precision.compute_bytes == FP32 or plan.model.norm_type == "layer" or plan.kernels == "liger"


def dropout_mask_bytes(plan: Plan) -> int:
    """Bytes of one element of a dropout's mask: a bool on a GPU, a number of the compute type on a processor."""
    return plan.precision.compute_bytes if plan.hardware.gpu.is_cpu else 1


def seen_by_kernel(plan: Plan, attention: BlockAttention) -> BlockAttention:
    """``attention`` without its window where that is a mask over a whole row, all of which is computed."""
    skips = attention.in_chunks or attends_in_one_call(plan)
    return attention if skips else replace(attention, window=0)


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


class Site:
    """Facts that the formulas of one block share."""

    def __init__(
        self,
        plan: Plan,
        shape: BatchShape,
        *,
        gradient_enters: bool = True,
        has_adapters: bool = True,
        has_window: bool = False,
    ) -> None:
        """``gradient_enters``: a gradient goes further back than this block, because something before it trains;
        ``has_adapters``: LoRA adapts this block; ``has_window``: its attention has a sliding window."""
        model, lora = plan.model, plan.tuning if isinstance(plan.tuning, Lora) else None
        self.plan, self.shape, self.model, self.activation = plan, shape, model, ACTIVATIONS[model.activation]
        self.gradient_enters, self.has_adapters = gradient_enters, has_adapters
        self.t, self.e, self.h, self.q = (
            shape.tokens, plan.precision.compute_bytes, model.hidden_size, model.q_dim,
        )  # fmt: skip
        self.n, self.f = model.num_heads, model.intermediate_size
        self.stream = self.t * self.e * self.h  # bytes of one hidden state
        self.full = trains_every_weight(plan.tuning)
        self.on_cuda = not plan.hardware.gpu.is_cpu
        self.fused = plan.kernels == "liger"
        self.norms_outputs = model.norms_per_block >= 4  # behind attention and MLP, too (Gemma 2 and 3)
        # kept of each element that a trained weight of transformers' RMSNorm multiplies: 4 bytes in Gemma's order
        # (weight, then cast), e in Llama's (cast, then weight)
        self.scaled_bytes = self.full * (FP32 if model.scales_norms_in_fp32 else self.e)
        # hidden states alive where the last linear of attention or MLP goes back: the residual's gradient, an adapter's
        # scaled one, and that of a norm's input, which without a norm behind it is the residual's
        self.output_gradients = 1 + (not self.full) + self.norms_outputs
        # rows of more tokens take a mask in this block; 0 where none does
        self.masking_window = masking_window(plan) if has_window else 0
        self.masks_rows = 0 < self.masking_window < shape.row_tokens
        # width of keys and values as attention reads them in rows that take a mask, if there are any: the most
        self.k = attended_kv_dim(plan, masked=self.masks_rows)
        # scores are copied to fp32 before the softmax: of 16 bit, but fp16 on CUDA, whose kernel reads it
        self.casts_scores = self.e < FP32 and not (self.on_cuda and plan.precision is Precision.FP16)
        self.dropout_mask_bytes = dropout_mask_bytes(plan)
        # of one attention probability that is dropped out
        self.score_mask_bytes = self.dropout_mask_bytes if model.dropout.attention else 0
        # while both halves of a parallel block go back: one dropout over their sum has made their gradient
        one_dropout = model.dropout.mlp_output and not model.dropout.attention_output
        self.shared_dropout_gradient = self.stream if model.parallel_blocks and one_dropout else 0
        self.dropout = lora.dropout if lora else 0.0  # the adapters'; the model's own is in model.dropout
        self.has_dora = lora is not None and lora.dora

    def dropout_kept(self, rate: float, *, passes: bool) -> int:
        """mask·t·h: the mask of a dropout over the hidden size, where a gradient ``passes`` through it."""
        return self.dropout_mask_bytes * self.t * self.h if rate and passes else 0

    def dropout_backward(self, rate: float) -> int:
        """t·h·(e − mask) at the worst moment of the linear before such a dropout: the gradient before it, beside the
        residual's; the mask is let go."""
        return self.t * self.h * (self.e - self.dropout_mask_bytes) if rate else 0

    def adapted(self, linears: Sequence[Linear]) -> tuple[Linear, ...]:
        """Returns the ``linears`` that have an adapter in this block."""
        match self.plan.tuning:
            case Lora(targets=targets) if self.has_adapters:
                return tuple(m for m in linears if m.is_target(targets))
            case Full() | Lomo() | Lora():
                return ()

    def trains(self, linears: Sequence[Linear]) -> bool:
        """True if one of them has weights or an adapter that trains."""
        return self.full or bool(self.adapted(linears))

    def reads_input(self, linears: Sequence[Linear]) -> bool:
        """True if the linears keep the input they share; dropped-out adapters keep their own instead.

        A packed product keeps nothing (models/low_bit/quantised.py).
        """
        return self.full or (bool(self.adapted(linears)) and self.dropout == 0)

    def quantised(self, linears: Sequence[Linear]) -> tuple[Linear, ...]:
        """The packed ones of ``linears``, stacks of experts among them."""
        return tuple(m for m in linears if is_packed(m, base_of(self.plan)))


def norm_kept(site: Site, *, size: int, groups: int, passes: bool) -> int:
    """Kept by a norm of t · ``size`` elements; 0 where no gradient ``passes`` (the first block under LoRA).

    LayerNorm: t · (e·size + 8·groups), the input and fp32 mean and reciprocal deviation (aten::native_layer_norm).
    Liger's RMSNorm: t · (e·size + 4·groups), the input and the fp32 reciprocal root (liger_kernel.ops.rms_norm 0.8.5).
    transformers': t · (4·size + 4·groups), + e·size (4·size) when the weight trains. The input is squared and scaled in
    fp32: a copy under 16 bit, the residual stream itself under fp32, so 4·size either way. The weight's gradient needs
    what it multiplies: e·size in Llama's order (cast, then weight), 4·size in Gemma's (weight, then cast), which also
    keeps one plus the weight, 4 · size / groups.
    ``groups`` is 1, or the heads of a q/k norm. LlamaRMSNorm, GemmaRMSNorm.
    """
    if not (passes or site.full):
        return 0
    if site.model.norm_type == "layer":
        return site.t * (site.e * size + 2 * FP32 * groups)
    if site.fused:
        return site.t * (site.e * size + FP32 * groups)
    one_plus_weight = site.model.scales_norms_in_fp32 * FP32 * size // max(1, groups)
    return site.t * (FP32 * size + FP32 * groups + site.scaled_bytes * size) + one_plus_weight


def with_linears(
    site: Site,
    stage: Stage,
    linears: Sequence[Linear],
    *,
    input_has_gradient: bool = True,
    gone_by_step: int = 0,
) -> Stage:
    """``stage`` with the parameters of ``linears``, or of their adapters: what they keep, make whole and leave as
    gradients.

    Where no gradient goes through their input, dropout keeps no mask. ``gone_by_step``: bytes of the worst moment let
    go of when the largest gradient is stepped. peft.tuners.lora.Linear, peft.tuners.lora.dora.
    """
    t, e, lora, kept, again = site.t, site.e, site.plan.tuning, stage.kept, stage.again
    backward = stage.backward + whole_weight_bytes(site, linears)
    sizes = [linear.parameters for linear in linears]
    if isinstance(lora, Lora):
        adapted = site.adapted(linears)
        sizes = [
            lora.rank * (m.in_features + m.out_features) * m.copies + m.out_features * lora.dora
            for m in adapted
        ]
        # A's output; with dropout also the dropped input and its mask
        dropped = (e + input_has_gradient * site.dropout_mask_bytes) * (lora.dropout > 0)
        kept += t * sum(m.active_copies * (e * lora.rank + dropped * m.in_features) for m in adapted)
        if lora.dora and adapted:
            # the base's and the adapter's output, which the gradient of the magnitude multiplies; and a packed weight
            # made whole: with dropout PEFT multiplies the dropped input with it a second time, in a product of torch's
            # own that keeps it
            outputs = [m.out_features for m in adapted]
            kept += 2 * t * e * sum(outputs)
            if lora.dropout > 0:
                kept += e * sum(m.in_features * m.out_features for m in site.quantised(adapted))
            # gradients of the residual and of all outputs; the first that goes back multiplies its own with the
            # magnitudes and with what they multiplied
            all_outputs = sum(m.out_features for m in linears)
            backward = max(backward, t * e * (site.h + all_outputs + 3 * max(outputs)))
        if lora.dora:
            again = max(again, _unpacked_bytes(site, linears, input_kept=lora.dropout == 0))
    largest = max(sizes, default=0)
    return replace(
        stage,
        kept=kept,
        forward=max(stage.forward, _unpacked_bytes(site, linears)),
        backward=backward,
        again=again,
        gradients=sum(sizes) * e,
        largest_gradient=largest * e,
        stepped=largest * e + stepping_bytes(site.plan, largest) - gone_by_step,
    )


def whole_weight_bytes(site: Site, linears: Sequence[Linear], *, again: bool = False) -> int:
    """The most that a packed weight of the stage takes, dequantised for the product with the gradient, or in a forward
    that runs ``again``: itself beside that product's result, which the stage counts, or beside what it is made of.

    Nothing of it is kept (bitsandbytes MatMul4Bit; hqq dequantises the same way). A stack of experts is made whole at
    once, for one grouped product (models/experts.py).
    """
    worst = 0
    for m in site.quantised(linears):
        product = site.t * site.e * m.active_copies * (m.out_features if again else m.in_features)
        worst = max(worst, site.e * m.weights + max(0, _made_of(site, m) - product))
    return worst


def _made_of(site: Site, linear: Linear) -> int:
    """Bytes beside a packed weight while it is made whole: HQQ's words; for a stack those of one matrix, and that."""
    base, weights = base_of(site.plan), linear.weights // linear.copies
    if not isinstance(base, Hqq):
        return 0
    return base.unpacking_bytes(weights) + (site.e * weights if linear.stacked else 0)


def _unpacked_bytes(site: Site, linears: Sequence[Linear], *, input_kept: bool = False) -> int:
    """The worst product of the stage with a packed weight, or the worst norm that DoRA takes.

    e · (out·in·matrices [+ in²]) + t · e · (h + in + out): a frozen weight whole, beside residual, input, output.
    ``matrices`` is 1 while a packed weight is multiplied, and 3 (4 when packed) with DoRA, which forms B·A, its
    scaled copy and their sum with the weight to take the norms of the rows; B·A it makes by sending an identity
    matrix, in × in, through both (peft.tuners.lora.dora, get_lora_weight and get_weight_norm). Or, when B·A, the whole
    weight and the identity are still held: base and adapter's output, which a forward that runs again keeps, scaled
    and added up.
    ``input_kept``: the input is counted with what the stage before keeps.
    """
    packed, adapted = site.quantised(linears), site.adapted(linears)
    worst = 0
    for m in linears:
        dora = site.has_dora and m in adapted
        if m.stacked or not (dora or m in packed):
            continue
        whole = ((m in packed) + 3 * dora) * m.in_features * m.out_features + dora * m.in_features**2
        beside = site.h + (0 if input_kept else m.in_features)
        output = site.t * site.e * m.out_features
        made_of = 0 if dora else _made_of(site, m)
        worst = max(worst, site.e * (whole + site.t * beside) + max(output, made_of))
        if dora:
            held = ((m in packed) + 1) * m.in_features * m.out_features + m.in_features**2
            worst = max(worst, site.e * (held + site.t * beside) + (3 if input_kept else 5) * output)
    return worst
