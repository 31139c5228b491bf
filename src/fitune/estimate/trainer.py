"""Another trainer's step, by the few physical ways in which it differs from fitune's.

They change the description of the step; ``memory_of`` and ``step_time_of`` price it like any other, on one timeline.
"""

from dataclasses import dataclass, replace

from fitune.estimate.blocks.block import block_stages
from fitune.estimate.buffers import (
    REDUCE_BUCKET,
    Buffers,
    block_weight_bytes,
    block_weights,
    deepspeed_default_buffers,
    gathered_throughout,
)
from fitune.estimate.division import (
    gradients_are_divided,
    num_shares,
    share_elements,
    trained_share,
    uses_deepspeed,
    uses_fsdp,
    weights_are_divided,
    zero_stage,
)
from fitune.estimate.model_profile import ModelProfile, model_profile
from fitune.estimate.parameters import head_parameters, root_weight_bytes
from fitune.estimate.states import (
    SUB_GROUP,
    deepspeed_step_bytes,
    gradients_go_to_the_host,
    has_masters,
    states_per_parameter,
)
from fitune.estimate.step import StepStages, Terms, describe_step
from fitune.values.counts import adapter_tensors, base_tensors, trained_tables
from fitune.values.model.architectures import repeated_keys_once
from fitune.values.model.block_profile import BatchShape, BlockProfile, Stage
from fitune.values.model.model_spec import Linear
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Dense,
    Lora,
    Plan,
    base_of,
    trains_every_weight,
    updates_in_backward,
)

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The switches. The defaults are fitune's own step."""

    bytes_per_logit: int = 0
    """Alive for each logit at the loss's worst moment, of all tokens at once or of a chunk; 0: fitune's loss."""
    fp32_trained: bool = False
    """Trained weights, their gradients and states are fp32: PEFT's adapters (``autocast_adapter_dtype``), accelerate's
    shards under FSDP, fp32 weights under autocast. DeepSpeed's engine makes them 16 bit again."""
    autocast: bool = False
    """torch.autocast runs the forward: operands of products that are wider have 16-bit copies."""
    fp32_root: bool = False
    """Embedding, head and norms beside a packed base are fp32 (peft, prepare_model_for_kbit_training)."""
    fp32_stream: bool = False
    """… and so is the residual stream: a packed linear answers in the type of its input (bitsandbytes MatMul4Bit)."""
    foreach: bool = False
    """torch's AdamW of many tensors at once: one more set of what it steps (torch/optim/adamw.py, _multi_tensor)."""
    fsdp1: bool = False
    """FullyShardedDataParallel: flat parameters; the root's are whole from forward to the end of backward."""
    prefetches: bool = False
    """Under FSDP1: the next block is gathered while one goes back (BackwardPrefetch.BACKWARD_PRE)."""
    reentrant: bool = False
    """Reentrant checkpoints: a block's output, made again, stays while the block goes back
    (torch/utils/checkpoint.py, CheckpointFunction.backward), and the first block's input has a gradient, too, without
    which nothing in it would have one (transformers, enable_input_require_grads)."""
    repeats_keys: bool = False
    """Keys and values are repeated for every query head before flash attention (architectures.py)."""
    holds_inputs: bool = False
    """FSDP1 around reentrant checkpoints of frozen blocks: inputs and their gradients stay to the end of backward
    (torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook) as
    tests/laws/test_held_inputs.py shows."""
    default_buckets: bool = False
    """DeepSpeed's reduce bucket at its default of 5e8 elements, however little is trained."""
    eager_mlp: bool = False
    """Fused norms and rotary positions beside transformers' own MLP (fms-acceleration, README of its plugin
    fused-ops-and-kernels: the gated product is used inside fused adapters alone). Adapters are fused on a packed base:
    they keep the 16-bit input that they share, and with dropout each its own, without masks (its fast_lora.py)."""


FITUNE = Trainer()


