"""metrics.jsonl is the truth: nothing is hidden in it, nothing is lost by a kill, nothing is left half-written."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from fitune.errors import RunDirectoryError
from fitune.track.metrics import MetricsLog, read_metrics, to_line
from fitune.train.run import not_yet_logged
from fitune.values.reports import Restart


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def steps_of(path):
    return [report.step for report in read_metrics(path)]


def first_three(path):
    return b"".join(path.read_bytes().splitlines(keepends=True)[:3])


@pytest.fixture
def log_of_five(path, make_step):
    with MetricsLog(path) as log:
        for step in range(1, 6):
            log.append(make_step(step, eval_loss=2.5 if step == 5 else None))
    return path


def test_what_is_written_is_read_back(log_of_five, make_step):
    assert read_metrics(log_of_five) == [make_step(n, eval_loss=2.5 if n == 5 else None) for n in range(1, 6)]
    log_of_five.unlink()
    assert read_metrics(log_of_five) == []


def test_a_line_is_there_before_the_log_is_closed(path, make_step):
    log = MetricsLog(path)
    log.append(make_step(1))
    assert read_metrics(path) == [make_step(1)]
    log.close()
    log.close()


def test_a_loss_that_is_not_finite_is_visible_and_valid_json(path, make_step):
    line = to_line(make_step(3, loss=math.nan, grad_norm=math.inf, eval_loss=-math.inf))
    data = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (data["loss"], data["grad_norm"], data["eval_loss"]) == ("nan", "inf", "-inf")
    path.parent.mkdir()
    path.write_bytes(line)
    (again,) = read_metrics(path)
    assert math.isnan(again.loss)
    assert (again.grad_norm, again.eval_loss) == (math.inf, -math.inf)


@pytest.mark.parametrize("cut", [1, 100, -2, -1])
def test_a_line_torn_anywhere_costs_only_itself_and_the_log_goes_on(log_of_five, make_step, cut):
    content = log_of_five.read_bytes()
    end = content.rindex(b"\n", 0, -1) + 1 + cut if cut > 0 else len(content) + cut
    log_of_five.write_bytes(content[:end])
    whole = [1, 2, 3, 4, 5] if cut == -1 else [1, 2, 3, 4]  # of the last, only its newline was torn off
    assert steps_of(log_of_five) == whole
    with MetricsLog(log_of_five) as log:
        log.append(make_step(6))
    assert steps_of(log_of_five) == [*whole, 6]


@pytest.mark.parametrize("tail", [b"\x00\x00\x00\x00", b'{"text": "\xff\xfe', b'{"step": 6\n'])
def test_the_log_goes_on_after_what_is_no_line(log_of_five, make_step, tail):
    with log_of_five.open("ab") as file:
        file.write(tail)
    assert len(read_metrics(log_of_five)) == 5
    with MetricsLog(log_of_five) as log:
        log.append(make_step(6))
    assert steps_of(log_of_five) == [1, 2, 3, 4, 5, 6]


def test_a_bad_line_in_the_middle_is_an_error_with_its_number(log_of_five):
    one, _, *others = log_of_five.read_bytes().splitlines(keepends=True)
    log_of_five.write_bytes(b"".join([one, b'{"step": \n', *others]))
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(log_of_five)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"loss": "low"}, "expected float, found 'low'"),
        ({"lost": 1}, "unknown key 'lost'"),
        ({"step": 1.5}, "expected int"),
    ],
)
def test_a_whole_line_with_wrong_values_is_an_error_even_at_the_end(log_of_five, change, cause):
    *lines, last = log_of_five.read_text().splitlines()
    log_of_five.write_text("\n".join([*lines, json.dumps(json.loads(last) | change)]) + "\n")
    with pytest.raises(RunDirectoryError, match=cause):
        read_metrics(log_of_five)


def test_resuming_drops_the_later_steps_and_writes_them_again(log_of_five, make_step):
    saved = first_three(log_of_five)
    with MetricsLog(log_of_five) as log:
        assert not log.restart(saved, step=3)
        assert log_of_five.read_bytes() == saved
        log.append(make_step(4, loss=1.0))
        assert log.content == log_of_five.read_bytes()
    losses = [(report.step, report.loss) for report in read_metrics(log_of_five)]
    assert losses == [(1, 2.314), (2, 2.314), (3, 2.314), (4, 1.0)]
    with MetricsLog(log_of_five) as log:
        assert not log.restart(b"", step=0)
    assert log_of_five.read_bytes() == b""
    assert [file.name for file in log_of_five.parent.iterdir()] == ["metrics.jsonl"]


def lines(*numbers):
    return lambda five: b"".join(five[number - 1] for number in numbers)


@pytest.mark.parametrize(
    "damaged",
    [
        lines(),
        lines(1, 3, 4, 5),
        lambda five: five[0] + five[1][:40],
        lambda five: five[0] + b"\0" * 40 + b"\n" + five[2],
        lines(1, 2, 2, 3, 4),
        lines(2, 1, 3),
        lambda five: five[0].replace(b"2.314", b"1.314") + five[1] + five[2],
    ],
)
def test_whatever_became_of_the_log_it_is_put_back_and_said(log_of_five, damaged):
    saved = first_three(log_of_five)
    log_of_five.write_bytes(damaged(log_of_five.read_bytes().splitlines(keepends=True)))
    with MetricsLog(log_of_five) as log:
        assert log.restart(saved, step=3)
    assert log_of_five.read_bytes() == saved


@pytest.mark.parametrize("tail", [lines(4, 5), lambda five: five[3] + five[4][:50]])
def test_what_a_kill_leaves_behind_is_not_worth_a_word(log_of_five, tail):
    saved, five = first_three(log_of_five), log_of_five.read_bytes().splitlines(keepends=True)
    log_of_five.write_bytes(saved + tail(five))
    with MetricsLog(log_of_five) as log:
        assert not log.restart(saved, step=3)


def test_an_evaluation_that_came_after_the_save_is_not_worth_a_word(log_of_five, make_step):
    saved = first_three(log_of_five)
    with MetricsLog(log_of_five) as log:
        log.restart(saved, step=3)
        log.replace_last(make_step(3, eval_loss=1.5))
        assert not log.restart(saved, step=3)


def test_a_kill_while_restarting_leaves_the_old_lines(log_of_five, monkeypatch):
    before = log_of_five.read_bytes()
    log = MetricsLog(log_of_five)
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        log.restart(b"", step=0)
    assert log_of_five.read_bytes() == before


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: os.truncate(path, 99), lambda path: path.write_bytes(b"")]
)
def test_a_log_that_is_damaged_while_it_is_written_is_put_back(log_of_five, make_step, damage):
    with MetricsLog(log_of_five) as log:
        assert log.put_back() == ""
        damage(log_of_five)
        log.append(make_step(6))
        assert "put back" in log.put_back()
        log.append(make_step(7))
    assert steps_of(log_of_five) == list(range(1, 8))


def test_a_disk_that_is_full_for_a_while_leaves_a_log_that_goes_on(log_of_five, make_step, monkeypatch):
    with MetricsLog(log_of_five) as log:
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(RunDirectoryError, match="No space left on device"):
                log.replace_last(make_step(5, eval_loss=1.25))
        assert "put back" in log.put_back()
        log.append(make_step(6))
    assert [step.eval_loss for step in read_metrics(log_of_five)[4:]] == [1.25, None]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"file/metrics\.jsonl: cannot be used"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")


def test_a_restart_is_told_until_a_step_told_it(path, make_step):
    """By the first step after it, whichever attempt does that step: an attempt that ran out of memory did none."""
    lost = Restart(
        cause="a worker is gone", workers_before=2, workers=1, after_step=0, lost_steps=0, lost_at=100.0,
        repeated_seconds=0.0,
    )  # fmt: skip
    with MetricsLog(path) as log:
        assert not_yet_logged((), (lost,), log) == ((), (lost,))
        log.append(make_step(1, restarts=(replace(lost, again_at=130.0),)))
        assert not_yet_logged((), (lost,), log) == ((), ())
