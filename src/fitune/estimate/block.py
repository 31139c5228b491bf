"""The stages of one decoder block, for every architecture of spec/families.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.estimate import activations, transient
from fitune.estimate.shape import BatchShape
from fitune.estimate.stages import Stage
from fitune.spec.model import Linear, ModelSpec
from fitune.spec.plan import Full, Lora, Plan

_SCALED_IN_FP32 = ("gemma2", "gemma3_text")
"""RMSNorms that multiply by their weight before they cast back."""
_COMPOSED_GELU = ("gpt2", "phi")
_OWN_ATTENTION = ("falcon",)
"""Architectures that bring their attention classes and take a mask over the whole stream."""


@dataclass(frozen=True, slots=True)
class _Site:
    """What the formulas of one block share."""

    plan: Plan
    shape: BatchShape
    first: bool
    """No gradient goes further back than this block's adapters when only adapters train."""

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def full(self) -> bool:
        return isinstance(self.plan.tuning, Full)

    @property
    def element_bytes(self) -> int:
        return self.plan.precision.compute_bytes

    @property
    def gradient_enters(self) -> bool:
        return self.full or not self.first

    @property
    def dropout(self) -> float:
        return self.plan.tuning.dropout if isinstance(self.plan.tuning, Lora) else 0.0

    def adapted(self, linears: Sequence[Linear]) -> tuple[Linear, ...]:
        match self.plan.tuning:
            case Lora(targets=targets):
                return tuple(m for m in linears if m.adaptable and m.name.rsplit(".", 1)[-1] in targets)
            case Full():
                return ()

    def trains(self, linears: Sequence[Linear]) -> bool:
        return self.full or bool(self.adapted(linears))

    def reads_input(self, linears: Sequence[Linear]) -> bool:
        """Whether the linears keep the input they share; dropped-out adapters keep their own instead."""
        return self.full or (bool(self.adapted(linears)) and self.dropout == 0)


def block_stages(plan: Plan, shape: BatchShape, *, first: bool) -> tuple[Stage, ...]:
    """Attention and MLP in the order they run; parallel blocks share or repeat the input norm."""
    site = _Site(plan, shape, first)
    attention = [m for m in plan.model.linears if m.part == "attention"]
    mlp = [m for m in plan.model.linears if m.part != "attention"]
    projections, output = attention[:-1], attention[-1:]
    enters = site.gradient_enters
    inside = enters or site.trains(projections)
    after = inside or site.trains(output)
    return tuple(
        [
            _norm(site, "attention norm", passes=enters, read_by=projections),
            *_attention(site, projections, output, passes=inside),
            *_sandwich_norm(site, "attention output norm", passes=after),
            *_second_norm(site, passes=after, read_by=mlp[:-1]),
            *(_experts(site, mlp) if plan.model.num_experts else _mlp(site, mlp, passes=after)),
            *_sandwich_norm(site, "MLP output norm", passes=after or site.trains(mlp)),
        ]
    )


def final_norm_stage(plan: Plan, shape: BatchShape) -> Stage:
    """The norm after the last block. Its output is the hidden state, which the trainer holds itself."""
    return _norm(_Site(plan, shape, False), "final norm", passes=True, read_by=())


def _norm(site: _Site, name: str, *, passes: bool, read_by: Sequence[Linear]) -> Stage:
    """A norm over the hidden size, with the input that the linears behind it share."""
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    h = model.hidden_size
    output = activations.linear_input_kept(
        tokens=t, size=h, element_bytes=e, needed=site.reads_input(read_by) and bool(read_by)
    )
    freed = int(output > 0) + int(site.full)
    weights = h if site.full else 0
    if model.norm_type == "layer":
        kept = activations.layer_norm_kept(
            tokens=t, size=h, element_bytes=e, gradient_passes=passes, trained=site.full
        )
        backward = transient.layer_norm_backward(
            tokens=t, hidden=h, element_bytes=e, freed_sizes=int(output > 0)
        )
        weights *= 2
    else:
        in_fp32 = model.model_type in _SCALED_IN_FP32
        kept = activations.rms_norm_kept(
            tokens=t,
            size=h,
            groups=1,
            element_bytes=e,
            gradient_passes=passes,
            trained=site.full,
            scaled_in_fp32=in_fp32,
        )
        backward = transient.rms_norm_backward(tokens=t, hidden=h, element_bytes=e, freed_sizes=freed)
    return Stage(
        name=name,
        kept=kept + output,
        forward=transient.rms_norm_forward(tokens=t, hidden=h, element_bytes=e),
        backward=backward if passes or site.full else 0,
        gradients=weights * e,
        largest_gradient=weights * e,
    )


