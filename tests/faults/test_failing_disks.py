"""A disk that fails in the middle of the work is a failure (exit code 1), wherever it happens; never a refusal (2)."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.errors import (
    CheckpointError,
    DataError,
    FituneError,
    OutOfMemory,
    RunDirectoryError,
    exit_code_of,
)

Call = Callable[..., tuple[int, str, str]]


def _error(kind: Any, code: int, *, shown: bool) -> FituneError:
    def work() -> None:
        try:
            raise OSError(code, os.strerror(code))
        except OSError as cause:
            raise kind("words") from (cause if shown else None)

    with pytest.raises(FituneError) as caught:
        work()
    return caught.value


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("kind", [CheckpointError, DataError, RunDirectoryError])
@pytest.mark.parametrize("shown", [True, False])
def test_a_failing_disk_behind_an_error_is_seen(kind: Any, code: int, shown: bool) -> None:
    assert exit_code_of(_error(kind, code, shown=shown)) == 1


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG, errno.EINVAL])
def test_a_wrong_name_behind_an_error_is_a_refusal(code: int) -> None:
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
    train: Call,
    tmp_path: Path,
    data_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_name: str,
    name: str,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(data_file.read_bytes())
    real = getattr(os, call_name)

    def failing(*words: Any, **named: Any) -> Any:
        if any(name in Path(str(word)).name for word in words[:2]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(words[0]))
        return real(*words, **named)

    monkeypatch.setattr(os, call_name, failing)
    ended, _, err = train(save_steps=1, data=data)
    assert ended == 1
    assert os.strerror(errno.EIO) in err
