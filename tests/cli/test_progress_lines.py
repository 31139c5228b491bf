"""What a person sees of a run when nobody draws bars: one plain line a step."""

import io
import math
from contextlib import closing, redirect_stdout, suppress

from fitune.cli.terminal import Progress, step_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(reports, *, log_every=1):
    stream = io.StringIO()
    with redirect_stdout(stream):
        progress = Progress(log_every=log_every)
    for report in reports:
        progress.step(report)
    progress.close()
    return stream.getvalue().splitlines()


def test_a_line_says_what_tells_most_in_80_columns(make_step):
    long = make_step(12_345, total_steps=200_000, eval_loss=2.25, skipped=True, loss_scale=32768.0)
    for step, memory_mib, line in (
        (make_step(12), 0, "step  12/200  loss 2.314  lr 1.9e-04  grad 0.820  1,234 tok/s  3 min 10 s left"),
        (make_step(12), 412, "step  12/200  loss 2.314  grad 0.820  1,234 tok/s  412.0 MiB  3 min 10 s left"),
        (long, 412, "step  12345/200000  loss 2.314  eval 2.250  skipped, loss scale 32768"),
    ):
        assert step_line(step, memory_bytes=memory_mib * 2**20, remaining=190) == line
        assert len(line) <= 80


def test_every_log_every_th_step_has_a_line_and_the_first_and_the_last(make_step):
    lines = lines_of([make_step(step, total_steps=11) for step in range(1, 12)], log_every=4)
    assert [line.split("/")[0].split()[1] for line in lines] == ["1", "4", "8", "11"]


def test_an_evaluated_and_a_skipped_step_are_never_left_out(make_step):
    changes = ({}, {"eval_loss": 2.5}, {"skipped": True, "loss_scale": 32768.0, "loss": math.nan}, {})
    reports = [make_step(number, **changed) for number, changed in enumerate(changes, 1)]
    _, evaluated, skipped = lines_of(reports, log_every=100)
    assert "eval 2.500" in evaluated
    assert "loss nan  " in skipped
    assert "skipped, loss scale 32768" in skipped


def test_the_highest_peak_stays_when_a_step_was_not_measured(make_step):
    lines = lines_of([make_step(1), make_step(2, memory_bytes={})])
    assert "412.0 MiB" in lines[1]
    assert "MiB" not in lines_of([make_step(1, memory_bytes={})])[0]


def test_the_time_left_leaves_the_first_step_out_and_ends_with_the_last(make_step):
    steps = [
        make_step(step, total_steps=205, step_seconds=2.0, data_seconds=0.5) for step in (2, 3, 4, 5, 205)
    ]
    lines = lines_of([make_step(1, total_steps=205, step_seconds=60.0, data_seconds=0.0), *steps])
    assert lines[0].endswith("3 h 24 min left")
    assert lines[-2].endswith("8 min 20 s left")
    assert " left" not in lines[-1]


def test_a_terminal_gets_a_bar_and_is_given_back_when_training_fails(make_step):
    stream = Terminal()
    with redirect_stdout(stream), suppress(RuntimeError), closing(Progress()) as progress:
        for report in (make_step(1), make_step(2, eval_loss=2.25)):
            progress.step(report)
        raise RuntimeError
    text = stream.getvalue()
    assert all(shown in text for shown in ("2/200", "loss 2.314", "eval 2.250"))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and shown again


def test_where_steps_are_written_over_each_other_a_note_has_a_line_of_its_own(make_step):
    stream = io.StringIO()
    with redirect_stdout(stream):
        progress = Progress(redrawn=True)
    for step in (1, 2, 3):
        progress.step(make_step(step))
    assert stream.getvalue().count("\n") == 1, "the first step stays"
    progress.end_line()
    progress.end_line()
    assert stream.getvalue().count("\n") == 2
