"""Whole runs on cards whose operations are computed by the CPU: the losses are those of a run on the CPU."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml

from conftest import QUESTIONS, plan_of
from fitune.units import GIB
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Ddp, Offload, Single, Zero
from null_gpu.conftest import HERE, has, surroundings
from runs import losses, trained
from several import Job, train_on

pytestmark = pytest.mark.null_gpu

LOSS = 1e-5  # relative
LORA = {"tuning": "lora", "max_steps": 4, "save_steps": 2, "val_fraction": 0.1, "eval_steps": 2}
FULL = {"tuning": "full", "learning_rate": 1e-3, "max_steps": 3}
AWAY = Offload(parameters="cpu", optimizer="cpu")
ALL_AWAY = Offload(parameters="cpu", optimizer="cpu", activations="cpu")
FSDP_2, FSDP_3 = Zero(stage=2, backend="fsdp"), Zero(stage=3, backend="fsdp")
ALONE = {
    "lora": (LORA, Offload()),
    "qlora": ({**LORA, "tuning": "qlora"}, Offload()),
    "full, all away": (FULL, ALL_AWAY),
}
TOGETHER = {
    "lora, DDP": (LORA, Ddp(), Offload()),
    "full, stage 2": (FULL, FSDP_2, Offload()),
    "full, stage 3": (FULL, FSDP_3, Offload()),
    "full on the host, stage 3": ({**FULL, "gradient_checkpointing": 1}, FSDP_3, AWAY),
    "qlora on the host, stage 3": (
        {**LORA, "tuning": "qlora", "gradient_checkpointing": True},
        FSDP_3,
        AWAY,
    ),
}

BY_DEEPSPEED = {"stage 2": Offload(), "stage 2, optimizer on the host": Offload(optimizer="cpu")}


@pytest.fixture(scope="module")
def on_cpu(model_folder, data_file, tmp_path_factory):
    """A plan of settings for the CPU and its losses there, run once."""
    known = {}

    def of(settings):
        key = json.dumps(settings)
        if key not in known:
            plan = plan_of(model_folder, data_file, tmp_path_factory.mktemp("cpu") / "run", **settings)
            trained(plan)
            known[key] = plan, losses(plan)
        return known[key]

    return of


def on_cards(plan, sharding, offload, folder, *, cards):
    """``plan`` for so many cards, at the same global batch."""
    steps = plan.batch.global_batch_size // cards
    micro = min(plan.batch.micro_batch_size, steps)
    return replace(
        plan,
        hardware=hardware_for(gpu=find_gpu("h100"), gpus=cards, host_memory_bytes=16 * GIB, cpu_cores=2),
        batch=replace(plan.batch, micro_batch_size=micro, accumulation=steps // micro),
        sharding=sharding,
        offload=offload,
        run=replace(plan.run, output_dir=str(folder)),
    )


def trained_on_cards(world, jobs, folder, monkeypatch):
    for name, value in surroundings(cards=["h100"] * world, compute="all").items():
        monkeypatch.setenv(name, value)
    for said in train_on(world, jobs, folder, python=(str(HERE / "run.sh"), "python")):
        assert all("error" not in job for job in said), said


def test_a_run_on_a_card_has_the_losses_of_the_cpu_and_resumes_exactly(on_cpu, tmp_path, monkeypatch):
    expected = {name: on_cpu(settings) for name, (settings, _) in ALONE.items()}
    plans = {
        name: on_cards(expected[name][0], Single(), offload, tmp_path / name, cards=1)
        for name, (_, offload) in ALONE.items()
    }
    broken = replace(plans["lora"], run=replace(plans["lora"].run, output_dir=str(tmp_path / "broken")))
    jobs = [Job(plan=plan) for plan in plans.values()]
    jobs += [Job(plan=broken, stop_after=3), Job(plan=broken, resume=True)]
    trained_on_cards(1, jobs, tmp_path / "jobs", monkeypatch)
    for name, (_, cpu) in expected.items():
        assert losses(tmp_path / name) == pytest.approx(cpu, rel=LOSS), name
    assert losses(tmp_path / "broken") == losses(tmp_path / "lora")
    exported = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("lora", "broken")]
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_cards_have_the_losses_of_one_process(on_cpu, tmp_path, monkeypatch, world):
    expected = {name: on_cpu(settings) for name, (settings, _, _) in TOGETHER.items()}
    jobs = [
        Job(plan=on_cards(expected[name][0], sharding, offload, tmp_path / name, cards=world))
        for name, (_, sharding, offload) in TOGETHER.items()
    ]
    trained_on_cards(world, jobs, tmp_path / "jobs", monkeypatch)
    for name, (_, cpu) in expected.items():
        assert losses(tmp_path / name) == pytest.approx(cpu, rel=LOSS), name


def test_two_cards_have_the_losses_of_one_process_by_deepspeed(on_cpu, tmp_path, monkeypatch):
    if not has("deepspeed"):
        pytest.skip("no deepspeed in the environment of the null GPU (make null-env)")
    zero = Zero(stage=2, backend="deepspeed")
    plan, cpu = on_cpu(FULL)
    jobs = [
        Job(plan=on_cards(plan, zero, offload, tmp_path / name, cards=2))
        for name, offload in BY_DEEPSPEED.items()
    ]
    trained_on_cards(2, jobs, tmp_path / "jobs", monkeypatch)
    for name in BY_DEEPSPEED:
        assert losses(tmp_path / name) == pytest.approx(cpu, rel=LOSS), name


def recipe(folder, model, **settings):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS * 8))
    path = folder / "recipe.yaml"
    common = {
        "model": str(model), "data": [str(rows)], "tuning": "lora", "lora_r": 4, "precision": "fp32",
        "kernels": "torch", "loss": "plain", "learning_rate": 1e-2, "max_steps": 2, "save_steps": 0,
        "samples": 0, "seq_len": 256, "packing": True, "micro_batch_size": 16, "gradient_accumulation_steps": 1,
        "output_dir": str(folder / "run"),
    }  # fmt: skip
    path.write_text(yaml.safe_dump({**common, **settings}))
    return path


def test_a_recipe_alone_is_detected_planned_trained_and_retried_where_memory_is_short(
    model_folder, on_null_gpu, tmp_path
):
    path = recipe(tmp_path, model_folder)
    on_null_gpu(["fitune", "train", path], cards=["4090"], compute="all")
    shutil.move(tmp_path / "run", tmp_path / "roomy")
    report = json.loads((tmp_path / "roomy/report.json").read_text())
    assert report["status"] == "complete"
    plan = json.loads((tmp_path / "roomy/plan.json").read_text())
    assert plan["hardware"]["gpu"]["name"] == "rtx-4090"
    refused = {"NULLCUDA_REFUSED_MIB": round(23.52 * 1024) - GIVEN_MIB}
    on_null_gpu(["fitune", "train", path], cards=["4090"], compute="all", environment=refused)
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["status"] == "complete"
    assert report["retries"]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "roomy"), rel=LOSS)


GIVEN_MIB = 35
"""Enough for micro-batches of 8 rows of 256 tokens, not for those of 16."""
