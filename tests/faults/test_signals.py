"""Row 3 of the fault table: one signal lets the step be finished, the next stops at once, and the exit code is the
signal's own, whatever the program was doing."""

import os
import pkgutil
import signal
import subprocess
import sys

import pytest

from fitune.models.language_model import LanguageModel
from fitune.session.signals import EXIT_CODES, StopRequest
from fitune.values.rank_status import LAUNCHER
from runs import report_of

TERM, INT = signal.SIGTERM, signal.SIGINT

_STOPPED_WHILE_IMPORTING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
class Stops:
    def find_spec(name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Stops)
from fitune.__main__ import main
main()
"""


def test_a_ctrl_c_before_the_commands_are_there_ends_without_a_traceback():
    ended = subprocess.run(
        [sys.executable, "-c", _STOPPED_WHILE_IMPORTING], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-INT, "")


@pytest.mark.parametrize(
    ("signals", "code"),
    [((TERM,), 143), ((INT, INT), 130), ((INT, TERM), 143), ((TERM, INT), 130)],
)
def test_one_signal_lets_the_step_be_finished_and_the_second_stops_at_once(
    train, tmp_path, monkeypatch, signals, code
):
    """They come while the second step goes backward."""
    real, calls = LanguageModel.loss_and_gradient, []

    def signalled(*words, **named):
        calls.append("backward")
        if len(calls) == 2:
            for number in signals:
                signal.raise_signal(number)
        return real(*words, **named)

    def not_handled(number, frame):
        pytest.fail("no handler is there")

    before = {number: signal.signal(number, not_handled) for number in (TERM, INT)}
    monkeypatch.setattr(LanguageModel, "loss_and_gradient", signalled)
    try:
        ended = train(max_steps=3, gradient_accumulation_steps=1, save_steps=1)
        assert all(signal.getsignal(number) is not_handled for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.code == code
    is_finished = len(signals) == 1
    assert ("the step was finished and saved" in ended.out) is is_finished
    assert (tmp_path / "run/checkpoints/step-2/COMMIT").is_file() is is_finished
    assert report_of(tmp_path / "run").status == "interrupted"


@pytest.fixture
def stopped_in(monkeypatch):
    """Let a function be stopped by a signal as soon as it is called; Ctrl-C is Python's own, as in a terminal."""
    before = signal.signal(INT, signal.default_int_handler)

    def stop(target, number):
        owner, _, name = target.rpartition(".")

        def stopped(*words, **named):
            signal.raise_signal(number)
            pytest.fail("the handler raises")

        monkeypatch.setattr(pkgutil.resolve_name(owner), name, stopped)

    yield stop
    signal.signal(INT, before)


@pytest.mark.parametrize(
    ("target", "number", "code"),
    [
        ("fitune.train.run.prepare_data", TERM, 143),
        ("fitune.data.loader.Loader.epoch", INT, 130),
        ("fitune.train.run.prepare", TERM, 143),
        ("fitune.session.train.beginning.plan_to_train", INT, 130),
    ],
    ids=["tokenising", "loader", "loading", "planning"],
)
def test_before_the_first_step_one_signal_stops(train, stopped_in, target, number, code):
    stopped_in(target, number)
    train(packing=True).ends(code)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("fitune.score.engines.opening.load_model", ("score", "--data={data}", "--model={model}", "--out", "out")),
        ("fitune.session.demo.write_demo", ("demo", "--out", "out")),
        ("fitune.session.reported.report_run", ("report", "run")),
    ],
    ids=["score", "demo", "report"],
)  # fmt: skip
def test_every_command_ends_with_the_code_of_the_signal(
    call, stopped_in, tmp_path, monkeypatch, model_folder, data_file, target, words
):
    monkeypatch.chdir(tmp_path)
    stopped_in(target, TERM)
    call(*(word.format(data=data_file, model=model_folder) for word in words)).ends(143)


@pytest.mark.parametrize(("number", "code"), EXIT_CODES.items())
def test_the_handler_stops_at_once_where_there_is_no_step_to_finish(number, code):
    with pytest.raises(SystemExit) as ended:
        StopRequest().note(number, None)
    assert ended.value.code == code


def test_the_first_signal_among_the_steps_is_told_to_be_heard(capfd):
    request = StopRequest()
    request.start(None, "run")
    request.note(INT, None)
    assert "stopping after this step" in capfd.readouterr().err


def test_a_rank_stopped_where_nothing_can_be_raised_prints_nothing():
    """A signal may come inside a callback of C: Python ignores the exit there, and would print its traceback."""
    code = (
        "import os, signal\n"
        "from fitune.session.signals import stop_at_once\n"
        "class Callback:\n"
        "    def __del__(self): stop_at_once(signal.SIGTERM, None)\n"
        "Callback()\n"
    )
    environment = {**os.environ, LAUNCHER: "1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (said.stdout, said.stderr) == ("", "")
