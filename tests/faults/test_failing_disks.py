"""A disk that fails in the middle of the work is a failure (exit code 1), wherever it happens; never a refusal (2)."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from fitune.errors import (
    CheckpointError,
    DataError,
    FituneError,
    OutOfMemory,
    RunDirectoryError,
    exit_code_of,
)
from runs import report_of


def _error(kind, code, *, shown):
    def work():
        try:
            raise OSError(code, os.strerror(code))
        except OSError as cause:
            raise kind("words") from (cause if shown else None)

    with pytest.raises(FituneError) as caught:
        work()
    return caught.value


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_a_failing_disk_behind_an_error_is_seen(code):
    for kind in (CheckpointError, DataError, RunDirectoryError):
        assert [exit_code_of(_error(kind, code, shown=shown)) for shown in (True, False)] == [1, 1]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES])
def test_a_wrong_name_behind_an_error_is_a_refusal(code):
    assert exit_code_of(_error(DataError, code, shown=True)) == 2
    assert exit_code_of(_error(OutOfMemory, code, shown=True)) == 3


@pytest.mark.parametrize(
    ("call_name", "name"),
    [
        ("replace", "plan.json"), ("replace", "report.json"), ("replace", "report.html"), ("rename", "step-1"),
        ("open", "metrics.jsonl"), ("open", "data.jsonl"), ("rename", "adapter"), ("symlink", "latest"),
    ],
)  # fmt: skip
def test_a_disk_that_fails_while_training(train, tmp_path, data_file, monkeypatch, call_name, name):
    data = shutil.copy(data_file, tmp_path / "data.jsonl")
    real = getattr(os, call_name)

    def failing(*words, **named):
        if any(name in Path(str(word)).name for word in words[:2]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(words[0]))
        return real(*words, **named)

    monkeypatch.setattr(os, call_name, failing)
    train(max_steps=1, save_steps=1, data=data).ends(1, os.strerror(errno.EIO))
    if name == "step-1":
        assert report_of(tmp_path / "run").status == "failed"


def test_a_disk_that_is_full_when_the_results_of_a_score_are_written(
    call, tmp_path, model_folder, monkeypatch
):
    """At each of its files in turn; the next one goes on from what was written."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n')
    out, real = tmp_path / "out", os.fsync
    words = ["score", "--model", model_folder, "--data", rows, "--max-new-tokens", "2", "--out"]
    call(*words, tmp_path / "earlier").ends(0)
    words += [out, "--against", tmp_path / "earlier"]
    names = (
        "answers.jsonl", "answers.parquet", "grades.jsonl", "report.json", "score.html", "changed.jsonl",
        "comparison.html",
    )  # fmt: skip
    for name in names:

        def full(handle, name=name):
            if os.readlink(f"/proc/self/fd/{handle}").startswith(f"{out}/.tmp-{name}-"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            err = call(*words).ends(1)
        assert re.search(rf"error: .*{name}: .*No space left on device: .* free\n  try: ", err)
        assert not list(out.rglob(".tmp-*"))
    call(*words).ends(0)
    assert all((out / name).is_file() for name in names)
