"""A run directory made by hand from the contract types: a small Llama, LoRA, 120 steps on a CPU."""

import dataclasses
import math

import pytest

from fitune.report.run_files import Prediction, RunnerUp
from fitune.values.plan import DataPlan, DataSource, Epochs, Fraction, RunPlan, Schedule
from fitune.values.predictions import Estimate, MemoryBreakdown, Phase, Rejection, StepTime
from fitune.values.reports import Ledger, MeasuredMemory, RunReport, Sample, StepReport
from fitune.values.serial import to_json
from plans import plan_for, small_llama

MIB = 1024**2
STEPS = 120


def make_plan():
    model = small_llama(
        num_hidden_layers=8, hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return plan_for(
        dataclasses.replace(model, name="demo-llama-11m"),
        model_path="runs/demo/base",
        tuning="lora",
        rank=16,
        alpha=32,
        recompute=4,
        chunk=512,
        accumulation=2,
        seq_len=512,
        schedule=Schedule(
            learning_rate=2e-3,
            kind="cosine",
            warmup=Fraction(of=0.05),
            duration=Epochs(count=3.0),
            max_grad_norm=1.0,
        ),
        data=DataPlan(sources=(DataSource(path="runs/demo/train.jsonl"),), val_fraction=0.05),
        run=RunPlan(output_dir="runs/demo/lora", eval_every=20),
    )


def make_prediction():
    fixed = {"weights": 43 * MIB, "adapters": 3 * MIB, "optimizer": 6 * MIB}
    kept = {**fixed, "activations": 231 * MIB, "block inputs": 8 * MIB}
    phases = {
        Phase.IDLE: dict(fixed),
        Phase.FORWARD: kept,
        Phase.LOSS: {**kept, "logits": 16 * MIB, "gradients": 2 * MIB},
        Phase.BACKWARD: {**kept, "workspace": 118 * MIB, "gradients": 3 * MIB},
        Phase.UPDATE: {**fixed, "gradients": 3 * MIB, "workspace": 3 * MIB},
    }
    time = StepTime(
        phases=(seconds := {Phase.FORWARD: 0.61, Phase.LOSS: 0.12, Phase.BACKWARD: 1.18, Phase.UPDATE: 0.01}),
        limits=dict.fromkeys(seconds, "compute"),
    )
    estimate = Estimate(
        memory=MemoryBreakdown(phases=phases),
        usable_bytes=15 * 1024 * MIB,
        time=time,
        tokens_per_second=2133.3,
    )
    return Prediction(
        estimate=estimate,
        runners_up=(
            RunnerUp(
                summary="LoRA r16, recompute 8 of 8", peak_bytes=190 * MIB, step_seconds=2.31, fits=True
            ),
        ),
        rejected=(
            Rejection(what="plain loss", why="10 B × 2,048 tokens × 4,096 words = 80.0 MiB of logits"),
        ),
        decisions=("gradient_checkpointing: 4 of 8 blocks",),
    )


def make_steps(count=STEPS):
    """A loss that falls from 4.1 to 1.2 with a ripple, an evaluation every 20 steps."""
    reports = []
    for step in range(1, count + 1):
        loss = 1.2 + 2.9 * math.exp(-step / 28) + 0.11 * math.sin(step * 2.4)
        tokens = 3900 + (step * 37) % 190
        seconds = 1.85 + 0.08 * math.sin(step * 1.7) + (0.9 if step == 1 else 0)
        reports.append(
            StepReport(
                step=step,
                total_steps=STEPS,
                epoch=3 * step / STEPS,
                loss=loss,
                learning_rate=2e-3 * min(step / 6, 0.5 + 0.5 * math.cos(math.pi * step / STEPS)),
                grad_norm=0.5 + 0.7 * math.exp(-step / 20) + 0.06 * math.sin(step * 3.1),
                tokens=tokens,
                supervised_tokens=tokens // 3,
                step_seconds=seconds,
                data_seconds=0.004,
                tokens_per_second=tokens / seconds,
                mfu=0.41,
                memory_bytes=measured_phases() if step == 2 else {},
                eval_loss=loss + 0.12 if step % 20 == 0 else None,
            )
        )
    return reports


def measured_phases():
    return {
        Phase.IDLE: 52 * MIB + 40960,
        Phase.FORWARD: 289 * MIB,
        Phase.LOSS: 306 * MIB,
        Phase.BACKWARD: 405 * MIB,
        Phase.UPDATE: 58 * MIB,
    }


def make_run_report():
    ledger = Ledger(
        rows_read=2000,
        rows_kept=1986,
        dropped={"empty answer": 9, "no supervised token": 5},
        rows_cut=21,
        tokens_read=163_402,
        tokens_cut=2_114,
        tokens_kept=160_730,
        tokens_supervised=53_208,
        longest_row=742,
        formats=("alpaca",),
        packs=321,
    )
    return RunReport(
        status="complete",
        reason="",
        steps=STEPS,
        total_steps=STEPS,
        first_loss=4.0982,
        final_loss=1.2417,
        best_eval_loss=1.3301,
        seconds=243.0,
        tokens=478_920,
        supervised_tokens=159_600,
        tokens_per_second=2156.4,
        tokens_per_second_with_data=2151.8,
        mfu=0.412,
        memory=MeasuredMemory(kind="live tensors", phases=measured_phases(), process_bytes=1180 * MIB),
        train_data=ledger,
        eval_data=dataclasses.replace(ledger, rows_read=105),
        trainable_parameters=786_432,
        total_parameters=11_272_192,
        samples=(
            Sample(
                prompt="What is the capital of the land of Ardenia, and what river runs through it?",
                expected="The capital of Ardenia is Velm. The river Oss runs through it.",
                before="the the river of the land and the of the",
                after="The capital of Ardenia is Velm. The river Oss runs through it.",
            ),
        ),
        exported="runs/demo/lora/adapter",
        versions={"fitune": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
    )


RECIPE = """model: runs/demo/base
tuning: lora
lora_r: 16
data: runs/demo/train.jsonl
output_dir: runs/demo/lora
"""


def write_run(directory):
    """All the files of a run that went well."""
    from fitune.track.metrics import MetricsLog

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(to_json(make_plan()))
    (directory / "estimate.json").write_text(to_json(make_prediction()))
    (directory / "report.json").write_text(to_json(make_run_report()))
    (directory / "recipe.yaml").write_text(RECIPE)
    with MetricsLog(directory / "metrics.jsonl") as log:
        for report in make_steps():
            log.append(report)
    return directory


@pytest.fixture
def run_directory(tmp_path):
    return write_run(tmp_path / "run")


plan, prediction, steps, run_report = map(
    pytest.fixture, (make_plan, make_prediction, make_steps, make_run_report)
)


@pytest.fixture
def change_report(run_directory):
    """Write report.json again with other values."""

    def change(**values):
        report = dataclasses.replace(make_run_report(), **values)
        (run_directory / "report.json").write_text(to_json(report))
        return run_directory

    return change
