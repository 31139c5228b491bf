"""A scoring that was stopped, or whose data grew, goes on with every id exactly once; other settings are refused."""

import errno
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from fitune.errors import RunDirectoryError, ScoringFailed
from fitune.score.asking import Restarted
from fitune.score.engines.engine import Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.shards import Shards
from fitune.session.results import text_of
from fitune.values.plan import DataSource
from fitune.values.reports import ScoreReport
from fitune.values.serial import from_json
from jsonl import read_lines
from score.scorings import ROWS, answers, everything, quietly, write_data


def killed_at_sync(plan, count):
    """Score in a child process that SIGKILLs itself when it syncs for the ``count``-th time; False: it finished."""
    child = os.fork()
    if not child:
        left, sync = count, os.fsync

        def fsync(handle):
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(handle)

        os.fsync = fsync
        try:
            quietly(plan)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_wherever_it_writes_the_bytes_are_those_of_an_undisturbed_run(plan, finished_once, step):
    """SIGKILL at every ``step``-th sync, in a new start in the same directory each time, until one comes through."""
    expected = everything(replace(plan, output_dir=str(finished_once)))
    kills, count = 0, 1
    while killed_at_sync(plan, count):
        kills, count = kills + 1, count + step
        assert kills < 100
    assert kills >= 2
    assert everything(plan) == expected


def test_a_disk_that_fills_up_wherever_it_is_written_loses_nothing(plan, finished_once, monkeypatch):
    """Full at one sync of each start, four later every time, until no start gets that far."""
    expected = everything(replace(plan, output_dir=str(finished_once)))
    sync, left, count = os.fsync, 0, 0

    def fsync(handle):
        nonlocal left
        left -= os.readlink(f"/proc/self/fd/{handle}").startswith(plan.output_dir)  # not of a cache
        if not left:
            left = -1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    named = set()
    while left <= 0:
        left = count = count + 4
        named.add(named_by_a_full_disk(plan))
        assert not list(Path(plan.output_dir).rglob(".tmp-*"))
    assert len(named - {""}) >= 4
    assert everything(plan) == expected


def named_by_a_full_disk(plan):
    """The file that the error names beside the free bytes; empty where the scoring came through."""
    try:
        quietly(plan)
        return ""
    except OSError as error:
        told = error
    said = r"No space left on device: ([\d.]+ \w*B to write, )?[\d.]+ \w*B free"
    assert re.fullmatch(said, str(told.strerror))
    return Path(str(told.filename)).name


def test_a_finished_run_changes_nothing_when_started_again(finished):
    first = from_json(ScoreReport, (Path(finished.output_dir) / "report.json").read_text())
    before = everything(finished)
    seen = []
    again = quietly(finished, progress=lambda done, total: seen.append(done))
    assert seen == [ROWS]
    assert everything(finished) == before
    assert (first.rows_asked, again.rows_asked) == (ROWS, 0)
    assert f"{ROWS} of {ROWS} rows answered in " in text_of(first)
    assert f"{ROWS} of {ROWS} rows answered (0 asked now, in " in text_of(again)
    assert replace(again, seconds=first.seconds, rows_asked=ROWS, data=first.data) == first


def test_other_settings_are_refused_in_the_same_directory(finished, tmp_path):
    before = answers(finished).read_bytes()
    other_data = (DataSource(path=str(write_data(tmp_path / "other.jsonl"))),)
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    for change, named in (
        ({"sampling": Sampling(max_new_tokens=8, temperature=0.5)}, "sampling: .*'temperature': 0.0"),
        ({"sources": other_data}, "data: 'rows.jsonl"),
        ({"chat_template": plain}, "template: "),
        ({"dtype": "torch.bfloat16"}, "dtype: 'torch.float32' there"),
    ):
        with pytest.raises(RunDirectoryError, match=f"other settings:\n  {named}"):
            quietly(replace(finished, **change))
    assert answers(finished).read_bytes() == before


def test_another_model_of_the_same_name_is_refused(finished, tiny, tmp_path):
    other = Path(shutil.copytree(tiny.folder, tmp_path / "elsewhere" / tiny.folder.name))
    assert quietly(replace(finished, model=str(other))).answered == ROWS, (
        "the same files in another place are the same"
    )
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunDirectoryError, match="model: 'tiny, files"):
        quietly(replace(finished, model=str(other)))


