"""Precision on a processor: bf16 where its rates make the step clearly faster, else fp32."""

from dataclasses import replace

from fitune.estimate.time import predict_step_time
from fitune.planner.candidates import batches, draft
from fitune.planner.methods import Method, methods
from fitune.planner.placements import Placement
from fitune.spec.flops import peak_flops
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Offload, Plan, Precision, Single
from fitune.spec.recipe import Recipe
from fitune.units import format_seconds

BF16_IS_WORTH = 1.25
"""In fp32 nothing is rounded to 8 bits: bf16 has to be as many times as fast to be taken where both fit."""


def methods_for(recipe: Recipe, *, model: ModelSpec, hardware: Hardware) -> tuple[Method, ...]:
    """All methods the recipe and the device allow, the preferred first; a processor's precision by its rates."""
    in_fp32 = methods(recipe, model=model, gpu=hardware.gpu)
    if not hardware.gpu.is_cpu or recipe.precision is not None:
        return in_fp32
    in_bf16 = (Precision.BF16_MASTER, Precision.FP32)
    found = methods(recipe, model=model, gpu=hardware.gpu, on_cpu=in_bf16)
    first = next((method for method in found if method.precision is Precision.BF16_MASTER), None)
    if first is None:
        return in_fp32
    alone = Placement(sharding=Single(), offload=Offload())
    plan = draft(recipe, first, alone, model=model, hardware=hardware)
    largest = batches(recipe, first, ranks=1)[:1] or (plan.batch,)
    if bf16_speedup(replace(plan, batch=largest[0])) < BF16_IS_WORTH:
        return in_fp32
    return found


def bf16_speedup(plan: Plan) -> float:
    """Seconds of the plan's step in fp32 / those with bf16 products and fp32 masters: all of it, not products alone."""
    return _seconds(plan, Precision.FP32) / _seconds(plan, Precision.BF16_MASTER)


def why_on_cpu(plan: Plan) -> str:
    """The reason for the precision that was taken on a processor, with its arithmetic."""
    speedup, rates = bf16_speedup(plan), plan.hardware.rates
    fp32, bf16 = (format_seconds(_seconds(plan, each)) for each in (Precision.FP32, Precision.BF16_MASTER))
    if plan.precision is Precision.BF16_MASTER:
        return (
            f"bf16-master, bf16 compute with fp32 masters, because a step takes {bf16} here and {fp32} in fp32 "
            f"({rates}): {speedup:.1f} × as fast, and {BF16_IS_WORTH:g} × is worth it; precision: fp32 rounds less"
        )
    gpu = plan.hardware.gpu
    if speedup < 1 and plan.hardware.calibration is None and gpu.bf16_flops < gpu.fp32_flops:
        here, there = (peak_flops(gpu, each) / 1e9 for each in (Precision.BF16_MASTER, Precision.FP32))
        return (
            f"fp32, because {gpu.name} names no bf16 instructions: {here:,.0f} GFLOP/s in bf16, {there:,.0f} in fp32 "
            f"({rates}); fitune doctor --calibrate measures both"
        )
    if speedup < BF16_IS_WORTH:
        return (
            f"fp32, because a step takes {fp32} here and {bf16} with bf16-master ({rates}): bf16 would have to be "
            f"{BF16_IS_WORTH:g} × as fast, it is {speedup:.1f} ×"
        )
    return f"fp32; bf16-master would be {speedup:.1f} × as fast ({rates}), but no plan with it fits"


def _seconds(plan: Plan, precision: Precision) -> float:
    return predict_step_time(replace(plan, precision=precision)).step_seconds
