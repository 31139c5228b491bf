"""Files of a run that are not what a run writes: one readable refusal wherever they are read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fitune.checkpoint.state import TrainState
from fitune.errors import CheckpointError
from fitune.spec.plan import Plan
from fitune.spec.serial import from_json, to_data
from fitune.train.resume import _compatible

Call = Callable[..., tuple[int, str, str]]

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
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"run": tmp_path_factory.mktemp("finished") / "run"}


@pytest.fixture
def run(train: Call, finished: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of one finished run with a checkpoint."""
    if not finished["run"].exists():
        assert train(output_dir=finished["run"], save_steps=1)[0] == 0
    return Path(shutil.copytree(finished["run"], tmp_path / "run", symlinks=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plan.json", "report.json", "estimate.json", "metrics.jsonl"])
def test_a_file_of_another_shape_is_named(call: Call, run: Path, name: str, shape: str) -> None:
    more = b"\n{}\n" if name == "metrics.jsonl" else b""  # its last line may be torn
    (run / name).write_bytes(SHAPES[shape].encode("utf-8", "surrogateescape") + more)
    for command in ("report", "export"):
        code, _, err = call(command, run)
        assert code == 2
        assert name in err


@pytest.mark.parametrize("name", ["plan.json", "report.json", "metrics.jsonl"])
def test_going_on_from_a_file_of_another_shape_is_refused(train: Call, run: Path, name: str) -> None:
    (run / name).write_text("[1, 2]\n{}\n")
    code, _, err = train("--resume", output_dir=run, save_steps=1, max_steps=3)
    assert code == 2
    assert name in err


def _state(plan: Plan, facts: dict[str, object]) -> TrainState:
    good = {
        "plan": to_data(plan),
        "engine": {},
        "epoch": 0,
        "position": 0,
        "best_eval_loss": None,
        "rows": "",
        "base": "",
    }
    known = {name: value for name, value in {**good, **facts}.items() if value != "missing"}
    return TrainState(step=1, tensors={"model": {}, "optimizer": {}, "rng": {}}, facts=known)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        *(({name: "missing"}, f"{name} is missing") for name in ("plan", "engine", "epoch", "position")),
        *(({"plan": value}, "plan is missing or of another type") for value in (None, [], "x", 1)),
        ({"plan": {}}, "missing key"),
        ({"plan": {"kind": "Plan", "model": []}}, "Plan"),
        ({"epoch": "x"}, "epoch is missing or of another type"),
        ({"best_eval_loss": "x"}, "best_eval_loss is missing or of another type"),
    ],
)
def test_a_state_that_is_no_training_state_is_refused(
    make_plan: Callable[..., Plan], facts: dict[str, object], cause: str
) -> None:
    plan = make_plan()
    assert _compatible(_state(plan, {}), plan).step == 1
    with pytest.raises(CheckpointError, match=cause):
        _compatible(_state(plan, facts), plan)


def test_numbers_too_large_for_a_float_are_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        from_json(float, "1" + "0" * 400)
