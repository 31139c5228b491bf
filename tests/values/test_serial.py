"""Values survive JSON exactly, and a file edited by hand fails where it is wrong."""

import dataclasses
import math
from dataclasses import replace

import pytest

from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    DataPlan,
    DataSource,
    Ddp,
    Epochs,
    Fraction,
    Full,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Offload,
    PlainLoss,
    Plan,
    Precision,
    RunPlan,
    Schedule,
    Sgd,
    Steps,
    Zero,
)
from fitune.values.predictions import MemoryBreakdown, Phase
from fitune.values.reports import StepReport
from fitune.values.serial import from_data, from_json, to_data, to_json
from plans import gpu, known, plan_for


def plan(**different):
    """A plan on many machines, with a value of every kind in it."""
    whole = plan_for(
        known("mixtral-8x7b"), hardware=gpu("h100", gpus=8, nodes=2, internode_bandwidth=1e9), tuning="lora",
        targets=("q_proj", "v_proj"), precision="bf16-master", chunk=1024, recompute=7, attention="flash",
        schedule=Schedule(
            learning_rate=1e-4, kind="cosine", warmup=Fraction(of=0.03), duration=Epochs(count=1.5), max_grad_norm=1.0,
        ),
        data=DataPlan(sources=(DataSource(path="a.jsonl", columns=(("prompt", "question"),)),)),
        run=RunPlan(output_dir="runs/ä", report_to=("tensorboard",)),
    )  # fmt: skip
    return replace(whole, **different)


_LORA = {"rank": 8, "alpha": 8, "dropout": 0.1, "targets": ("q_proj",)}

CHOICES = [
    {},
    {"tuning": Full()},
    {"tuning": Full(update=InBackward(clip=ClipByNorm(max_norm=1.0))), "kernels": "liger", "compile_blocks": True},
    {"optimizer": Sgd(momentum=0.9)},
    {"loss": PlainLoss(), "precision": Precision.FP16},
    {"schedule": Schedule(learning_rate=1.0, kind="constant", warmup=Steps(count=0), duration=Steps(count=3),
                          max_grad_norm=0.0)},
    {"tuning": Lomo(adaptive=True, clip=ClipByNorm(max_norm=1.0))},
    {"tuning": Lomo(adaptive=False, clip=ClipByValue(value=0.5))},
    {"tuning": Lora(**_LORA, base=Nf4(double_quant=False), dora=True)},
    {"tuning": Lora(**_LORA, rslora=True, layers=(0, 3, 31), modules_to_save=("embed_tokens", "lm_head"))},
    {"optimizer": AdamW8bit(weight_decay=0.1), "added_tokens": ("<think>", "</think>"), "sharding": Ddp()},
    {"sharding": Zero(stage=2, backend="deepspeed", settings=(("overlap_comm", True), ("sub_group_size", 7)))},
    {"sharding": Zero(stage=3, backend="fsdp", hybrid=True), "offload": Offload(optimizer="nvme")},
]  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_strategies_survive_json(choice):
    chosen = plan(**choice)
    assert from_json(Plan, to_json(chosen)) == chosen


def test_a_plan_written_before_there_was_offload_and_all_that_came_later_still_reads():
    data, full = to_data(plan()), to_data(plan(tuning=Full()))
    for name in ("offload", "added_tokens", "kernels", "compile_blocks", "tf32"):
        del data[name]
    for name in ("dora", "rslora", "layers", "modules_to_save"):
        del data["tuning"][name]
    del full["tuning"]["update"]
    assert (from_data(Plan, data), from_data(Plan, full)) == (plan(), plan(tuning=Full()))
    report = StepReport(
        step=1, total_steps=2, epoch=0.5, loss=2.0, learning_rate=1e-4, grad_norm=1.0, tokens=8, supervised_tokens=4,
        step_seconds=0.5, data_seconds=0.0, tokens_per_second=16.0, mfu=0.0,
    )  # fmt: skip
    step = to_data(report)
    del step["eval_loss"], step["memory_bytes"]
    assert from_data(StepReport, step) == report


def test_the_phase_between_steps_is_read_by_its_earlier_name_too():
    assert from_json(MemoryBreakdown, '{"phases": {"ready": {"weights": 5}}}').phases == {
        Phase.IDLE: {"weights": 5}
    }