def describe_step_of(trainer: Trainer, plan: Plan, shape: BatchShape) -> StepStages:
    """The step of ``plan`` as ``trainer`` runs it."""
    if trainer == FITUNE:
        return describe_step(plan, shape)
    step = describe_step(plan, shape, _profile(trainer, plan, shape))
    wide = _Widened.of(step) if trainer.fp32_trained and not uses_deepspeed(plan) else _Widened()
    copies = trainer.autocast and step.full and wide.fresh > 0
    fp32_stream = copies or (trainer.fp32_stream and _is_packed(plan))
    hidden = step.hidden * (2 if fp32_stream else 1)
    holds = trainer.fsdp1 and trainer.holds_inputs and uses_fsdp(plan) and step.recomputed > 0
    held = 2 * hidden if holds and not step.full else 0
    # of a block, made again: where inputs' gradients are held, the step counts the one that reaches it already
    output = hidden if trainer.reentrant and not held else 0
    return replace(
        step,
        blocks=tuple(
            replace(
                block,
                recomputed_peak=replace(
                    block.recomputed_peak, temporaries=block.recomputed_peak.temporaries + output
                ),
            )
            for block in step.blocks
        ),
        resident=_resident(step, trainer, wide),
        gradients=step.gradients + wide.gradients,
        whole_gradients=step.whole_gradients + wide.fresh,
        head_gradient=step.head_gradient * (_FP32 // step.element_bytes if wide.fresh else 1),
        update=_update(step, trainer, wide),
        buffers=_buffers(step, trainer),
        hidden=hidden,
        fp32_stream=fp32_stream,
        logit_bytes=trainer.bytes_per_logit,
        held_behind=held,
        weight_copies=_weight_copies(step) if copies else 0,
        casts=_casts(step, trainer, wide, fp32_stream=fp32_stream),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widened:
    """Bytes more of trained weights, gradients at rest, fresh gradients and states that are fp32 instead of 16 bit."""

    weights: int = 0
    gradients: int = 0
    fresh: int = 0
    states: int = 0
    stepped: int = 0

    @classmethod
    def of(cls, step: StepStages) -> "_Widened":
        """Bytes more on one rank: 4 less those of the compute type, for each trained element and each of its states."""
        plan = step.plan
        tensors = adapter_tensors(plan) or base_tensors(plan.model)
        more = _FP32 - plan.precision.compute_bytes
        share, whole = share_elements(tensors, plan), sum(t.elements * t.count for t in tensors)
        on_host = plan.offload.optimizer != "device"
        rests = not updates_in_backward(plan.tuning) and not gradients_go_to_the_host(plan)
        narrow = not (has_masters(plan) or on_host or isinstance(plan.optimizer, AdamW8bit))
        return cls(
            weights=more * (share if weights_are_divided(plan) else whole),
            gradients=more * (share if gradients_are_divided(plan) else whole) if rests else 0,
            fresh=0 if uses_fsdp(plan) else more * whole,
            states=more * states_per_parameter(plan.optimizer) * share if narrow else 0,
            stepped=0 if on_host else more * share,
        )


def _resident(step: StepStages, trainer: Trainer, wide: _Widened) -> Terms:
    """fp32 weights need no masters; PEFT trains copies of the tables it saves (peft/utils/other.py)."""
    plan, e = step.plan, step.element_bytes
    terms = dict(step.resident)
    terms["weights" if step.full else "adapters"] += wide.weights
    terms["optimizer"] += wide.states
    if wide.stepped:
        terms["masters"] = 0
    if isinstance(plan.tuning, Lora):
        terms["adapters"] += e * sum(t.elements for t in trained_tables(plan.model, plan.tuning))
    if trainer.fp32_root and _is_packed(plan) and e < _FP32:
        parts = num_shares(plan) if weights_are_divided(plan) else 1
        root = sum(t.elements * t.count for t in base_tensors(plan.model) if not t.in_block)
        terms["weights"] += (_FP32 - e) * root // parts
    return terms


def _update(step: StepStages, trainer: Trainer, wide: _Widened) -> Terms:
    plan = step.plan
    terms = dict(step.update)
    if terms["gradients"]:
        terms["gradients"] += wide.gradients
    if wide.stepped:
        terms["temporaries"] = 0
    if uses_deepspeed(plan) and terms["temporaries"]:
        terms["temporaries"] = deepspeed_step_bytes(plan, SUB_GROUP)
    idle = updates_in_backward(plan.tuning) or plan.offload.optimizer != "device" or uses_deepspeed(plan)
    if trainer.foreach and isinstance(plan.optimizer, AdamW) and not idle:
        width = _FP32 if has_masters(plan) and not wide.stepped else step.element_bytes
        terms["temporaries"] += width * trained_share(plan) + wide.stepped
    return terms


def _buffers(step: StepStages, trainer: Trainer) -> Buffers:
    """FSDP1: the root from forward on, a block while it works, all of them below stage 3."""
    plan, buffers = step.plan, step.buffers
    if uses_deepspeed(plan):
        buffers = deepspeed_default_buffers(plan)
        if trainer.default_buckets and not updates_in_backward(plan.tuning):
            bucket = max(buffers.buckets, REDUCE_BUCKET * step.element_bytes)
            buffers = replace(buffers, buckets=bucket, standing=bucket)
        return buffers
    if not (trainer.fsdp1 and uses_fsdp(plan)):
        return buffers
    root, block = root_weight_bytes(plan), block_weight_bytes(plan)
    if zero_stage(plan) < 3:
        return gathered_throughout(root + sum(block_weights(plan)))
    backward = root + block * (2 if trainer.prefetches else 1)
    return replace(
        gathered_throughout(root), gathering=root + block, forward=root + 2 * block, backward=backward
    )


def _casts(step: StepStages, trainer: Trainer, wide: _Widened, *, fp32_stream: bool) -> tuple[float, float]:
    """Bytes that casts move per token, forward and backward, in all blocks.

    fp32 adapters: 16·out + 8·in and 20·out + 10·in: the input is cast and read, B's output, its scaling and the sum are
    fp32 and cast back; under autocast the input is cast to fp32 and back, 12·in each way (peft/tuners/lora/layer.py).
    An fp32 stream: each packed linear casts input and output, 6·(in + out), and what lies between is twice as wide
    (estimate/blocks/eager.py): 2·(5·f + 6·h) and 2·(9·f + 18·h).
    """
    model, layers = step.plan.model, step.num_layers
    forward = backward = 0.0
    if wide.stepped and isinstance(step.plan.tuning, Lora):
        adapted = [m for m in model.linears if m.is_target(step.plan.tuning.targets)]
        read, written = sum(m.in_features for m in adapted), sum(m.out_features for m in adapted)
        forward += 12 * read if trainer.autocast else 16 * written + 8 * read
        backward += 12 * read if trainer.autocast else 20 * written + 10 * read
    if fp32_stream:
        h, f = model.hidden_size, model.intermediate_size
        packed = 6 * sum((m.in_features + m.out_features) * m.active_copies for m in model.linears)
        forward += packed + 2 * (5 * f + 6 * h)
        backward += packed + 2 * (9 * f + 18 * h)
    return layers * forward, layers * backward


def _weight_copies(step: StepStages) -> int:
    """e per weight of a linear: autocast caches them until its context ends (ATen/autocast_mode.cpp, cached_cast)."""
    matrices = [t for t in base_tensors(step.plan.model) if t.in_block and t.is_matrix]
    blocks = sum(t.elements * t.count for t in matrices)
    return step.element_bytes * (blocks + head_parameters(step.plan.model))


def _profile(trainer: Trainer, plan: Plan, shape: BatchShape) -> ModelProfile:
    """The blocks with this trainer's stages, those of one kind still one object."""
    profile = model_profile(plan, shape)
    if trainer.reentrant and plan.recompute.blocks:
        blocks = profile.blocks
        profile = replace(profile, blocks=(blocks[min(1, len(blocks) - 1)], *blocks[1:]))
    changed: dict[int, BlockProfile] = {}
    for block in profile.blocks:
        if id(block) not in changed:
            stages = tuple(_stage(trainer, plan, shape, stage) for stage in block.stages)
            changed[id(block)] = replace(block, stages=stages)
    return replace(profile, blocks=tuple(changed[id(block)] for block in profile.blocks))


def _stage(trainer: Trainer, plan: Plan, shape: BatchShape, stage: Stage) -> Stage:
    if trainer.eager_mlp and stage.name.startswith("MLP") and "norm" not in stage.name:
        eager = {each.name: each for each in block_stages(replace(plan, kernels="torch"), shape)}
        stage = eager[stage.name]
    if stage.name == "MLP activation" and trainer.fp32_stream and _is_packed(plan):
        stage = replace(stage, kept=2 * stage.kept, backward=2 * stage.backward)
    model, e = plan.model, plan.precision.compute_bytes
    if stage.name == "queries, keys, values" and trainer.repeats_keys and repeated_keys_once(model):
        stage = replace(stage, kept=stage.kept + shape.tokens * e * 2 * (model.q_dim - model.kv_dim))
    if not trainer.fp32_trained or uses_deepspeed(plan) or e == _FP32:
        return stage
    if not uses_fsdp(plan):
        width = _FP32 // e
        stage = replace(
            stage, gradients=width * stage.gradients, largest_gradient=width * stage.largest_gradient
        )
    fused = trainer.eager_mlp and _is_packed(plan)
    return _with_cast_inputs(stage, plan, shape, width=e if trainer.autocast else _FP32, fused=fused)


_READERS = {"attention norm": "attention", "MLP norm": "mlp"}
_CASTS = {
    "queries, keys, values": ("attention", True), "attention output": ("attention", False),
    "MLP inputs": ("mlp", True), "MLP output": ("mlp", False),
}  # fmt: skip


def _with_cast_inputs(stage: Stage, plan: Plan, shape: BatchShape, *, width: int, fused: bool) -> Stage:
    """An fp32 adapter casts its input: a copy for every adapted linear instead of the shared 16-bit one.

    ``width`` bytes of it are kept: 4, or autocast's 2 (peft/tuners/lora/layer.py, Linear.forward). With dropout they
    stand in place of a dropped input of e bytes; a CPU's mask is as wide as the fp32 input. ``fused``: no cast.
    """
    if not isinstance(plan.tuning, Lora):
        return stage
    e, extra = plan.precision.compute_bytes, 0
    shares = plan.tuning.dropout == 0
    if fused:
        width = 0 if shares else -1  # no mask, which is a byte
    elif not shares and not plan.hardware.gpu.is_cpu:
        width -= e
    if stage.name in _READERS and _adapted(plan, _READERS[stage.name], inputs=True):
        extra = e * plan.model.hidden_size * (fused - shares)
    elif stage.name in _CASTS:
        part, inputs = _CASTS[stage.name]
        less = e if shares and stage.name == "MLP output" else 0
        extra = (width - less) * sum(m.in_features for m in _adapted(plan, part, inputs=inputs))
    return replace(stage, kept=stage.kept + shape.tokens * extra)


def _adapted(plan: Plan, part: str, *, inputs: bool) -> list[Linear]:
    """Adapted linears that read a norm's output, or the one that ends the part."""
    linears = [m for m in plan.model.linears if m.part == part]
    chosen = linears[:-1] if inputs else linears[-1:]
    return [m for m in chosen if isinstance(plan.tuning, Lora) and m.is_target(plan.tuning.targets)]


def _is_packed(plan: Plan) -> bool:
    return not isinstance(base_of(plan), Dense) and not trains_every_weight(plan.tuning)
