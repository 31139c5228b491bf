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
        (LOSS, RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"), "OutOfMemory", "loss"),
        (LOSS, KeyError("lost"), "TrainingFailed", "loss"),
        ("fitune.train.held_out.evaluate", OSError(5, "Input/output error"), "TrainingFailed", "evaluating"),
    ],
)  # fmt: skip
def test_what_fails_in_a_step_is_reported(train, tmp_path, monkeypatch, target, error, kind, doing):
    evaluates = "evaluate" in target
    after = 1 if evaluates else 2  # evaluated before the first step, too; two micro-batches make a step
    failing(monkeypatch, target, error, after=after)
    held_out = {"val_fraction": 0.2, "eval_steps": 2} if evaluates else {}
    code = 3 if kind == "OutOfMemory" else 1
    err = train(max_steps=4, save_steps=1, **held_out, **ONE_ROW).ends(
        code, doing, "try: ", "--resume goes on from step-1"
    )
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.total_steps) == ("failed", 1, 4)
    assert (report.failure.error, report.failure.doing, report.failure.step) == (kind, doing, 2)
    assert report.reason in err
    assert (tmp_path / "run" / "report.html").is_file()
    assert type(error).__name__ in (tmp_path / "run" / "traceback.txt").read_text()


def test_the_advice_after_running_out_of_memory_can_be_followed(train, tmp_path, monkeypatch):
    """It names the plan that failed, how much was asked for, and what takes less."""
    words = {"tuning": "full", "save_steps": 1, **ONE_ROW}
    with monkeypatch.context() as broken:
        failing(broken, STEP, CUDA, after=2)
        train(**words, gradient_checkpointing=False, loss="plain").ends(
            3, "Tried to allocate 2.50 GiB", "0 of 2 blocks recomputed, plain loss", "loss: chunked",
            "gradient_checkpointing: true", "tuning: lora", "--resume goes on from step-1",
        )  # fmt: skip
    ended = train("--resume", **words, gradient_checkpointing=True, loss="chunked")
    assert (ended.code, ended.err) == (0, "")
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.failure) == ("complete", 2, None)
    assert not (tmp_path / "run" / "traceback.txt").exists()


def test_a_model_that_does_not_fit_when_loaded_is_reported_and_no_run_to_protect(
    train, tmp_path, monkeypatch
):
    """torch's error for it is a RuntimeError, like those of weights that do not match."""
    with monkeypatch.context() as broken:
        failing(broken, "transformers.PreTrainedModel.from_pretrained", CUDA)
        err = train().ends(3, "out of memory (loading the model)")
    assert "fetch them again" not in err
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.total_parameters) == ("failed", 0, 0)
    assert (report.failure.doing, report.failure.step) == ("loading the model", 0)
    train(max_steps=1).ends(0)


def test_a_second_signal_is_written_down(train, tmp_path, monkeypatch):
    failing(monkeypatch, LOSS, KeyboardInterrupt(), after=2)
    train().ends(130)
    report = report_of(tmp_path / "run")
    assert (report.status, report.reason) == ("interrupted", "stopped at once (loss, step 2)")


def test_a_report_that_cannot_be_written_does_not_hide_the_cause(train, monkeypatch):
    failing(monkeypatch, STEP, CUDA, after=2)
    failing(monkeypatch, "fitune.train.ending.write_atomically", OSError(28, "No space left on device"))
    ended = train(**ONE_ROW)
    ended.ends(3, "out of memory")
    assert "report.json could not be written" in ended.out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 3, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), 3, "out of memory: CUDA out of memory."),
        (OSError(28, "No space left on device", "/some/page"), 1, "/some/page: No space left on device"),
    ],
)
def test_what_fails_outside_of_training_is_no_traceback(call, monkeypatch, error, code, said):
    failing(monkeypatch, "fitune.session.reported.report_run", error)
    ended = call("report", "run", "--json")
    assert (ended.code, json.loads(ended.out)["error"]["message"]) == (code, said)


def test_an_error_of_the_program_is_told_as_it_is(call, monkeypatch):
    failing(monkeypatch, "fitune.session.reported.report_run", RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        call("report", "run")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("unable to mmap 4096 bytes from file <weights>"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_what_is_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_a_run_without_checkpoints_is_not_said_to_be_extensible_and_one_that_saves_saves_its_last_step(
    train, tmp_path
):
    assert train(max_steps=1)[0] == 0
    before = contents(tmp_path / "run")
    assert "--resume" not in train(max_steps=4).ends(2)
    train("--resume", max_steps=4).ends(2, "no checkpoint (save_steps was 0)")
    assert contents(tmp_path / "run") == before
    train("--overwrite", save_steps=2, max_steps=1).ends(0)
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "COMMIT").is_file()
