"""A run directory is read whole, or the error names the file and the place."""

import pytest

from fitune.errors import RunDirectoryError
from fitune.report.run_files import read_run
from fitune.values.run_directory import moved


def test_everything_is_read_back(run_directory, plan, prediction, steps, run_report):
    run = read_run(run_directory)
    assert run.plan == moved(plan, run_directory)
    assert (run.prediction, run.steps, run.run) == (prediction, tuple(steps), run_report)
    assert run.estimate == prediction.estimate
    assert "lora_r: 16" in run.recipe


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("estimate.json", "prediction"),
        ("metrics.jsonl", "steps"),
        ("report.json", "run"),
        ("recipe.yaml", "recipe"),
    ],
)
def test_any_file_but_the_plan_may_be_missing(run_directory, name, field):
    (run_directory / name).unlink()
    assert not getattr(read_run(run_directory), field)


def test_a_folder_that_is_no_run_is_refused(tmp_path, run_directory):
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        read_run(tmp_path / "nowhere")
    (run_directory / "plan.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"no plan\.json"):
        read_run(run_directory)


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("plan.json", '"batch"', '"badge"', r"plan\.json: Plan: "),
        ("report.json", '"complete"', '"splendid"', r"report\.json: RunReport\.status"),
        ("estimate.json", '"estimate"', '"guess"', r"estimate\.json: Prediction: "),
    ],
)
def test_a_damaged_file_is_named_with_the_place(run_directory, name, before, after, message):
    """Files that are no JSON, or no object: tests/faults/test_damaged_run_directories.py."""
    path = run_directory / name
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(RunDirectoryError, match=message):
        read_run(run_directory)


def test_a_file_that_is_not_text_is_named(run_directory):
    (run_directory / "recipe.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(RunDirectoryError, match=r"recipe\.yaml: not UTF-8 at byte 7"):
        read_run(run_directory)
