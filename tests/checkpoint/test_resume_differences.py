"""Row 7 of the fault table: what may change between a checkpoint and the run that goes on from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from fitune.checkpoint.resume import compare_plans, require_resumable, with_unsaid_fields
from fitune.errors import CheckpointError
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import Dropout
from fitune.values.plan import (
    Batch,
    ChunkedLoss,
    ClipByNorm,
    ClipByValue,
    DataPlan,
    DataSource,
    Ddp,
    Epochs,
    Full,
    InBackward,
    Offload,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Steps,
)
from fitune.values.serial import from_data, from_json, to_data, to_json
from plans import plan_for, small_llama

MODEL = small_llama()
PLAN = plan_for(
    MODEL,
    tuning="lora",
    targets=("q_proj",),
    schedule=Schedule(
        learning_rate=1e-3,
        kind="cosine",
        warmup=Steps(count=3),
        duration=Epochs(count=2.0),
        max_grad_norm=1.0,
    ),
    batch=Batch(micro_batch_size=2, accumulation=4, seq_len=64, packing=True),
    data=DataPlan(sources=(DataSource(path="a.jsonl"),)),
    run=RunPlan(output_dir="runs/a"),
)


def batch(**changes):
    return replace(PLAN, batch=replace(PLAN.batch, **changes))


def schedule(**changes):
    return replace(PLAN, schedule=replace(PLAN.schedule, **changes))


def run(**changes):
    return replace(PLAN, run=replace(PLAN.run, **changes))


ALLOWED = {
    "run.output_dir": run(output_dir="runs/b"),
    "run.log_every": run(log_every=5),
    "run.eval_every": run(eval_every=5),
    "run.save_every": run(save_every=5),
    "run.keep_checkpoints": run(keep_checkpoints=9),
    "run.report_to": run(report_to=("tensorboard",)),
    "schedule.duration.count": schedule(duration=Epochs(count=3.0)),
    "batch.micro_batch_size": batch(micro_batch_size=4, accumulation=2),
    "hardware": replace(batch(accumulation=2), hardware=Hardware(gpu=PLAN.hardware.gpu, gpus_per_node=2)),
    "offload.activations": replace(PLAN, offload=Offload(activations="cpu")),
    "offload.nvme_path": replace(PLAN, offload=Offload(nvme_path="/scratch")),
    "recompute.blocks": replace(PLAN, recompute=Recompute(blocks=2)),
    "loss.kind": replace(PLAN, loss=ChunkedLoss(chunk_tokens=8)),
    "attention": replace(PLAN, attention="eager"),
}
REFUSED = {
    "tuning.rank": replace(PLAN, tuning=replace(PLAN.tuning, rank=16)),
    "tuning.kind": replace(PLAN, tuning=Full()),
    "tuning.targets": replace(PLAN, tuning=replace(PLAN.tuning, targets=("q_proj", "v_proj"))),
    "model_path": replace(PLAN, model_path="/models/other"),
    "model.linears": replace(PLAN, model=replace(MODEL, linears=(*MODEL.linears, *MODEL.linears))),
    "data.sources[0].path": replace(PLAN, data=DataPlan(sources=(DataSource(path="b.jsonl"),))),
    "run.seed": run(seed=1),
    "offload.optimizer": replace(PLAN, offload=Offload(optimizer="cpu")),
    "precision": replace(PLAN, precision=Precision.BF16),
    "schedule.learning_rate": schedule(learning_rate=1e-4),
    "schedule.duration.count": schedule(duration=Epochs(count=1.0)),
    "schedule.duration.kind": schedule(duration=Steps(count=100)),
    "batch.seq_len": batch(seq_len=32),
    "batch.accumulation": batch(accumulation=8),
    "hardware": replace(PLAN, hardware=Hardware(gpu=PLAN.hardware.gpu, gpus_per_node=2)),
}


def test_a_plan_does_not_differ_from_itself_read_back():
    assert compare_plans(from_json(Plan, to_json(PLAN)), PLAN) == []


def read_without(plan, *names):
    """``plan`` as it was saved before a model had these fields, read to go on with the rich one."""
    data = to_data(plan)
    for name in names:
        del data["model"][name]
    return from_data(Plan, with_unsaid_fields(data, PLAN_OF_A_RICH_MODEL))


RICH = replace(
    MODEL, dropout=Dropout(attention=0.1), caps_scores=True, caps_logits=True, rotary_share=0.5, activation="relu",
    sliding_window=8, full_attention_layers=(1,),
)  # fmt: skip
PLAN_OF_A_RICH_MODEL = replace(PLAN, model=RICH)
LATER = ("dropout", "caps_scores", "caps_logits", "rotary_share", "activation", "full_attention_layers")


def test_a_plan_of_before_a_field_existed_does_not_differ_in_it():
    assert compare_plans(read_without(PLAN_OF_A_RICH_MODEL, *LATER), PLAN_OF_A_RICH_MODEL) == []


@pytest.mark.parametrize("name", LATER)
def test_a_field_that_a_plan_has_is_compared(name):
    others = [other for other in LATER if other != name]
    with pytest.raises(CheckpointError, match=name):
        require_resumable(read_without(PLAN, *others), PLAN_OF_A_RICH_MODEL)


def test_another_model_stays_refused_whatever_its_plan_did_not_say():
    other = replace(PLAN, model=replace(RICH, hidden_size=32))
    with pytest.raises(CheckpointError, match="hidden_size"):
        require_resumable(read_without(other, *LATER), PLAN_OF_A_RICH_MODEL)


@pytest.mark.parametrize("setting", ALLOWED)
def test_allowed(setting):
    differences = require_resumable(PLAN, ALLOWED[setting])
    assert setting in [difference.setting for difference in differences]


@pytest.mark.parametrize("setting", REFUSED)
def test_refused(setting):
    found = {d.setting: d for d in compare_plans(PLAN, REFUSED[setting])}
    assert not found[setting].allowed
    with pytest.raises(CheckpointError, match="forbid going on"):
        require_resumable(PLAN, REFUSED[setting])


def test_other_devices_and_another_kind_are_one_line_each():
    """Seven figures of the processor were listed where two processes went on with the run of one."""
    half = replace(PLAN.hardware.gpu, memory_bytes=2**30, fp32_flops=1e9, source="half")
    two = Hardware(gpu=half, gpus_per_node=2, host_memory_bytes=1, taken_bytes=1, left_out="1 × t4")
    wanted = replace(batch(accumulation=2), hardware=two, sharding=Ddp(), tuning=Full())
    found = {d.setting: (d.saved, d.wanted) for d in compare_plans(PLAN, wanted)}
    assert list(found) == ["hardware", "tuning.kind", "sharding.kind", "batch.accumulation"]
    assert found["hardware"][1] == "2 × cpu of 1.00 GiB"
    slower = replace(PLAN, hardware=replace(PLAN.hardware, cpu_cores=9))
    (rates,) = compare_plans(PLAN, slower)
    assert rates.wanted == f"{rates.saved}, with other rates or links"
    assert rates.allowed
    targets = compare_plans(PLAN, REFUSED["tuning.targets"])
    assert [(d.saved, d.wanted) for d in targets] == [("q_proj", "q_proj, v_proj")]


def test_other_base_weights_are_harmless_when_all_weights_are_in_the_checkpoint():
    full = replace(PLAN, tuning=Full())
    assert all(d.allowed for d in require_resumable(full, replace(full, model_path="/elsewhere/tiny")))


def test_the_refusal_is_a_table_of_every_difference_with_its_arithmetic():
    wanted = replace(REFUSED["batch.accumulation"], run=replace(PLAN.run, output_dir="runs/b"))
    with pytest.raises(CheckpointError) as refusal:
        require_resumable(PLAN, wanted)
    lines = [line.split() for line in refusal.value.message.splitlines()]
    assert lines[1] == ["setting", "checkpoint", "now"]
    assert lines[2][:4] == ["batch.accumulation", "4", "8", "refused:"]
    assert "the global batch changes: 2 × 4 × 1 = 8, then 2 × 8 × 1 = 16" in refusal.value.message
    assert lines[3][:4] == [
        "run.output_dir",
        *(str(Path(path).absolute()) for path in ("runs/a", "runs/b")),
        "allowed:",
    ]


@pytest.mark.parametrize(
    ("clip", "word"),
    [
        (ClipByNorm(max_norm=1.0), "the same steps, clipped alike"),
        (ClipByNorm(max_norm=0), "clipped otherwise"),
        (ClipByValue(value=1.0), "clipped otherwise"),
    ],
)
def test_a_run_may_begin_to_step_in_backward_and_stop_it(clip, word):
    """Which is what to try when memory runs out."""
    after = replace(PLAN, tuning=Full())
    inside = replace(PLAN, tuning=Full(update=InBackward(clip=clip)))
    for saved, wanted in ((after, inside), (inside, after)):
        differences = compare_plans(saved, wanted)
        assert {d.setting.startswith("tuning.update") for d in differences} == {True}
        assert {d.allowed for d in differences} == {word.startswith("the same")}
        assert all(word in d.reason for d in differences)


def test_adapters_do_not_become_weights_that_step_in_backward():
    with pytest.raises(CheckpointError):
        require_resumable(PLAN, replace(PLAN, tuning=Full(update=InBackward(clip=ClipByNorm(max_norm=1.0)))))
