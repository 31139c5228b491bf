"""A disk that fails in the middle of the work is a failure (exit code 1), wherever it happens; never a refusal (2)."""

import errno
import json
import os
import re
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
from optional_libraries import NEEDS_LM_EVAL


def _error(kind, code, *, shown):
    def work():
        try:
            raise OSError(code, os.strerror(code))
        except OSError as cause:
            raise kind("words") from (cause if shown else None)

    with pytest.raises(FituneError) as caught:
        work()
    return caught.value


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE])
def test_a_failing_disk_behind_an_error_is_seen(code):
    for kind in (CheckpointError, DataError, RunDirectoryError):
        assert [exit_code_of(_error(kind, code, shown=shown)) for shown in (True, False)] == [1, 1]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG, errno.EINVAL])
def test_a_wrong_name_behind_an_error_is_a_refusal(code):
    assert exit_code_of(_error(DataError, code, shown=True)) == 2
    assert exit_code_of(_error(OutOfMemory, code, shown=True)) == 3


@pytest.mark.parametrize(
    ("call_name", "name"),
    [
        ("replace", "plan.json"), ("replace", "estimate.json"), ("replace", "report.json"), ("replace", "report.html"),
        ("rename", "step-1"), ("open", "metrics.jsonl"), ("open", "data.jsonl"), ("rename", "adapter"),
        ("symlink", "latest"), ("mkdir", "step-2"), ("open", "estimate.json"),
    ],
)  # fmt: skip
def test_a_disk_that_fails_while_training(
    train,
    tmp_path,
    data_file,
    monkeypatch,
    call_name,
    name,
):
    data = tmp_path / "data.jsonl"
    data.write_bytes(data_file.read_bytes())
    real = getattr(os, call_name)

    def failing(*words, **named):
        if any(name in Path(str(word)).name for word in words[:2]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(words[0]))
        return real(*words, **named)

    monkeypatch.setattr(os, call_name, failing)
    train(save_steps=1, data=data).ends(1, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("graded", "names"),
    [
        ("", ["answers.jsonl", "answers.parquet", "grades.jsonl", "report.json", "score.html", "changed.jsonl",
              "comparison.html"]),
        pytest.param("sums", ["samples_sums.jsonl", "lm_eval.json"], marks=NEEDS_LM_EVAL),
    ],
)  # fmt: skip
def test_a_disk_that_is_full_when_the_results_of_a_score_are_written(
    call, tmp_path, model_folder, monkeypatch, graded, names
):
    """At each of its files in turn; the next one goes on from what was written."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n')
    out = tmp_path / "out"
    words = ["score", "--model", model_folder, "--out", out]
    if graded:
        task = {
            "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [
                {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
            ],
        }  # fmt: skip
        (tmp_path / "sums.yaml").write_text(json.dumps(task))
        words += ["--lm-eval", "sums", "--lm-eval-tasks", tmp_path]
    else:
        words += ["--data", rows, "--max-new-tokens", "2"]
        assert call(*words, "--out", tmp_path / "earlier")[0] == 0
        words += ["--against", tmp_path / "earlier"]
    real = os.fsync
    for name in names:

        def full(handle, name=name):
            if os.readlink(f"/proc/self/fd/{handle}").startswith(f"{out}/.tmp-{name}-"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(handle)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            ended, _, err = call(*words)
        assert ended == 1
        assert re.search(rf"error: .*{name}: .*No space left on device: .* free\n  try: ", err)
        assert not list(out.rglob(".tmp-*"))
    assert call(*words)[0] == 0
    assert all((out / name).is_file() for name in names)
