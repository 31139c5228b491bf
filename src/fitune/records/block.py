"""One decoder block as a trainer's kernels and casts keep it: fitune's stages, changed where others differ."""

from dataclasses import replace

from fitune.estimate import activations
from fitune.estimate.block import block_stages
from fitune.estimate.quantised import base_of
from fitune.estimate.site import SCALED_IN_FP32
from fitune.estimate.stages import Block, Stage, block_of
from fitune.records.mapping import Case
from fitune.spec.model import Linear
from fitune.spec.plan import Dense, Lora, trains_every_weight

_NORM_READERS = {"attention norm": "attention", "MLP norm": "mlp"}


def block_of_case(case: Case) -> Block:
    """A block that gradients pass through, with what a checkpoint holds of it while it goes back."""
    stages = [_changed(case, stage) for stage in block_stages(case.plan, case.shape)]
    block = block_of(stages, gradients_exist=case.plan.batch.accumulation > 1)
    if not case.plan.recompute.blocks:
        return block
    held = replace(block.peak, temporaries=block.peak.temporaries + stream_bytes(case))
    return replace(block, peak=held)


def stream_bytes(case: Case) -> int:
    """The residual stream of a micro-batch: e·h per token, 4·h in fp32.

    A recomputed block keeps it as its input; its output is held too while the block goes back
    (torch/utils/checkpoint.py, CheckpointFunction.backward).
    """
    width = 4 if stream_is_fp32(case) else case.plan.precision.compute_bytes
    return case.shape.tokens * case.plan.model.hidden_size * width


def stream_is_fp32(case: Case) -> bool:
    """fp32 norms beside packed linears hand fp32 on: bitsandbytes casts its output back to its input's type."""
    return case.habits.fp32_stream and _is_packed(case)


def _is_packed(case: Case) -> bool:
    return not isinstance(base_of(case.plan), Dense)


def _changed(case: Case, stage: Stage) -> Stage:
    if stage.name in _NORM_READERS:
        stage = _with_fused_norm(case, stage)
    if stage.name == "attention norm" and stream_is_fp32(case) and case.plan.recompute.blocks:
        stage = replace(
            stage, kept=max(0, stage.kept - stream_bytes(case))
        )  # reads the kept input, makes no copy
    if stage.name == "MLP activation" and case.habits.fused_mlp and case.plan.model.mlp_type == "gated":
        kept = 2 * case.shape.tokens * case.plan.model.intermediate_size * case.plan.precision.compute_bytes
        stage = replace(stage, kept=min(stage.kept, kept))
    if stage.name == "MLP activation" and stream_is_fp32(case):
        stage = replace(
            stage, kept=2 * stage.kept, backward=2 * stage.backward
        )  # packed linears answer in fp32
    if stage.name == "MLP output" and case.habits.remakes_product and case.plan.model.mlp_type == "gated":
        stage = replace(stage, kept=max(0, stage.kept - _product_bytes(case)))
    if stage.name == "attention" and case.plan.model.model_type in case.habits.repeats_keys:
        stage = replace(stage, kept=stage.kept + _repeated_keys(case))
    if stage.name == "attention" and case.habits.clamps_scores and case.plan.attention == "eager":
        stage = replace(stage, kept=stage.kept + _clamped_scores(case))
    return _with_cast_inputs(case, stage)


def _clamped_scores(case: Case) -> int:
    """e·n·T per token: what torch.max was given, to know in backward where it let the scores through."""
    shape, model = case.shape, case.plan.model
    return shape.tokens * shape.row_tokens * model.num_heads * case.plan.precision.compute_bytes


def _product_bytes(case: Case) -> int:
    """e·f per token: what the down projection reads."""
    return case.shape.tokens * case.plan.model.intermediate_size * case.plan.precision.compute_bytes


def saved_by_operation(case: Case) -> int:
    """What a block keeps when it recomputes by operation: its input, attention's output, every second product's.

    e·h + e·q + 4n + e·Σ out of the linears 1, 3, 5, … per token (torchtitan, models/llama3/infra/parallelize.py,
    the policy of selective "op" recompute).
    """
    model, e = case.plan.model, case.plan.precision.compute_bytes
    products = sum(m.out_features for m in model.linears[::2])
    attention = e * model.q_dim + 4 * model.num_heads
    return stream_bytes(case) + case.shape.tokens * (attention + e * products)


def _repeated_keys(case: Case) -> int:
    """2·e·(q − k) per token: keys and values for every head instead of every group."""
    model = case.plan.model
    return 2 * case.shape.tokens * case.plan.precision.compute_bytes * (model.q_dim - model.kv_dim)


def _with_fused_norm(case: Case, stage: Stage) -> Stage:
    """t · (e·h + 4): 16-bit input and reciprocal root. A recomputed block's first norm reads the kept input itself."""
    model, e = case.plan.model, case.plan.precision.compute_bytes
    if not case.habits.fused_norms or model.norm_type != "rms" or not stage.kept:
        return stage
    eager = activations.rms_norm_kept(
        tokens=case.shape.tokens, size=model.hidden_size, groups=1, element_bytes=e, gradient_passes=True,
        trained=trains_every_weight(case.plan.tuning), scaled_in_fp32=model.model_type in SCALED_IN_FP32,
    )  # fmt: skip
    shared = stage.name == "attention norm" and case.plan.recompute.blocks > 0
    kept = case.shape.tokens * (activations.FP32 + (0 if shared else e * model.hidden_size))
    return replace(stage, kept=stage.kept - eager + kept)


def _with_cast_inputs(case: Case, stage: Stage) -> Stage:
    """PEFT casts an adapter's input to the adapter's type: a copy of its own for every adapted linear.

    Under autocast that copy goes back to 16 bit and is kept so; else it stays 4·in per token. The shared input is
    not kept then (peft/tuners/lora/layer.py, Linear.forward; torch autocast casts the operands of ``linear``).
    """
    tuning, e = case.plan.tuning, case.plan.precision.compute_bytes
    if not isinstance(tuning, Lora) or case.storage.weight <= e:
        return stage
    width = e if case.storage.autocast else case.storage.weight
    tokens, extra = case.shape.tokens, 0
    if stage.name in _NORM_READERS and tuning.dropout == 0:
        readers = _adapted(case, _NORM_READERS[stage.name], inputs=True)
        extra = -e * case.plan.model.hidden_size if readers else 0
    elif stage.name == "queries, keys, values":
        extra = width * sum(m.in_features for m in _adapted(case, "attention", inputs=True))
    elif stage.name == "attention output":
        extra = width * sum(m.in_features for m in _adapted(case, "attention", inputs=False))
    elif stage.name == "MLP inputs":
        extra = width * sum(m.in_features for m in _adapted(case, "mlp", inputs=True))
    elif stage.name == "MLP output":
        down = _adapted(case, "mlp", inputs=False)
        shared = e if tuning.dropout == 0 else 0
        extra = sum((width - shared) * m.in_features for m in down)
    return replace(stage, kept=stage.kept + tokens * extra)


def _adapted(case: Case, part: str, *, inputs: bool) -> list[Linear]:
    """Adapted linears that read a norm's output, or the one that ends the part."""
    tuning = case.plan.tuning
    assert isinstance(tuning, Lora)
    linears = [m for m in case.plan.model.linears if m.part == part]
    chosen = linears[:-1] if inputs else linears[-1:]
    return [m for m in chosen if m.is_target(tuning.targets)]
