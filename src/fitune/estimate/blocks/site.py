"""The site of a formula: where in the model it is applied, what trains there, which attention a plan really runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fitune.estimate.blocks import activations, transient
from fitune.estimate.parameters import dequantisation_workspace_bytes
from fitune.estimate.states import stepping_bytes
from fitune.spec.model.block_profile import BatchShape, Stage
from fitune.spec.model.model_spec import BlockAttention, Linear, ModelSpec
from fitune.spec.model.traits import falls_back_to_scores, flash_refused, has_scores
from fitune.spec.plan import Full, Lomo, Lora, Plan, Precision, base_of, trains_every_weight
from fitune.spec.quantisers import is_packed


def attends_in_one_call(plan: Plan) -> bool:
    """True if FlashAttention takes the whole stream with its rows and windows (models/attention.py, ``one_call``)."""
    refused = flash_refused(plan.model, plan.hardware.gpu, plan.precision)
    return plan.attention == "flash" and refused is None


def norms_keep_input(plan: Plan) -> bool:
    """True if a norm keeps the very tensor that it reads: others keep their fp32 copy of it."""
    return (
        plan.precision.compute_bytes == activations.FP32
        or plan.model.norm_type == "layer"
        or plan.kernels == "liger"
    )


def seen_by_kernel(plan: Plan, attention: BlockAttention) -> BlockAttention:
    """``attention`` without its window where that is a mask over a whole row, all of which is computed."""
    skips = attention.in_chunks or attends_in_one_call(plan)
    return attention if skips else replace(attention, window=0)


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
    def element_bytes(self) -> int:
        """e: bytes of one element of the compute type."""
        return self.plan.precision.compute_bytes

    @property
    def fused(self) -> bool:
        """True if Liger's kernels stand where transformers has small operations."""
        return self.plan.kernels == "liger"

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
        return self.element_bytes if self.plan.hardware.gpu.is_cpu else 1

    def dropout_kept(self, rate: float, *, passes: bool) -> int:
        """The mask of a dropout over the hidden size, where a gradient ``passes`` through it."""
        if not (rate and passes):
            return 0
        return activations.dropout_kept(
            tokens=self.shape.tokens, size=self.model.hidden_size, mask_bytes=self.dropout_mask_bytes
        )

    def norm_kept(self, *, size: int, groups: int, passes: bool) -> int:
        """Kept by a norm: LayerNorm, Liger's RMSNorm, or transformers' own."""
        t, e, full = self.shape.tokens, self.element_bytes, self.full
        if self.model.norm_type == "layer":
            kept = activations.layer_norm_kept
        elif self.fused:
            kept = activations.fused_rms_norm_kept
        else:
            kept = partial(activations.rms_norm_kept, scaled_in_fp32=self.model.scales_norms_in_fp32)
        return kept(tokens=t, size=size, groups=groups, element_bytes=e, gradient_passes=passes, trained=full)

    def dropout_backward(self, rate: float) -> int:
        """More at the worst moment of the linear before such a dropout."""
        if not rate:
            return 0
        return transient.dropout_backward(
            tokens=self.shape.tokens, hidden=self.model.hidden_size, element_bytes=self.element_bytes,
            mask_bytes=self.dropout_mask_bytes,
        )  # fmt: skip

    @property
    def shared_dropout_gradient(self) -> int:
        """t·e·h while both halves of a parallel block go back: one dropout over their sum has made their gradient."""
        one = (
            self.model.parallel_blocks
            and self.model.dropout.mlp_output
            and not self.model.dropout.attention_output
        )
        return self.shape.tokens * self.model.hidden_size * self.element_bytes if one else 0

    @property
    def score_mask_bytes(self) -> int:
        """Bytes kept for one attention probability that is dropped out by its own mask; 0 without dropout."""
        return self.dropout_mask_bytes if self.model.dropout.attention > 0 else 0

    @property
    def casts_scores(self) -> bool:
        """True if scores are copied to fp32 before the softmax: of 16 bit, but fp16 on CUDA, whose kernel reads it."""
        on_cpu = self.plan.hardware.gpu.is_cpu
        return self.element_bytes < activations.FP32 and (on_cpu or self.plan.precision is not Precision.FP16)

    @property
    def dropout(self) -> float:
        """The adapters'; the model's own is in ``model.dropout``."""
        return self.plan.tuning.dropout if isinstance(self.plan.tuning, Lora) else 0.0

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
        """The packed ones of ``linears``, stacks of experts left out."""
        return tuple(m for m in linears if not m.stacked and is_packed(m, base_of(self.plan)))

    def whole_stack_bytes(self, linears: Sequence[Linear]) -> int:
        """The packed stack of experts among ``linears`` in the compute type, for its product; 0 where none is."""
        return sum(
            dequantisation_workspace_bytes(m, element_bytes=self.element_bytes)
            for m in linears
            if m.stacked and is_packed(m, base_of(self.plan))
        )


