"""Whatever ends a run, it is written down: report.json, one readable error, an exit code (rows 5, 10 and 19)."""

import json
import pkgutil

import pytest
import torch

from fitune.errors import is_out_of_memory
from runs import contents, report_of

STEP = "fitune.models.language_model.LanguageModel.hidden_states"
LOSS = "fitune.models.language_model.LanguageModel.loss_and_gradient"


def failing(monkeypatch, target, error, *, after=0):
    """Let ``target`` raise ``error`` from call ``after`` + 1 on."""
    real, calls = pkgutil.resolve_name(target), [0]

    def fail(*words, **named):
        calls[0] += 1
        if calls[0] > after:
            raise error
        return real(*words, **named)

    owner, _, name = target.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, fail)


ONE_ROW = {"micro_batch_size": 1}
"""Nothing smaller can be tried."""
CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 23.6 GiB in total.\nSee doc."
)


@pytest.mark.parametrize(
    ("target", "error", "kind", "doing"),
    [
        (STEP, CUDA, "OutOfMemory", "forward"),
        (STEP, MemoryError(), "OutOfMemory", "forward"),
        (
            LOSS,
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"),
            "OutOfMemory",
            "loss",
        ),
        (LOSS, RuntimeError("shapes cannot be multiplied"), "TrainingFailed", "loss"),
        (LOSS, KeyError("lost"), "TrainingFailed", "loss"),
        (
            "fitune.train.held_out.evaluate",
            OSError(5, "Input/output error", "/data"),
            "TrainingFailed",
            "evaluating",
        ),
    ],
)
def test_what_fails_in_a_step_is_reported(
    train,
    tmp_path,
    monkeypatch,
    target,
    error,
    kind,
    doing,
):
    evaluates = "evaluate" in target
    after = 1 if evaluates else 2  # evaluated before the first step, too; two micro-batches make a step
    failing(monkeypatch, target, error, after=after)
    held_out = {"val_fraction": 0.2, "eval_steps": 2} if evaluates else {}
    code, _, err = train(max_steps=4, **held_out, **ONE_ROW)
    assert code == (3 if kind == "OutOfMemory" else 1)
    assert doing in err
    assert "step 2" in err
    assert "try: " in err
    report = report_of(tmp_path / "run")
    assert report.status == "failed"
    assert report.failure is not None
    assert (report.failure.error, report.failure.doing, report.failure.step) == (kind, doing, 2)
    assert report.reason in err
    assert report.steps == 1
    assert report.total_steps == 4
    assert (tmp_path / "run" / "report.html").is_file()
    assert type(error).__name__ in (tmp_path / "run" / "traceback.txt").read_text()


def test_out_of_memory_names_the_plan_and_what_takes_less(train, monkeypatch):
    failing(monkeypatch, STEP, CUDA, after=2)
    _, _, err = train(tuning="full", save_steps=1, gradient_checkpointing=False, loss="plain", **ONE_ROW)
    assert "Tried to allocate 2.50 GiB" in err
    assert "2.50 GiB more asked for" in err
    assert "0 of 2 blocks recomputed, plain loss" in err
    assert "loss: chunked" in err
    assert "gradient_checkpointing: true" in err
    assert "tuning: lora" in err
    assert "--resume goes on from step-1" in err


def test_the_advice_after_running_out_of_memory_can_be_followed(train, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        failing(broken, STEP, CUDA, after=2)
        assert train(save_steps=1, **ONE_ROW)[0] == 3
    code, _, err = train("--resume", save_steps=1, **ONE_ROW, gradient_checkpointing=True)
    assert (code, err) == (0, "")
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.failure) == ("complete", 2, None)
    assert not (tmp_path / "run" / "traceback.txt").exists()


def test_a_model_that_does_not_fit_when_loaded_is_reported_and_no_run_to_protect(
    train, tmp_path, monkeypatch
):
    with monkeypatch.context() as broken:
        failing(broken, "fitune.train.run.prepare", CUDA)
        code, _, err = train()
    assert code == 3
    assert "loading the model" in err
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.total_parameters) == ("failed", 0, 0)
    assert report.failure is not None
    assert (report.failure.doing, report.failure.step) == ("loading the model", 0)
    assert train()[0] == 0


def test_no_room_for_the_weights_is_not_taken_for_damaged_files(train, monkeypatch):
    """torch's error for it is a RuntimeError, like those of weights that do not match."""
    failing(monkeypatch, "transformers.PreTrainedModel.from_pretrained", CUDA)
    err = train().ends(3, "out of memory (loading the model)")
    assert "fetch them again" not in err


def test_a_second_signal_is_written_down(train, tmp_path, monkeypatch):
    failing(monkeypatch, LOSS, KeyboardInterrupt(), after=2)
    train().ends(130)
    report = report_of(tmp_path / "run")
    assert (report.status, report.reason) == ("interrupted", "stopped at once (loss, step 2)")


def test_a_report_that_cannot_be_written_does_not_hide_the_cause(train, monkeypatch):
    failing(monkeypatch, STEP, CUDA, after=2)
    failing(monkeypatch, "fitune.train.ending.write_atomically", OSError(28, "No space left on device"))
    code, out, err = train(**ONE_ROW)
    assert code == 3
    assert "out of memory" in err
    assert "report.json could not be written" in out


@pytest.mark.parametrize(
    ("error", "words"), [(MemoryError(), ""), (torch.OutOfMemoryError("CUDA out of memory."), ": CUDA out of memory.")]
)  # fmt: skip
def test_no_memory_outside_of_training_is_no_traceback(call, monkeypatch, error, words):
    failing(monkeypatch, "fitune.session.reported.report_run", error)
    code, out, _ = call("report", "run", "--json")
    assert code == 3
    assert json.loads(out)["error"]["message"] == f"out of memory{words}"


def test_an_error_of_the_program_is_told_as_it_is(call, monkeypatch):
    failing(monkeypatch, "fitune.session.reported.report_run", RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        call("report", "run")


def test_what_is_out_of_memory():
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("unable to mmap 4096 bytes from file <weights>"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("cannot allocate memory"))


# An earlier run is there until the new one can begin (rows 9 and 10)


def test_overwrite_keeps_the_earlier_run_while_the_new_data_cannot_be_read(train, tmp_path):
    assert train()[0] == 0
    run = tmp_path / "run"
    before = contents(run)
    (tmp_path / "broken.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question"\n')
    for data in (tmp_path / "missing.jsonl", tmp_path / "broken.jsonl"):
        assert train("--overwrite", data=data)[0] == 2
        assert contents(run) == before
    assert train("--overwrite", max_steps=1)[0] == 0
    assert report_of(run).steps == 1


# A complete run made longer


def test_a_complete_run_without_checkpoints_is_not_said_to_be_extensible(train, tmp_path):
    assert train()[0] == 0
    before = contents(tmp_path / "run")
    err = train(max_steps=4).ends(2)
    assert "--resume" not in err
    train("--resume", max_steps=4).ends(2, "no checkpoint (save_steps was 0)")
    assert contents(tmp_path / "run") == before


def test_a_run_that_saves_saves_its_last_step(train, tmp_path):
    assert train(save_steps=2, max_steps=3)[0] == 0
    train("--resume", save_steps=2, max_steps=5).ends(0, "resuming from", "step-3")
