"""Tokens per second of a published run: the estimate's seconds, and what its trainer's kernels and casts add."""

from fitune.estimate.eager import norm_traffic
from fitune.estimate.quantised import base_of, is_quantised
from fitune.estimate.rates import rates_of
from fitune.estimate.shares import uses_fsdp
from fitune.estimate.time import MODULE_HOOK_SECONDS, predict_step_time
from fitune.records.block import stream_is_fp32
from fitune.records.mapping import Case
from fitune.spec.model import Linear
from fitune.spec.plan import Dense, Lora

FUSED_FORWARD, FUSED_BACKWARD = 2, 3
"""Elements that a fused kernel moves for each of its own: in and out; gradient, input, gradient of the input."""
UNPACKED_IN_TORCH = 20
"""Bytes per weight when 4-bit words are unpacked by single torch operations: an int32 for each weight written and
read, cut to int8, masked, less its zero point, times its scale (auto_gptq qlinear_cuda_old.py, no exllama)."""


def tokens_per_second(case: Case) -> float:
    """Of one device: tokens of a step over its seconds."""
    accumulation = case.plan.batch.accumulation
    tokens = case.shape.tokens * accumulation
    seconds = predict_step_time(case.plan, case.shape).step_seconds
    if not case.habits.is_fitune:
        bandwidth = rates_of(case.plan.hardware, case.plan.precision).in_place_bandwidth
        per_token = passes_bytes(case, fused_bytes(case)) + passes_bytes(case, cast_bytes(case))
        seconds += (tokens * per_token + accumulation * unpacking_bytes(case)) / bandwidth
        seconds += accumulation * small_units(case) * MODULE_HOOK_SECONDS
    return tokens / seconds


def passes_bytes(case: Case, moved: tuple[float, float]) -> float:
    """All blocks: forward, backward, and forward again where they are recomputed."""
    layers = case.plan.model.num_layers
    again = min(case.plan.recompute.blocks, layers) / layers
    return layers * ((1 + again) * moved[0] + moved[1])


def fused_bytes(case: Case) -> tuple[float, float]:
    """Less than nothing: what one kernel for a norm, a rotation or a gate spares of eager code's traffic, per token."""
    plan, habits = case.plan, case.habits
    model, e = plan.model, plan.precision.compute_bytes
    forward = backward = 0.0
    if habits.fused_norms and model.norm_type == "rms":
        eager, size = norm_traffic(model, e), model.norms_per_block * model.hidden_size
        forward += size * (e * FUSED_FORWARD - eager.forward)
        backward += size * (e * FUSED_BACKWARD - eager.backward)
        turned = e * (model.q_dim + model.kv_dim)  # eager: 10 and 17 elements, estimate/eager.py
        forward += turned * (FUSED_FORWARD - 10)
        backward += turned * (FUSED_FORWARD - 17)
    if habits.fused_mlp and model.mlp_type == "gated":
        width = (
            e * model.intermediate_size
        )  # eager: 5 and 9; gate and up read, product written; three read, two written
        forward += width * (3 - 5)
        backward += width * (5 - 9)
    return forward, backward


def cast_bytes(case: Case) -> tuple[float, float]:
    """What fp32 adapters move beyond those of the compute type, per token: 16·out + 8·in and 20·out + 10·in.

    The input is cast and read in fp32, B's output, its scaling and the sum are fp32 and cast back, and the same way
    again in backward. Under autocast inputs are cast to fp32 and back: 12·in and 12·in. peft/tuners/lora/layer.py.
    """
    stream = _stream_bytes(case)
    if case.storage.weight <= case.plan.precision.compute_bytes:
        return stream
    adapted = _adapted(case)
    read, written = sum(m.in_features for m in adapted), sum(m.out_features for m in adapted)
    if case.storage.autocast:
        return 12.0 * read + stream[0], 12.0 * read + stream[1]
    return 16.0 * written + 8.0 * read + stream[0], 20.0 * written + 10.0 * read + stream[1]


def _stream_bytes(case: Case) -> tuple[float, float]:
    """What an fp32 residual stream moves beyond a 16-bit one: each packed linear casts input and output, 6·(in + out)
    each way, and what lies between them is twice as wide: 2·(5·f + 6·h) and 2·(9·f + 18·h) (estimate/eager.py).
    """
    if not stream_is_fp32(case):
        return 0.0, 0.0
    model = case.plan.model
    h, f = model.hidden_size, model.intermediate_size
    casts = 6.0 * sum((m.in_features + m.out_features) * m.active_copies for m in model.linears)
    return casts + 2.0 * (5 * f + 6 * h), casts + 2.0 * (9 * f + 18 * h)


def small_units(case: Case) -> float:
    """Gathers and sums of units too small to hide Python's hooks, in one micro-batch: as long as DeepSpeed's.

    FSDP1 by PEFT's wrapping policy: each adapter matrix is a unit: gathered forward, again, and back, then summed;
    fms-acceleration's fused adapters on packed bases are left to DDP instead.
    """
    plan, model = case.plan, case.plan.model
    again = min(plan.recompute.blocks, model.num_layers) / model.num_layers
    by_leaf = uses_fsdp(plan) and not case.habits.own_fsdp and case.habits.checkpoints_units
    if not by_leaf or ("foak" in case.row.remarks and not isinstance(base_of(plan), Dense)):
        return 0.0
    return model.num_layers * 2 * len(_adapted(case)) * (3 + again)


def unpacking_bytes(case: Case) -> float:
    """Per micro-batch: 20 bytes for every packed weight in every pass, where no kernel does it."""
    if not case.row.says("quant", "exllama off", "no exllama", "cuda-old", "cuda_old"):
        return 0.0
    model = case.plan.model
    packed = sum(m.weights for m in model.linears if is_quantised(m, base_of(case.plan)))
    return passes_bytes(case, (UNPACKED_IN_TORCH * packed, UNPACKED_IN_TORCH * packed))


def _adapted(case: Case) -> list[Linear]:
    tuning = case.plan.tuning
    if not isinstance(tuning, Lora):
        return []
    linears = case.plan.model.linears
    return [m for m in linears if m.is_target(tuning.targets)]
