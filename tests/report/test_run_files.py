"""A run directory is read whole, or the error names the file and the place."""

import json

import pytest

from fitune.errors import RunDirectoryError
from fitune.report.run_files import read_run
from fitune.values.run_directory import moved
from fitune.values.serial import to_json


def test_everything_is_read_back(run_directory, plan, prediction, steps, run_report):
    run = read_run(run_directory)
    assert run.plan == moved(plan, run_directory)
    assert (run.prediction, run.steps, run.run) == (prediction, tuple(steps), run_report)
    assert run.estimate == prediction.estimate
    assert "lora_r: 16" in run.recipe


def test_a_prediction_written_whole_reads_the_same(run_directory, prediction):
    (run_directory / "estimate.json").write_text(to_json(prediction))
    assert read_run(run_directory).prediction == prediction


@pytest.mark.parametrize("name", ["estimate.json", "metrics.jsonl", "report.json", "recipe.yaml"])
def test_any_file_but_the_plan_may_be_missing(run_directory, name):
    (run_directory / name).unlink()
    run = read_run(run_directory)
    missing = {
        "estimate.json": run.prediction, "metrics.jsonl": run.steps, "report.json": run.run, "recipe.yaml": run.recipe
    }[name]  # fmt: skip
    assert not missing


def test_a_folder_that_is_no_run_is_refused(tmp_path, run_directory):
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        read_run(tmp_path / "nowhere")
    (run_directory / "plan.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"no plan\.json"):
        read_run(run_directory)


def _without(key):
    def change(text):
        data = json.loads(text)
        del data[key]
        return json.dumps(data)

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("plan.json", lambda text: text[:200], r"plan\.json: not JSON: line \d+"),
        ("plan.json", _without("batch"), r"plan\.json: Plan: missing key 'batch'"),
        ("plan.json", lambda text: "[]", r"plan\.json: Plan: expected an object"),
        (
            "report.json",
            lambda text: text.replace('"complete"', '"splendid"'),
            r"report\.json: RunReport\.status",
        ),
        ("estimate.json", _without("estimate"), r"estimate\.json: Prediction: missing key 'estimate'"),
        ("estimate.json", lambda text: "", r"estimate\.json: not JSON: line 1"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(run_directory, name, change, message):
    path = run_directory / name
    path.write_text(change(path.read_text()))
    with pytest.raises(RunDirectoryError, match=message):
        read_run(run_directory)


def test_a_file_that_is_not_text_is_named(run_directory):
    (run_directory / "recipe.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(RunDirectoryError, match=r"recipe\.yaml: not UTF-8 at byte 7"):
        read_run(run_directory)