def linears_stage(
    site: Site,
    name: str,
    linears: Sequence[Linear],
    *,
    kept: int,
    forward: int,
    backward: int,
    again: int = 0,
    making: int = 0,
    incoming: int = 0,
    input_has_gradient: bool = True,
    gone_by_gradient: int = 0,
    gone_by_step: int = 0,
) -> Stage:
    """A stage whose parameters are those of ``linears``, or of their adapters.

    Where no gradient goes through their input, dropout keeps no mask. ``gone_by_gradient``: bytes of the worst moment
    let go of when the largest gradient is made; ``gone_by_step`` when it is stepped.
    """
    e = site.element_bytes
    mask_bytes = site.dropout_mask_bytes if input_has_gradient else 0
    sizes = [linear.parameters for linear in linears]
    whole, unpacked = whole_weight_bytes(site, linears), _unpacked_bytes(site, linears)
    match site.plan.tuning:
        case Lora(rank=rank, dropout=dropout, dora=dora):
            adapted = site.adapted(linears)
            again = max(again, _unpacked_bytes(site, linears, input_kept=dropout == 0) if dora else 0)
            sizes = [
                rank * (m.in_features + m.out_features) * m.copies + m.out_features * dora for m in adapted
            ]
            kept += sum(
                activations.dora_kept(
                    tokens=site.shape.tokens, in_features=m.in_features, out_features=m.out_features, element_bytes=e,
                    unpacked=dropout > 0 and m in site.quantised(linears),
                )
                for m in adapted
                if dora
            )  # fmt: skip
            kept += sum(
                activations.adapter_kept(
                    tokens=site.shape.tokens * m.active_copies, in_features=m.in_features, rank=rank, element_bytes=e,
                    dropout=dropout, mask_bytes=mask_bytes,
                )
                for m in adapted
            )  # fmt: skip
    largest = max(sizes, default=0)
    return Stage(
        name=name,
        kept=kept,
        forward=max(forward, unpacked),
        backward=backward + whole,
        again=again,
        making=making,
        incoming=incoming,
        gradients=sum(sizes) * e,
        largest_gradient=max(
            0, largest * e - gone_by_gradient, largest * e + stepping_bytes(site.plan, largest) - gone_by_step
        ),
    )


def whole_weight_bytes(site: Site, linears: Sequence[Linear]) -> int:
    """The largest packed weight of the stage, dequantised for the product with the gradient."""
    return max(
        (
            dequantisation_workspace_bytes(m, element_bytes=site.element_bytes)
            for m in site.quantised(linears)
        ),
        default=0,
    )


def _unpacked_bytes(site: Site, linears: Sequence[Linear], *, input_kept: bool = False) -> int:
    """The worst product of the stage with a packed weight, or the worst norm that DoRA takes.

    ``input_kept``: the input is counted with what the stage before keeps.
    """
    packed, adapted = site.quantised(linears), site.adapted(linears)
    dora = isinstance(site.plan.tuning, Lora) and site.plan.tuning.dora
    input_bytes = site.shape.tokens * site.element_bytes * input_kept
    return max(
        (
            transient.unpacked_linear_working(
                tokens=site.shape.tokens, hidden=site.model.hidden_size, in_features=m.in_features,
                out_features=m.out_features, element_bytes=site.element_bytes, packed=m in packed,
                dora=dora and m in adapted,
            )
            - input_bytes * m.in_features
            for m in linears
            if m in packed or (dora and m in adapted)
        ),
        default=0,
    )  # fmt: skip