def _second_norm(site: _Site, *, passes: bool, read_by: Sequence[Linear]) -> Iterator[Stage]:
    if site.model.norms_per_block < 2:
        return
    norm = _norm(site, "MLP norm", passes=passes, read_by=read_by)
    if not site.model.parallel_blocks:
        yield norm
        return
    same_input = site.shape.tokens * site.model.hidden_size * site.element_bytes
    yield replace(
        norm, kept=norm.kept - (same_input if passes or site.full else 0)
    )  # both read the block's input


def _sandwich_norm(site: _Site, name: str, *, passes: bool) -> Iterator[Stage]:
    """Gemma normalises what attention and MLP give back, before it is added."""
    if site.model.norms_per_block >= 4:
        yield _norm(site, name, passes=passes, read_by=())


def _attention(
    site: _Site, projections: Sequence[Linear], output: Sequence[Linear], *, passes: bool
) -> Iterator[Stage]:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    sizes = {"hidden": model.hidden_size, "q_dim": model.q_dim, "kv_dim": attended_kv_dim(model)}
    kept = _queries_keys_values(site, projections) if passes else 0
    yield _linears_stage(
        site, "queries, keys, values", projections,
        kept=kept,
        forward=transient.projections_forward(tokens=t, element_bytes=e, **sizes),
        backward=transient.projections_backward(tokens=t, element_bytes=e, **sizes) if passes else 0,
    )  # fmt: skip
    yield _scores(site, output, passes=passes)
    yield _linears_stage(
        site, "attention output", output,
        kept=0,
        forward=0,
        backward=transient.output_projection_backward(
            tokens=t, hidden=model.hidden_size, q_dim=model.q_dim, element_bytes=e, adapted=not site.full
        ),
    )  # fmt: skip


def _queries_keys_values(site: _Site, projections: Sequence[Linear]) -> int:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    rotary = model.learned_positions == 0
    if is_multi_query(model):
        kept = 0  # attention keeps fp32 copies of its own
    elif materialises_scores(site.plan):
        kept = activations.queries_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, element_bytes=e, rotary=rotary
        )
    else:
        kept = activations.queries_keys_values_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=attended_kv_dim(model), element_bytes=e,
            rotary=rotary, fused=len(projections) == 1 and model.model_type not in _OWN_ATTENTION,
        )  # fmt: skip
    if model.qk_norm == "none":
        return kept
    norm = activations.rms_norm_kept(
        tokens=t, size=model.q_dim + model.kv_dim, groups=model.num_heads + model.num_kv_heads, element_bytes=e,
        gradient_passes=True, trained=site.full, scaled_in_fp32=model.model_type in _SCALED_IN_FP32,
    )  # fmt: skip
    return kept + norm


def _scores(site: _Site, output: Sequence[Linear], *, passes: bool) -> Stage:
    """Attention itself: fused, or written out."""
    model, shape, e = site.model, site.shape, site.element_bytes
    rows = 1 if masks_whole_stream(model) else shape.rows
    common = {"tokens": shape.tokens, "rows": rows, "q_dim": model.q_dim, "num_heads": model.num_heads}
    needed = site.reads_input(output)
    if is_multi_query(model):
        return _multi_query_scores(site, output_needed=needed, passes=passes)
    if materialises_scores(site.plan):
        kept = activations.eager_attention_kept(
            **common, row_tokens=shape.row_tokens, element_bytes=e, output_needed=needed,
            softcapped=model.model_type == "gemma2",
        )  # fmt: skip
        working = transient.eager_attention_working(
            tokens=shape.tokens, row_tokens=shape.row_tokens, hidden=model.hidden_size, q_dim=model.q_dim,
            num_heads=model.num_heads, element_bytes=e,
        )  # fmt: skip
        return Stage(name="attention", kept=kept if passes else 0, forward=working, backward=working)
    kept = activations.fused_attention_kept(**common, element_bytes=e, output_needed=needed)
    backward = transient.fused_attention_backward(
        **common, hidden=model.hidden_size, kv_dim=attended_kv_dim(model), element_bytes=e,
        on_cuda=not site.plan.hardware.gpu.is_cpu,
    )  # fmt: skip
    return Stage(name="attention", kept=kept if passes else 0, forward=0, backward=backward if passes else 0)


