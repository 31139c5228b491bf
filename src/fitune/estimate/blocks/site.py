"""The site of a formula: where in the model it is applied, what trains there, which attention a plan really runs.

Symbols, everywhere in these files: t tokens in the micro-batch, h hidden size, q = heads · head size, k = key/value
heads · head size, n heads, f MLP width, e bytes of one element of the compute type, s tokens of a row, p = Σ s².
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fitune.estimate.parameters import dequantisation_workspace_bytes
from fitune.estimate.states import stepping_bytes
from fitune.values.model.block_profile import BatchShape, Stage
from fitune.values.model.model_spec import BlockAttention, Linear, ModelSpec
from fitune.values.model.traits import (
    ACTIVATIONS,
    Activation,
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


def kept_keys(plan: Plan, shape: BatchShape, *, window: int) -> int:
    """Elements of all keys that attention keeps in a block whose rows over ``window`` tokens take a mask (0: none).

    Rows whose keys are repeated have a copy of their own; one row that reads them as they are keeps all.
    """
    masked = shape.tokens_in_rows_over(window) if window else 0
    wide, narrow = (attended_kv_dim(plan, masked=masked) for masked in (True, False))
    if wide == narrow:
        return shape.tokens * narrow
    return masked * wide + (shape.tokens * narrow if masked < shape.tokens else 0)


@dataclass(frozen=True, slots=True)
class Site:
    """Facts that the formulas of one block share."""

    plan: Plan
    shape: BatchShape
    gradient_enters: bool
    """True if gradients go further back than this block: not where nothing trains before it."""
    has_adapters: bool = True
    """True if this block is among those that LoRA adapts."""
    has_window: bool = False
    """True if the attention of this block has a sliding window."""

    @property
    def model(self) -> ModelSpec:
        """Shapes of the model that is planned for."""
        return self.plan.model

    @property
    def full(self) -> bool:
        """True if every weight trains (full, LOMO)."""
        return trains_every_weight(self.plan.tuning)

    @property
    def t(self) -> int:
        """Tokens of the micro-batch."""
        return self.shape.tokens

    @property
    def e(self) -> int:
        """Bytes of one element of the compute type."""
        return self.plan.precision.compute_bytes

    @property
    def h(self) -> int:
        """The hidden size."""
        return self.model.hidden_size

    @property
    def q(self) -> int:
        """Width of the queries."""
        return self.model.q_dim

    @property
    def k(self) -> int:
        """Width of keys and values as attention reads them in rows that take a mask, if there are any: the most."""
        return attended_kv_dim(self.plan, masked=self.masks_rows)

    @property
    def n(self) -> int:
        """The heads of the queries."""
        return self.model.num_heads

    @property
    def f(self) -> int:
        """Width of the MLP, or of one expert."""
        return self.model.intermediate_size

    @property
    def activation(self) -> Activation:
        """The MLP's activation function: how many tensors it keeps and makes on its way."""
        return ACTIVATIONS[self.model.activation]

    @property
    def on_cuda(self) -> bool:
        """True if CUDA's kernels run, whose masks and workspaces are others."""
        return not self.plan.hardware.gpu.is_cpu

    @property
    def fused(self) -> bool:
        """True if Liger's kernels stand where transformers has small operations."""
        return self.plan.kernels == "liger"

    @property
    def norms_outputs(self) -> bool:
        """True if norms stand behind attention and MLP, too (Gemma 2 and 3)."""
        return self.model.norms_per_block >= 4

    @property
    def scaled_bytes(self) -> int:
        """Bytes that are kept of each element that a trained weight of transformers' RMSNorm multiplies: 4 in Gemma's
        order (weight, then cast), e in Llama's (cast, then weight); 0 where the weight is frozen."""
        if not self.full:
            return 0
        return FP32 if self.model.scales_norms_in_fp32 else self.e

    @property
    def output_gradients(self) -> int:
        """Hidden states alive where the last linear of attention or MLP goes back: the residual's gradient, an
        adapter's scaled one, and that of a norm's input, which without a norm behind it is the residual's."""
        return 1 + (not self.full) + self.norms_outputs

    @property
    def masking_window(self) -> int:
        """Rows of more tokens than this take a mask in this block; 0 where none does."""
        return masking_window(self.plan) if self.has_window else 0

    @property
    def masks_rows(self) -> bool:
        """True if rows are longer than the window, so that attention takes a mask."""
        return 0 < self.masking_window < self.shape.row_tokens

    @property
    def dropout_mask_bytes(self) -> int:
        """Bytes of one element of a dropout mask: 1 on CUDA, the compute type's on a CPU."""
        return 1 if self.on_cuda else self.e

    def dropout_kept(self, rate: float, *, passes: bool) -> int:
        """mask·t·h: the mask of a dropout over the hidden size, where a gradient ``passes`` through it."""
        return self.dropout_mask_bytes * self.t * self.h if rate and passes else 0

    def dropout_backward(self, rate: float) -> int:
        """t·h·(e − mask) at the worst moment of the linear before such a dropout: the gradient before it, beside the
        residual's; the mask is let go."""
        return self.t * self.h * (self.e - self.dropout_mask_bytes) if rate else 0

    @property
    def shared_dropout_gradient(self) -> int:
        """t·e·h while both halves of a parallel block go back: one dropout over their sum has made their gradient."""
        one = (
            self.model.parallel_blocks
            and self.model.dropout.mlp_output
            and not self.model.dropout.attention_output
        )
        return self.t * self.e * self.h if one else 0

    @property
    def score_mask_bytes(self) -> int:
        """Bytes kept for one attention probability that is dropped out by its own mask; 0 without dropout."""
        return self.dropout_mask_bytes if self.model.dropout.attention > 0 else 0

    @property
    def casts_scores(self) -> bool:
        """True if scores are copied to fp32 before the softmax: of 16 bit, but fp16 on CUDA, whose kernel reads it."""
        return self.e < FP32 and not (self.on_cuda and self.plan.precision is Precision.FP16)

    @property
    def dropout(self) -> float:
        """The adapters'; the model's own is in ``model.dropout``."""
        return self.plan.tuning.dropout if isinstance(self.plan.tuning, Lora) else 0.0

    @property
    def has_dora(self) -> bool:
        """True if adapters train the norms of rows, too."""
        return isinstance(self.plan.tuning, Lora) and self.plan.tuning.dora

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
    go of when the largest gradient is stepped.
    """
    e, lora, kept, again = site.e, site.plan.tuning, stage.kept, stage.again
    backward = stage.backward + whole_weight_bytes(site, linears)
    sizes = [linear.parameters for linear in linears]
    if isinstance(lora, Lora):
        adapted = site.adapted(linears)
        if lora.dora:
            again = max(again, _unpacked_bytes(site, linears, input_kept=lora.dropout == 0))
            backward = max(backward, _dora_backward(site, linears))
            kept += sum(_dora_kept(site, m, packed=m in site.quantised(linears)) for m in adapted)
        kept += sum(_adapter_kept(site, lora, m, input_has_gradient=input_has_gradient) for m in adapted)
        sizes = [
            lora.rank * (m.in_features + m.out_features) * m.copies + m.out_features * lora.dora
            for m in adapted
        ]
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


def _adapter_kept(site: Site, lora: Lora, linear: Linear, *, input_has_gradient: bool) -> int:
    """e·r per token for A's output; with dropout also the dropped input and its mask, (e + mask)·in.

    CUDA's masks take 1 byte, the CPU's have the compute type. peft.tuners.lora.Linear.
    """
    mask_bytes = site.dropout_mask_bytes if input_has_gradient else 0
    dropped = (site.e + mask_bytes) * linear.in_features if lora.dropout > 0 else 0
    return site.t * linear.active_copies * (site.e * lora.rank + dropped)


def _dora_kept(site: Site, linear: Linear, *, packed: bool) -> int:
    """2·e·out per token: the base's and the adapter's output, which the gradient of the magnitude multiplies.

    + e·out·in, a packed weight made whole: with dropout PEFT multiplies the dropped input with it a second time, in a
    product of torch's own that keeps it. peft.tuners.lora.dora.DoraLinearLayer.forward.
    """
    whole = linear.in_features * linear.out_features if packed and site.dropout > 0 else 0
    return site.e * (2 * site.t * linear.out_features + whole)


def _dora_backward(site: Site, linears: Sequence[Linear]) -> int:
    """t · e · (h + Σ out + 3·out): gradients of the residual and of all outputs; the first that goes back multiplies
    its own with the magnitudes and with what they multiplied. 0 where none is adapted. DoraLinearLayer.forward."""
    outputs = [m.out_features for m in site.adapted(linears)]
    waiting = site.h + sum(m.out_features for m in linears)
    return site.t * site.e * (waiting + 3 * max(outputs)) if outputs else 0


def whole_weight_bytes(site: Site, linears: Sequence[Linear], *, again: bool = False) -> int:
    """The most that a packed weight of the stage takes, dequantised for the product with the gradient, or in a forward
    that runs ``again``: itself beside that product's result, which the stage counts, or beside what it is made of.
    """
    return max(
        (
            dequantisation_workspace_bytes(m, element_bytes=site.e)
            + max(0, _made_of(site, m) - _product_bytes(site, m.out_features if again else m.in_features, m))
            for m in site.quantised(linears)
        ),
        default=0,
    )


def _product_bytes(site: Site, width: int, linear: Linear) -> int:
    return site.t * site.e * linear.active_copies * width


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