def test_a_changed_or_missing_row_is_refused_by_its_id(finished):
    write_data(Path(finished.sources[0].path), changed="Tell me something else.")
    said = r"that have another prompt or reference now: 1 \(train-0004\)"
    with pytest.raises(RunDirectoryError, match=said):
        quietly(finished)
    write_data(Path(finished.sources[0].path), count=ROWS - 1)
    with pytest.raises(RunDirectoryError, match=r"that are no longer in the data: 1 \(train-0020\)"):
        quietly(finished)


def test_rows_that_the_engine_fails_for_fail_alone_and_the_next_run_asks_them_again(
    plan, finished_once, monkeypatch
):
    """In the middle of a shard and at its end; nor does a start end at them, where nothing else is left to ask."""
    answer, faulty = TransformersEngine.answer, {"train-0004", "train-0008"}

    def broken(engine, requests, ahead):
        for request in requests:
            if request.id in faulty:
                raise RuntimeError("this row breaks it")
            yield from answer(engine, [request])

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "answer", broken)
        for asked in (ROWS, 2):
            report = quietly(plan)
            assert (report.answered, report.failed, report.rows_asked) == (ROWS - 2, 2, asked)
    errors = {line["custom_id"]: line["error"] for line in read_lines(answers(plan)) if line["error"]}
    assert errors.keys() == faulty
    for error in errors.values():
        assert (error["code"], error["message"]) == ("engine_failed", "RuntimeError: this row breaks it")
    asked = []
    assert quietly(plan, progress=lambda done, total: asked.append(done)).failed == 0
    assert asked == [ROWS - 2, ROWS - 1, ROWS]
    assert answers(plan).read_bytes() == (finished_once / "answers.jsonl").read_bytes()


def test_a_row_that_is_asked_alone_is_answered_to_its_end():
    """An engine in a process of its own says when it is done, which the next question must not find."""
    done = []

    def alone(engine, asked):
        if len(asked) > 1:
            raise RuntimeError("not together")
        yield asked[0]
        done.append(asked[0])

    rows = [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
    assert list(Restarted(object).each(rows, alone)) == done == rows


def test_an_engine_that_fails_for_a_whole_shard_and_never_answered_is_given_up(plan, monkeypatch):
    asked = []

    def broken(engine, requests, ahead):
        asked.extend(request.id for request in requests if len(requests) == 1)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(TransformersEngine, "answer", broken)
    with pytest.raises(ScoringFailed, match="the engine fails for every row: RuntimeError: no kernel image"):
        quietly(plan)
    assert len(asked) == 8
    assert Shards(Path(plan.output_dir)).numbers() == []


@pytest.mark.parametrize("kind", ["file", "foreign", "answers without a manifest"])
def test_a_directory_that_is_not_ours_is_left_alone(plan, kind):
    out = Path(plan.output_dir)
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ("thesis.tex" if kind == "foreign" else "answers.jsonl")).write_text("mine")
    with pytest.raises(RunDirectoryError):
        quietly(plan)
    left = [path for path in (out.iterdir() if out.is_dir() else [out]) if path.name != "run.lock"]
    assert [path.read_text() for path in left] == ["mine"]


def test_two_scorings_do_not_write_into_one_directory(finished):
    refusals = []

    def start_a_second(done, total):
        with pytest.raises(RunDirectoryError, match="is in use by process") as caught:
            quietly(finished)
        refusals.append(caught.value)

    quietly(finished, progress=start_a_second)
    assert len(refusals) == 1


@pytest.mark.parametrize("sizes", [(8, 3), (3, 8)])
def test_a_scoring_goes_on_with_shards_of_another_size(plan, finished_once, sizes):
    """Stopped after eleven rows, ended in other shards: the answers are those of one size, each row asked once more at
    most."""
    seen = []

    def stop(done, total):
        if done == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quietly(replace(plan, shard_rows=sizes[0]), progress=stop)
    assert not answers(plan).exists()
    shards = Shards(Path(plan.output_dir))
    written = sum(len(shards.rows(number)) for number in shards.numbers())
    quietly(replace(plan, shard_rows=sizes[1]), progress=lambda done, total: seen.append(done))
    assert seen[0] == written == 11 // sizes[0] * sizes[0]
    for name in ("answers.jsonl", "grades.jsonl", "answers.parquet"):
        assert (Path(plan.output_dir) / name).read_bytes() == (finished_once / name).read_bytes()
