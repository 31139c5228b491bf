"""A processor's precision follows from its rates, of the whole step; the plan says which and why."""

from dataclasses import replace

import pytest

from fitune.planner.search import find_plan
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.machines.hardware import AttentionRate, Calibration, Rate, Traffic
from fitune.values.plan import Lomo, Precision
from plans import lines_of, recipe_of, report_of, small_llama

WITHOUT_BF16, WITH_BF16 = (
    hardware_for(gpu=cpu_gpu(memory_bytes=64 * GIB, cores=2, has_bf16_products=has)) for has in (False, True)
)


def measured(*, fp32, bf16, elementwise_bf16=20e9):
    """A processor of 64 GiB with these FLOP/s of products."""
    rates = {"fp32": fp32, "bf16": bf16}
    calibration = Calibration(
        device="cpu-2-threads",
        date="2026-11-21",
        threads=2,
        products=tuple(Rate(numbers=numbers, flops=flops) for numbers, flops in rates.items()),
        attention=tuple(AttentionRate(numbers=numbers, flops=flops) for numbers, flops in rates.items()),
        traffic=(
            Traffic(tensor_bytes=2**20, bandwidth=30e9),
            Traffic(tensor_bytes=2**20, bandwidth=elementwise_bf16, numbers="bf16"),
        ),
        forward_launch_seconds=1e-5,
        backward_launch_seconds=1e-5,
        cpu_adam=1e9,
    )
    return replace(WITHOUT_BF16, calibration=calibration)


FAST = measured(fp32=93e9, bf16=410e9)


def planned(hardware, settings="tuning: full"):
    """The plan, its precision, and the line that gives the reason of the precision."""
    report = report_of("qwen3-0.6b", hardware, settings, data=["none.jsonl"], seq_len=512)
    plan = report.chosen.plan
    return plan, plan.precision, "".join(lines_of(report, "precision: "))


def test_fast_bf16_is_taken_and_explained_by_seconds():
    _, precision, reason = planned(FAST)
    assert precision is Precision.BF16_MASTER
    assert "(calibrated on 2026-11-21)" in reason


@pytest.mark.parametrize("bf16", [1e9, 93e9])
def test_fp32_stays_where_bf16_is_not_clearly_faster(bf16):
    _, precision, reason = planned(measured(fp32=93e9, bf16=bf16))
    assert precision is Precision.FP32
    assert "fp32: a step takes" in reason


def test_the_whole_step_counts_and_not_its_products_alone():
    """Products twice as fast gain little where elementwise work in bf16 takes the time."""
    assert planned(measured(fp32=400e9, bf16=800e9, elementwise_bf16=2e9))[1] is Precision.FP32


@pytest.mark.parametrize(("tuning", "precision"), [("full", "fp32"), ("lora", "bf16-master")])
def test_what_the_user_sets_is_kept(tuning, precision):
    assert planned(FAST, f"tuning: {tuning}, precision: {precision}")[1] == precision


def test_lomo_keeps_fp32_weights_on_a_processor():
    """It has no masters: in bf16 small updates of its weights would be lost."""
    plan, precision, _ = planned(FAST, "tuning: lomo")
    assert isinstance(plan.tuning, Lomo)
    assert precision is Precision.FP32


@pytest.mark.parametrize(
    ("hardware", "taken", "said"),
    [
        (WITH_BF16, Precision.BF16_MASTER, "(assumed rates)"),
        (WITHOUT_BF16, Precision.FP32, "names no bf16 instructions"),
    ],
)
def test_without_a_calibration_the_processors_instructions_decide(hardware, taken, said):
    _, precision, reason = planned(hardware)
    assert precision is taken
    assert said in reason


def test_a_model_that_only_launches_stays_in_fp32():
    model = small_llama()
    recipe = recipe_of(model.name, "data: [none.jsonl], seq_len: 64, tuning: full")
    assert find_plan(recipe, model=model, hardware=WITH_BF16).chosen.plan.precision is Precision.FP32


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
    [note] = lines_of(report_of("qwen3-0.6b", hardware, "tuning: lora, seq_len: 512"), "note on times")
    assert said in note
    assert command in note
