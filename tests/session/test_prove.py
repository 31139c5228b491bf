"""``fitune doctor --prove``: a check fails when its kernel is wrong, and what was measured is kept and cited."""

import json

import pytest
import torch
from typer.testing import CliRunner

from fitune.cli.app import app
from fitune.errors import HardwareError
from fitune.measure.measurements import Proof, measured_on, proofs_folder
from fitune.records.row import read_records
from fitune.records.score import compare_rows
from fitune.session.proving import kernels, prove, steps
from fitune.session.proving.kernels import kernel_checks
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Precision
from fitune.values.serial import from_json

CPU = torch.device("cpu")


def chosen(*names):
    parts = prove.parts_of(*prove.this_device())
    return {name: parts[name] for name in names}


@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
def test_every_kernel_that_runs_here_passes(numbers):
    verdicts = {}
    for name, check in kernel_checks(numbers, CPU).items():
        if name.startswith(("NF4", "HQQ")):
            pytest.importorskip("bitsandbytes" if name.startswith("NF4") else "hqq")
        if not name.startswith(("liger", "attention efficient")):
            verdicts[name] = check().passed
    assert len(verdicts) == 8
    assert all(verdicts.values()), verdicts
    with pytest.raises(HardwareError, match="CUDA"):
        kernel_checks(numbers, CPU)[f"attention efficient {numbers}"]()


def _five_percent_off(right):
    class Wrong(right):
        def losses_and_gradient(self, *args, **named):
            return tuple(x * 1.05 for x in super().losses_and_gradient(*args, **named))

    return Wrong


WRONG = {
    "fused loss": ("LossHead", lambda right: _five_percent_off(right)),
    "row attention flash": ("rows_flash", lambda right: lambda call: right(call).roll(1, dims=1)),
    "attention flash": (
        "with_gradients",
        lambda right: lambda *a, **k: [x.nan_to_num() / 0 for x in right(*a, **k)],
    ),
    "fused adapters": ("run_by", lambda right: lambda experts, name, pair: None),
}
"""What is spoilt, and how."""


@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails(name, numbers, monkeypatch):
    attribute, spoil = WRONG[name]
    monkeypatch.setattr(kernels, attribute, spoil(getattr(kernels, attribute)))
    part = f"{name} {numbers}"
    found = prove.prove(tell=lambda line: None, parts={part: kernel_checks(numbers, CPU)[part]})
    assert [check.name for check in found.failed] == [part]
    assert part in prove.describe_proof(found)


def test_losses_are_those_of_the_processor(monkeypatch):
    hardware, _ = prove.this_device()
    monkeypatch.setattr(steps, "_STEPS", 4)
    assert steps.same_losses("full", "fp32", hardware).passed
    assert steps.offloaded("lora-weights-away", "fp32", hardware).passed
    right = steps.losses
    monkeypatch.setattr(
        steps, "losses", lambda plan, **k: right(plan, **k) + (plan.attention != "eager") * 1e-2
    )
    assert steps.same_losses("full", "fp32", hardware).passed is False


def test_the_record_holds_plans_that_records_and_plans_read(tmp_path, monkeypatch):
    only = chosen("fused loss fp32", "copies", "full")
    monkeypatch.setattr(prove, "parts_of", lambda *_: only)
    out = tmp_path / "mine.json"
    answer = CliRunner().invoke(app, ["doctor", "--prove", "--out", str(out)], catch_exceptions=False)
    assert answer.exit_code == 0
    assert "[3/3] passed: full width 128 × 4" in answer.output
    assert "not run: copies: a processor has no second memory" in answer.output
    proof = from_json(Proof, out.read_text())
    assert [file.read_text() for file in proofs_folder().iterdir()] == [out.read_text()]
    compared, skipped = compare_rows(read_records(out))
    assert not skipped
    assert compared[0].memory_error == pytest.approx(0, abs=0.03)
    assert compared[0].measured_speed == pytest.approx(128 / proof.rows[0].measured_s)
    assert measured_on(proof.device).cards == 1
    plan = CliRunner().invoke(
        app, ["plan", "--model", "qwen3-0.6b", "--gpu", "cpu", "--details"], catch_exceptions=False
    )
    assert "measured on 1 processor of this kind: memory ±0" in " ".join(plan.output.split())


