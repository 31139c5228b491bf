"""Row 3 of the fault table: one signal lets the step be finished, the next stops at once, and the exit code is the
signal's own, whatever the program was doing."""

import os
import signal
import subprocess
import sys

import pytest

from faults import stopped_programs
from faults.faulty_ranks import until_ready
from fitune.models.language_model import LanguageModel
from fitune.session.signals import EXIT_CODES, StopRequest
from fitune.values.rank_status import LAUNCHER
from runs import report_of, set_words

TERM, INT = signal.SIGTERM, signal.SIGINT
slow, weekly = pytest.mark.slow, pytest.mark.weekly


@pytest.fixture
def program(settings):
    """The command line in a process of its own that waits in a function."""

    def begin(target, *words, call=1):
        if words[0] == "train":
            three = {"max_steps": 3, "gradient_accumulation_steps": 1, "save_steps": 1}
            words = (*words, *set_words(settings | three))
        started = subprocess.Popen(
            [sys.executable, stopped_programs.__file__, target, str(call), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until_ready(started)
        return started

    return begin


def _end(started):
    out, err = started.communicate(timeout=300)
    assert "Traceback" not in out + err
    return started.returncode, out + err


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
    [((TERM,), 143), ((INT,), 130), ((TERM, TERM), 143), ((INT, TERM), 143), ((TERM, INT), 130)],
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


@slow
def test_the_second_signal_ends_the_program_with_its_own_code(program, tmp_path):
    started = program("fitune.models.language_model.LanguageModel.loss_and_gradient", "train", call=2)
    assert started.stderr is not None
    started.send_signal(TERM)
    while "stopping after this step" not in (line := started.stderr.readline()):
        assert line, "it ended and did not say that it stops"
    started.send_signal(INT)
    assert _end(started)[0] == 130
    assert report_of(tmp_path / "run").status == "interrupted"


@pytest.mark.parametrize(
    ("target", "number"),
    [
        pytest.param("fitune.train.run.prepare_data", TERM, id="tokenising", marks=slow),
        pytest.param(
            "fitune.data.conversations.templates.PieceEncoder.encode", INT, id="encoding", marks=weekly
        ),
        pytest.param("fitune.data.loader.pack_rows", TERM, id="packing", marks=weekly),
        pytest.param("fitune.data.loader.Loader.epoch", INT, id="loader", marks=slow),
        pytest.param("fitune.train.run.prepare", TERM, id="loading", marks=weekly),
        pytest.param("fitune.session.train.beginning.plan_to_train", INT, id="planning", marks=slow),
    ],
)
def test_before_the_first_step_one_signal_stops(program, target, number):
    started = program(target, "train", "--set", "packing=true")
    started.send_signal(number)
    assert _end(started)[0] == {TERM: 143, INT: 130}[number]


@slow
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("fitune.score.engines.opening.load_model", ("score", "--out", "{tmp}/out")),
        ("fitune.session.demo.write_demo", ("demo", "--out", "{tmp}/demo")),
        ("fitune.session.reported.report_run", ("report", "{tmp}")),
    ],
    ids=["score", "demo", "report"],
)
def test_every_command_ends_with_the_code_of_the_signal(
    program, tmp_path, model_folder, data_file, target, words
):
    given = [word.format(tmp=tmp_path) for word in words]
    given += ["--model", str(model_folder), "--data", str(data_file)] if words[0] == "score" else []
    started = program(target, *given)
    started.send_signal(TERM)
    assert _end(started)[0] == 143


def test_the_handler_stops_at_once_where_there_is_no_step_to_finish(
    capfd,
):
    request = StopRequest()
    for number, code in EXIT_CODES.items():
        with pytest.raises(SystemExit) as ended:
            request.note(number, None)
        assert ended.value.code == code
    request._is_under_way = True
    request.note(TERM, None)
    assert request.asked()
    with pytest.raises(SystemExit) as ended:
        request.note(INT, None)
    assert (ended.value.code, request.exit_code) == (130, 143)
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
