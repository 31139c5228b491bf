"""Nothing outside a run directory is read, written or deleted through what lies in it, and nothing waits on a pipe."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from checkpoint.killed_saves import save
from fitune.checkpoint.layout import staged
from fitune.checkpoint.state import TrainState
from fitune.errors import FituneError, RunDirectoryError
from fitune.files import open_for_append, remove_stale_siblings, temporary_sibling, write_atomically
from fitune.report.run_files import read_run
from fitune.track.metrics import MetricsLog
from fitune.train.directory import remove_run, require_own_directory
from fitune.values.plan import DataSource
from fitune.values.run_directory import FILES, FOLDERS, require_real_files
from fitune.values.run_lock import lock_directory

STATE = TrainState(step=1, tensors={}, facts={})


@pytest.fixture
def outside(tmp_path):
    """Somebody's file and somebody's folder of checkpoints."""
    folder = tmp_path / "outside"
    (folder / "step-1").mkdir(parents=True)
    (folder / "step-1/weights").write_text("precious")
    (folder / "file").write_text("precious")
    return folder


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "run"
    (directory / "checkpoints").mkdir(parents=True)
    return directory


def _is_whole(outside):
    return sorted(str(p.relative_to(outside)) for p in outside.rglob("*")) == [
        "file",
        "step-1",
        "step-1/weights",
    ] and {p.read_text() for p in outside.rglob("*") if p.is_file()} == {"precious"}


def _strange(path, kind, outside):
    if path.is_dir():
        path.rmdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "folder" else outside / "file")


@pytest.mark.parametrize(("data", "instead"), [("rows", "runs/x"), ("runs", "trained/x")])
def test_the_place_that_a_refusal_names_would_be_taken(tmp_path, make_plan, data, instead):
    """Of data in runs/ the folder that was refused was named again."""
    (tmp_path / data).mkdir()
    source = DataSource(path=str(tmp_path / data))
    plan = make_plan(output_dir=str(tmp_path / data / "x"))
    with pytest.raises(RunDirectoryError, match=f"e.g. {tmp_path}/{instead}$"):
        require_own_directory(replace(plan, data=replace(plan.data, sources=(source,))))


@pytest.mark.parametrize("kind", ["pipe", "folder", "file"])
@pytest.mark.parametrize(
    "name", [*FILES, *FOLDERS, "checkpoints/step-1", "checkpoints/latest", "adapter/inner/config.json"]
)
def test_links_and_pipes_under_a_name_of_the_run_are_refused(run_directory, outside, make_plan, name, kind):
    (run_directory / name).parent.mkdir(parents=True, exist_ok=True)
    _strange(run_directory / name, kind, outside)
    plan = make_plan(output_dir=str(run_directory))
    for use in (lambda: require_own_directory(plan), lambda: read_run(run_directory)):
        with pytest.raises(RunDirectoryError, match=f"{name} is (a symbolic link|a named pipe)"):
            use()
    remove_run(run_directory)
    assert _is_whole(outside)


def test_a_link_to_a_step_links_of_others_and_one_to_the_directory_may_be_there(
    tmp_path, run_directory, outside
):
    (run_directory / "checkpoints/step-1").mkdir()
    (run_directory / "checkpoints/latest").symlink_to("step-1")
    (run_directory / "notes").symlink_to(outside)
    (tmp_path / "link").symlink_to(run_directory)
    require_real_files(run_directory)
    require_real_files(tmp_path / "link")


@pytest.mark.parametrize("name", ["latest", "step-1", ""])
def test_a_save_follows_no_link_that_appeared_meanwhile(run_directory, outside, name):
    _strange(run_directory / "checkpoints" / name, "folder", outside)
    with pytest.raises(FituneError, match="is a symbolic link"):
        save(run_directory, STATE, keep=1, eval_loss=None)
    assert _is_whole(outside)


def test_a_guessed_temporary_name_is_not_opened(run_directory, outside, monkeypatch):
    monkeypatch.setattr("os.urandom", bytes)
    temporary_sibling(run_directory / "report.html").symlink_to(outside / "file")
    with pytest.raises(FileExistsError):
        write_atomically(run_directory / "report.html", "page")
    assert _is_whole(outside)


def test_what_dead_processes_left_is_removed_and_never_what_it_points_to(run_directory, outside):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = run_directory / "checkpoints"
    dead, living = f"-{ended.pid}-{'0' * 16}", f"-{os.getppid()}-{'0' * 16}"
    (folder / f".tmp-step-2{dead}").symlink_to(outside)
    (folder / f".tmp-step-3{dead}").mkdir()
    (folder / f".tmp-step-3{dead}/link").symlink_to(outside)
    kept = [f".tmp-step-4{living}", ".tmp-of-somebody", f"own.tmp-step-4{dead}"]
    for name in kept:
        (folder / name).mkdir()
    remove_stale_siblings(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
    assert _is_whole(outside)


@pytest.mark.parametrize("kind", ["pipe", "folder", "file"])
def test_logs_are_not_opened_through_links_or_pipes(run_directory, outside, kind):
    file = run_directory / "log.jsonl"
    _strange(file, kind, outside)
    with pytest.raises(OSError, match="not a regular file"):
        open_for_append(file)
    with pytest.raises(RunDirectoryError, match="not a regular file"):
        MetricsLog(file)
    assert _is_whole(outside)


def test_an_export_does_not_go_through_a_link(tmp_path, outside):
    (tmp_path / "merged").symlink_to(outside)
    with (
        pytest.raises(RunDirectoryError, match="is a symbolic link"),
        staged(tmp_path / "merged", {}, replace=True),
    ):
        pass
    assert _is_whole(outside)


def test_a_lock_that_says_nonsense_has_no_owner(tmp_path):
    for text in ('{"pid": "x"}', '{"pid": 1e99}', "[" * 4000, '{"pid": "99999999999999999999"}'):
        (tmp_path / "run.lock").write_text(text)
        with lock_directory(tmp_path):
            pass


@pytest.mark.parametrize(
    ("key", "name"), [("data", "rows.jsonl"), ("recipe", "recipe.yaml"), ("chat_template", "template.jinja")]
)
def test_pipes_in_place_of_inputs_are_errors(call, train, tmp_path, key, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    ended = call("train", pipe) if key == "recipe" else train(**{key: pipe})
    ended.ends(2, "a pipe or a device, not a regular file")