def changed(path, value):
    data = to_data(plan())
    *outer, last = path.split(".")
    place = data
    for key in outer:
        place = place[int(key) if key.isdecimal() else key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("batch.seq_len", True, "Plan.batch.seq_len: expected int, found True"),
        ("batch.seq_len", 1.5, "Plan.batch.seq_len: expected int"),
        ("batch.packing", 1, "Plan.batch.packing: expected bool"),
        ("batch.speed", 1, "Plan.batch: unknown key 'speed'"),
        ("batch.seq_len", None, "Plan.batch: missing key 'seq_len'"),
        ("batch", [], "Plan.batch: expected an object"),
        ("sharding", {"kind": "Zero", "stage": True, "backend": "fsdp"}, "stage: expected int, found True"),
        ("sharding", {"kind": "Zero", "stage": 4, "backend": "fsdp"}, "stage: expected 1, 2 or 3, found 4"),
        ("batch.kind", "Bach", "Plan.batch.kind: expected 'Batch'"),
        ("tuning.kind", "Magic", "Plan.tuning: kind 'Magic' is not one of Full, Lomo, Lora"),
        ("precision", "fp8", "Plan.precision"),
        ("attention", "magic", "Plan.attention: expected 'flash', 'sdpa' or 'eager', found 'magic'"),
        ("tuning.targets", "q_proj", "Plan.tuning.targets: expected a list"),
        ("data.sources.0.columns", [["prompt"]], "columns\\[0\\]: missing key 1"),
        ("data.sources.0.columns", [["prompt", "a", "b"]], "columns\\[0\\]: expected fewer items"),
        ("tuning.base", "Nf4", "Plan.tuning.base: kind 'str' is not one of Dense, Nf4, Hqq"),
        ("schedule.learning_rate", "1e-4", "Plan.schedule.learning_rate: expected float, found '1e-4'"),
        ("schedule.learning_rate", 10**400, "Plan.schedule.learning_rate: expected a number below 1e308"),
        ("hardware", {"kind": "Gpu"}, "Plan.hardware.kind: expected 'Hardware', found 'Gpu'"),
        ("model.linears.0.part", "brain", "Plan.model.linears\\[0\\].part"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(path, value, words):
    with pytest.raises(ValueError, match=words):
        from_data(Plan, changed(path, value))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Perhaps:
    clip: ClipByValue | ClipByNorm | None


@pytest.mark.parametrize("clip", [None, ClipByValue(value=1.0), ClipByNorm(max_norm=2.0)])
def test_a_choice_that_may_be_left_out(clip):
    assert from_data(Perhaps, to_data(Perhaps(clip=clip))) == Perhaps(clip=clip)


def test_a_wrong_phase_is_named():
    with pytest.raises(
        ValueError, match=r"MemoryBreakdown.phases.nap: expected 'idle', .* or 'update', found"
    ):
        from_data(MemoryBreakdown, {"phases": {"nap": {}}})


@pytest.mark.parametrize(("text", "value"), [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)])
def test_numbers_that_are_not_finite_survive(text, value):
    schedule = replace(plan().schedule, learning_rate=value)
    data = to_data(schedule)
    assert data["learning_rate"] == text
    assert repr(from_data(Schedule, data)) == repr(schedule)


def test_a_whole_number_is_read_as_the_float_that_it_stands_for():
    data = {**to_data(plan().schedule), "learning_rate": 1}
    rate = from_data(Schedule, data).learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_the_bytes_that_are_written():
    chosen = MemoryBreakdown(phases={Phase.FORWARD: {"weights": 5}})
    assert to_json(chosen) == (
        '{\n  "kind": "MemoryBreakdown",\n  "phases": {\n    "forward": {\n      "weights": 5\n    }\n  },\n'
        '  "outside": {},\n  "reclaimable": 0\n}\n'
    )
    assert to_json((Lora(**_LORA, base=Nf4(double_quant=False)).base, math.nan, Precision.FP16)) == (
        '[\n  {\n    "kind": "Nf4",\n    "double_quant": false\n  },\n  "nan",\n  "fp16"\n]\n'
    )
