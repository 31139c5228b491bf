"""Trackers: fed by the same report, refused when unknown, never able to stop or to fool a run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fitune.errors import MissingExtra, RecipeError
from fitune.spec.reports import StepReport
from fitune.track.metrics import TRACKERS, GuardedSink, TensorBoardSink, open_sinks, scalars

MakeStep = Callable[..., StepReport]


class Recording:
    """Remembers its steps and fails at one of them."""

    def __init__(self, fails_at: int = 0, error: Exception | None = None) -> None:
        self.steps: list[int] = []
        self.fails_at = fails_at
        self.error = error or ConnectionError("the server is gone")

    def start(self, plan: object, run_name: str) -> None: ...

    def step(self, report: StepReport) -> None:
        if report.step == self.fails_at:
            raise self.error
        self.steps.append(report.step)

    def finish(self, report: object) -> None: ...


def test_none_and_nothing_open_no_tracker(tmp_path: Path) -> None:
    assert open_sinks([], tmp_path) == open_sinks(["none"], tmp_path) == []


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="unknown tracker 'tensorbord'") as caught:
        open_sinks(["tensorbord"], tmp_path)
    assert caught.value.hint == "did you mean 'tensorboard'?"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet", "WandB"])
def test_a_tracker_of_a_later_version_is_refused_as_such(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is not in this version"):
        open_sinks([name], tmp_path)


def test_a_tracker_without_its_library_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(MissingExtra, match="fitune\\[track\\]"):
        open_sinks(["tensorboard"], tmp_path)


def test_a_failing_tracker_warns_once_and_is_left_out(make_step: MakeStep) -> None:
    sink = Recording(fails_at=2)
    guarded = GuardedSink(sink, name="remote")
    guarded.step(make_step(1))
    with pytest.warns(
        RuntimeWarning, match="tracker remote failed .* ConnectionError: the server is gone"
    ) as caught:
        guarded.step(make_step(2))
    guarded.step(make_step(3))
    guarded.finish(None)
    assert len(caught) == 1
    assert sink.steps == [1]


def test_a_bug_is_not_taken_for_a_failing_tracker(make_step: MakeStep) -> None:
    with pytest.raises(KeyError):
        GuardedSink(Recording(fails_at=1, error=KeyError("loss")), name="remote").step(make_step(1))


def test_every_number_of_a_step_is_a_curve(make_step: MakeStep) -> None:
    report = make_step(7, eval_loss=2.5)
    curves = dict(scalars(report))
    assert curves["train/loss"] == report.loss
    assert curves["eval/loss"] == 2.5
    assert curves["memory_bytes/backward"] == 412 * 1024**2
    assert "eval/loss" not in dict(scalars(make_step(8)))


@pytest.fixture
def installed() -> None:
    pytest.importorskip("tensorboard")


tensorboard = pytest.mark.usefixtures("installed")


def events_of(directory: Path) -> object:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


@tensorboard
def test_tensorboard_reads_back_what_was_reported(tmp_path: Path, make_step: MakeStep, plan: object) -> None:
    (sink,) = open_sinks(["tensorboard", "tensorboard"], tmp_path)
    sink.start(plan, "first")
    for step in range(1, 4):
        sink.step(make_step(step, loss=2.0 / step, eval_loss=1.5 if step == 3 else None))
    sink.finish(None)
    events = events_of(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3)),
    ]  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 1.5)]
    assert events.Tensors("run")[0].tensor_proto.string_val == [b"first"]


@tensorboard
def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path, make_step: MakeStep, plan: object) -> None:
    for steps, loss in ((range(1, 6), 2.0), (range(4, 8), 1.0)):
        sink = TensorBoardSink(tmp_path / "tb")
        sink.start(plan, "run")
        for step in steps:
            sink.step(make_step(step, loss=loss))
        sink.finish(None)
    scalars_read = events_of(tmp_path / "tb").Scalars("train/loss")
    assert [(e.step, e.value) for e in scalars_read] == [
        (1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, 1.0), (6, 1.0), (7, 1.0),
    ]  # fmt: skip


@tensorboard
def test_a_tracker_that_cannot_write_does_not_stop_the_run(
    tmp_path: Path, make_step: MakeStep, plan: object
) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    (sink,) = open_sinks(["tensorboard"], tmp_path)
    with pytest.warns(RuntimeWarning, match="tracker tensorboard failed"):
        sink.start(plan, "run")
    sink.step(make_step(1))
    sink.finish(None)


def test_a_tracker_is_one_class_and_one_row(tmp_path, monkeypatch):
    told = []

    class Toy:
        def __init__(self, directory):
            told.append(directory.name)

        def start(self, plan, run_name):
            told.append(run_name)

        def step(self, report):
            told.append(report)

        def finish(self, report):
            told.append("end")

    monkeypatch.setitem(TRACKERS, "toy", Toy)
    (sink,) = open_sinks(["toy"], tmp_path)
    sink.start(None, "a run")
    sink.step(1)
    sink.finish(None)
    assert told == ["toy", "a run", 1, "end"]
