"""Files of a run that are not what a run writes: one readable refusal wherever they are read."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from fitune.checkpoint.state import TrainState
from fitune.errors import CheckpointError
from fitune.train.start import where_to_start
from fitune.values.serial import from_json, to_data

SHAPES = {
    "a list": "[1, 2]",
    "null": "null",
    "a number": "1",
    "deep": "[" * 100_000,
    "deep and whole": '{"a":' * 5000 + "1" + "}" * 5000,
    "strings": '{"plan": "x", "status": 5, "estimate": [], "model": {}}',
    "a huge number": '{"seconds": 1' + "0" * 400 + "}",
    "bytes": "\udcff\udcfe",
    "twice": '{"status": "complete", "status": "failed"}',
    "empty": "",
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    return {"run": tmp_path_factory.mktemp("finished") / "run"}


@pytest.fixture
def run(train, finished, tmp_path):
    """A copy of one finished run with a checkpoint."""
    if not finished["run"].exists():
        assert train(output_dir=finished["run"], save_steps=1)[0] == 0
    return Path(shutil.copytree(finished["run"], tmp_path / "run", symlinks=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plan.json", "report.json", "estimate.json", "metrics.jsonl"])
def test_a_file_of_another_shape_is_named(call, run, name, shape):
    more = b"\n{}\n" if name == "metrics.jsonl" else b""  # its last line may be torn
    (run / name).write_bytes(SHAPES[shape].encode("utf-8", "surrogateescape") + more)
    for command in ("report", "export"):
        call(command, run).ends(2, name)


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
def test_going_on_from_a_file_of_another_shape_is_refused(train, run, name):
    (run / name).write_text("[1, 2]\n{}\n")
    train("--resume", output_dir=run, save_steps=1, max_steps=3).ends(2, name)


@pytest.mark.parametrize("killed", [False, True])
def test_a_log_of_another_shape_is_put_back(train, run, killed):
    if killed:
        (run / "report.json").unlink()
    before = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("[1, 2]\n{}\n")
    train("--resume", output_dir=run, save_steps=1, max_steps=3).ends(
        0, "was changed or cut; the lines up to step 2 are put back"
    )
    assert (run / "metrics.jsonl").read_text().startswith(before)


def _state(plan, facts):
    good = {
        "plan": to_data(plan),
        "engine": {},
        "epoch": 0,
        "position": 0,
        "best_eval_loss": None,
        "steps_of_other_plan": 0,
        "rows": "",
        "base": "",
    }
    known = {name: value for name, value in {**good, **facts}.items() if value != "missing"}
    return TrainState(step=1, tensors={"model": {}, "optimizer": {}, "rng": {}}, facts=known)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        *(({name: "missing"}, name) for name in ("plan", "engine", "epoch", "position")),
        *(({"plan": value}, "plan") for value in (None, [], "x", 1, {}, {"kind": "Plan", "model": []})),
        ({"epoch": "x"}, "epoch"),
        ({"best_eval_loss": "x"}, "best_eval_loss"),
    ],
)
def test_a_state_that_is_no_training_state_is_refused(
    make_plan,
    tmp_path,
    monkeypatch,
    facts,
    cause,
):
    plan = make_plan()
    found = [_state(plan, {}), _state(plan, facts)]
    monkeypatch.setattr(
        import_module("fitune.train.start"), "load_checkpoint", lambda path, verified: found.pop(0)
    )
    assert where_to_start(tmp_path, plan, resume="step-1").step == 1
    with pytest.raises(CheckpointError, match=f"the checkpoint of step 1 cannot be used: .*{cause}"):
        where_to_start(tmp_path, plan, resume="step-1")


def test_numbers_too_large_for_a_float_are_refused():
    with pytest.raises(ValueError, match="below 1e308"):
        from_json(float, "1" + "0" * 400)