def _multi_query_scores(site: _Site, *, output_needed: bool, passes: bool) -> Stage:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    kept = activations.multi_query_attention_kept(
        tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, num_heads=model.num_heads, element_bytes=e,
        output_needed=output_needed,
    )  # fmt: skip
    working = transient.multi_query_attention_working(
        tokens=t, num_heads=model.num_heads, hidden=model.hidden_size, element_bytes=e
    )
    return Stage(name="attention", kept=kept if passes else 0, forward=3 * working // 2, backward=working)


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


def _mlp(site: _Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    inputs, down = linears[:-1], linears[-1:]
    h, f = model.hidden_size, model.intermediate_size
    gated = model.mlp_type == "gated"
    composed = model.model_type in _COMPOSED_GELU
    reaches = passes or site.trains(inputs)
    yield _linears_stage(
        site, "MLP inputs", inputs,
        kept=0,
        forward=0,
        backward=transient.mlp_inputs_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, partial_gradients=2 if gated else 1
        ),
    )  # fmt: skip
    if gated:
        kept = activations.gated_mlp_kept(tokens=t, width=f, element_bytes=e)
        backward = transient.gate_backward(tokens=t, hidden=h, width=f, element_bytes=e)
    else:
        kept = activations.plain_mlp_kept(tokens=t, width=f, element_bytes=e, composed_gelu=composed)
        backward = transient.activation_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, composed_gelu=composed
        )
    yield Stage(
        name="MLP activation",
        kept=kept if reaches else 0,
        forward=transient.mlp_forward(
            tokens=t, hidden=h, width=f, element_bytes=e,
            tensors=(3 if gated or composed else 2) + bool(site.adapted(inputs)),
        ),
        backward=backward if reaches else 0,
    )  # fmt: skip
    yield _linears_stage(
        site, "MLP output", down,
        kept=activations.linear_input_kept(tokens=t, size=f, element_bytes=e, needed=site.reads_input(down)),
        forward=0,
        backward=transient.down_projection_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, adapted=not site.full
        ),
    )  # fmt: skip


def _experts(site: _Site, linears: Sequence[Linear]) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens."""
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    h, f, chosen = model.hidden_size, model.intermediate_size, model.experts_per_token
    sizes = {"tokens": t, "chosen": chosen, "hidden": h, "element_bytes": e}
    yield _linears_stage(
        site, "expert inputs", linears[:-1],
        kept=activations.expert_inputs_kept(**sizes, num_experts=model.num_experts, trained=site.full),
        forward=0,
        backward=transient.expert_inputs_backward(**sizes, width=f),
    )  # fmt: skip
    yield Stage(
        name="expert gates",
        kept=chosen * activations.gated_mlp_kept(tokens=t, width=f, element_bytes=e),
        forward=transient.mlp_forward(tokens=t, hidden=2 * h, width=f * chosen, element_bytes=e, tensors=4),
        backward=transient.gate_backward(tokens=t, hidden=h, width=f * chosen, element_bytes=e),
    )
    yield _linears_stage(
        site, "expert outputs", linears[-1:],
        kept=activations.expert_outputs_kept(**sizes, width=f, trained=site.full),
        forward=0,
        backward=transient.expert_outputs_backward(**sizes, width=f),
    )  # fmt: skip


def _linears_stage(
    site: _Site, name: str, linears: Sequence[Linear], *, kept: int, forward: int, backward: int
) -> Stage:
    """A stage whose parameters are those of ``linears``, or of their adapters."""
    e = site.element_bytes
    mask_bytes = e if site.plan.hardware.gpu.is_cpu else 1
    sizes = [linear.parameters for linear in linears]
    match site.plan.tuning:
        case Lora(rank=rank, dropout=dropout):
            adapted = site.adapted(linears)
            sizes = [rank * (m.in_features + m.out_features) for m in adapted]
            kept += sum(
                activations.adapter_kept(
                    tokens=site.shape.tokens, in_features=m.in_features, rank=rank, element_bytes=e,
                    dropout=dropout, mask_bytes=mask_bytes,
                )
                for m in adapted
            )  # fmt: skip
    return Stage(
        name=name,
        kept=kept,
        forward=forward,
        backward=backward,
        gradients=sum(sizes) * e,
        largest_gradient=max(sizes, default=0) * e,
    )
