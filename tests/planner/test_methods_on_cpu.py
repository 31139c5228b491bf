"""A processor's precision follows from its rates, of the whole step; the plan says which and why."""

from dataclasses import replace

import pytest

from fitune.planner.search import find_plan
from fitune.spec.machines.gpus import cpu_gpu, hardware_for
from fitune.spec.machines.hardware import AttentionRate, Calibration, Rate, Traffic
from fitune.spec.plan import Lomo, Precision
from fitune.spec.recipe.recipe import parse_recipe
from fitune.units import GIB
from plans import CPU, known, recipe_of, small_llama


def measured(*, fp32, bf16, elementwise_bf16=20e9):
    """A processor of 64 GiB with these FLOP/s of products."""
    calibration = Calibration(
        device="cpu-2-threads",
        date="2026-11-21",
        threads=2,
        products=(Rate(numbers="fp32", flops=fp32), Rate(numbers="bf16", flops=bf16)),
        attention=(AttentionRate(numbers="fp32", flops=fp32), AttentionRate(numbers="bf16", flops=bf16)),
        traffic=(
            Traffic(tensor_bytes=2**20, bandwidth=30e9),
            Traffic(tensor_bytes=2**20, bandwidth=elementwise_bf16, numbers="bf16"),
        ),
        forward_launch_seconds=1e-5,
        backward_launch_seconds=1e-5,
        cpu_adam=1e9,
    )
    return replace(hardware_for(gpu=cpu_gpu(memory_bytes=64 * GIB, cores=2)), calibration=calibration)


def plan(hardware, **settings):
    model = known("qwen3-0.6b")
    recipe = parse_recipe({"model": model.name, "data": ["none.jsonl"], "seq_len": 512, **settings})
    return find_plan(recipe, model=model, hardware=hardware)


def reason(report):
    return next(line for line in report.decisions if line.startswith("precision: "))


def test_fast_bf16_is_taken_and_explained_by_seconds():
    report = plan(measured(fp32=93e9, bf16=410e9), tuning="full")
    assert report.chosen.plan.precision is Precision.BF16_MASTER
    words = reason(report)
    assert "bf16-master" in words
    assert "in fp32 (calibrated on 2026-11-21)" in words
    assert "slow" not in words


@pytest.mark.parametrize("bf16", [1e9, 93e9])
def test_fp32_stays_where_bf16_is_not_clearly_faster(bf16):
    report = plan(measured(fp32=93e9, bf16=bf16), tuning="full")
    assert report.chosen.plan.precision is Precision.FP32
    assert "fp32, because a step takes" in reason(report)
    assert "calibrated on 2026-11-21" in reason(report)


def test_the_whole_step_counts_and_not_its_products_alone():
    """Products twice as fast gain little where elementwise work in bf16 takes the time."""
    slow = measured(fp32=400e9, bf16=800e9, elementwise_bf16=2e9)
    assert plan(slow, tuning="full").chosen.plan.precision is Precision.FP32


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_what_the_user_sets_is_kept(tuning):
    for precision in ("fp32", "bf16-master"):
        report = plan(measured(fp32=93e9, bf16=410e9), tuning=tuning, precision=precision)
        assert report.chosen.plan.precision == precision


def test_lomo_keeps_fp32_weights_on_a_processor():
    """It has no masters: in bf16 small updates of its weights would be lost."""
    taken = plan(measured(fp32=93e9, bf16=410e9), tuning="lomo").chosen.plan
    assert isinstance(taken.tuning, Lomo)
    assert taken.precision is Precision.FP32


def test_without_a_calibration_the_processors_instructions_decide():
    with_bf16 = hardware_for(gpu=cpu_gpu(memory_bytes=64 * GIB, cores=2, has_bf16_products=True))
    report = plan(with_bf16, tuning="full")
    assert report.chosen.plan.precision is Precision.BF16_MASTER
    assert "(assumed rates)" in reason(report)
    without = replace(CPU, gpu=replace(CPU.gpu, memory_bytes=64 * GIB))
    report = plan(without, tuning="full")
    assert report.chosen.plan.precision is Precision.FP32
    assert "names no bf16 instructions: 2 GFLOP/s in bf16, 80 in fp32" in reason(report)


def test_a_model_that_only_launches_stays_in_fp32():
    model = small_llama()
    recipe = recipe_of(model.name, data=["none.jsonl"], seq_len=64, tuning="full")
    hardware = hardware_for(gpu=cpu_gpu(memory_bytes=64 * GIB, cores=2, has_bf16_products=True))
    assert find_plan(recipe, model=model, hardware=hardware).chosen.plan.precision is Precision.FP32


@pytest.mark.parametrize(
    ("processes", "said", "command"),
    [
        (1, "was never measured, so", "; fitune doctor --calibrate"),
        (2, "was never measured with 2 processes of 4 threads each, so",
         "; OMP_NUM_THREADS=4 torchrun --nproc-per-node 2 -m fitune doctor --calibrate"),
        (8, "8 processes of 1 thread each,", "; OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 -m fitune"),
    ],
)  # fmt: skip
def test_what_measures_the_processor_as_the_run_will_use_it_is_named(processes, said, command):
    share = cpu_gpu(memory_bytes=8 * GIB, cores=8 // processes)
    hardware = hardware_for(gpu=share, gpus=processes, host_memory_bytes=64 * GIB, cpu_cores=8)
    [note] = [line for line in plan(hardware, tuning="lora").decisions if line.startswith("note on times")]
    assert said in note
    assert command in note