def test_a_failed_check_makes_exit_1_and_what_is_measured_first_is_not_left_out(monkeypatch):
    measured = []
    monkeypatch.setattr(
        "fitune.session.doctor.calibrate_device", lambda log: measured.append("rates") or True
    )
    monkeypatch.setattr(kernels, "TOLERANCES", {"fp32": 0.0})
    only = chosen("fused loss fp32")
    monkeypatch.setattr(prove, "parts_of", lambda *_: only)
    answer = CliRunner().invoke(app, ["doctor", "--calibrate", "--prove", "--json"], catch_exceptions=False)
    assert (answer.exit_code, measured) == (1, ["rates"])
    assert "FAILED: fused loss fp32: error" in answer.stderr
    assert json.loads(answer.stdout)["checks"][0]["passed"] is False


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_what_was_measured_is_kept_when_a_signal_comes(ends):
    def stopped():
        raise ends

    parts = {**chosen("fused loss fp32"), "copies": stopped, **chosen("full")}
    with pytest.raises(ends):
        prove.prove(tell=lambda line: None, parts=parts)
    (file,) = proofs_folder().iterdir()
    kept = from_json(Proof, file.read_text()).checks
    assert [(check.passed, check.why) for check in kept] == [(True, ""), *[(None, "interrupted")] * 2]


def test_a_module_of_another_distribution_leaves_the_record_whole(monkeypatch):
    """As triton of torch's wheels for ROCm, and of its nightly ones."""
    monkeypatch.setattr(prove, "_LIBRARIES", ("torch", "json"))
    found = prove.prove(tell=lambda line: None, parts=chosen("copies"))
    assert found.versions.keys() == {"torch", "python", "cuda", "driver"}


def test_no_check_begins_when_time_is_up_and_an_error_is_a_result(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(prove, "_NO_MORE_AFTER_S", 60.0)
    times = iter([0.0, 1.0, 100.0])
    monkeypatch.setattr(prove.time, "perf_counter", lambda: next(times))
    found = prove.prove(tell=lambda line: None, parts={"one": broken, "two": broken})
    assert [(check.passed, check.why) for check in found.checks] == [
        (False, "RuntimeError: CUDA error: an illegal memory access"),
        (None, "no time left"),
    ]


@pytest.mark.parametrize("place", ["a file/proof.json", "folder"])
def test_a_record_that_cannot_be_written_is_said_before_anything_runs(tmp_path, place):
    (tmp_path / "a file").touch()
    (tmp_path / "folder").mkdir()
    told = []
    with pytest.raises(HardwareError, match="--out "):
        prove.prove(tell=told.append, out=tmp_path / place, parts=chosen("copies"))
    assert not told


@pytest.mark.parametrize(("card", "model", "layers"), [
    ("h100", "llama-3.1-8b", 16), ("rtx-4090", "llama-3.1-8b", 4), ("t4", "llama-3.2-1b", 4),
])  # fmt: skip
def test_plans_are_sized_to_the_card(card, model, layers):
    hardware = hardware_for(gpu=find_gpu(card), host_memory_bytes=2**37)
    plan, shape, estimate = steps.sized_plan(steps.CASES["full"], hardware)
    assert (shape.model, shape.layers) == (model, layers)
    assert estimate.peak_bytes <= 0.8 * estimate.usable_bytes
    assert plan.precision is (Precision.FP16 if card == "t4" else Precision.BF16)
    assert len(steps.CASES) == 10


@pytest.mark.slow
def test_everything_passes_on_this_processor():
    for library in ("bitsandbytes", "hqq"):
        pytest.importorskip(library)
    found = prove.prove(tell=lambda line: None)
    assert found.failed == ()
    assert len(found.rows) == 10
    assert {check.why for check in found.checks if check.passed is None} == {
        "a processor has no second memory",
        "the memory-efficient kernel is CUDA's",
        "kernels: liger are Triton kernels and run on CUDA, and the model is on cpu",
    }
