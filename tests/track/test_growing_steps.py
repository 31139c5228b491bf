"""A metrics.jsonl that grows is read once, line by line."""

import pytest

from fitune.errors import RunDirectoryError
from fitune.track.metrics import GrowingSteps, MetricsLog, to_line
from report.conftest import make_steps


def test_only_what_is_new_is_read(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [to_line(step) for step in make_steps(6)]
    growing = GrowingSteps(path)
    growing.look()
    assert growing.steps == []
    path.write_bytes(b"".join(lines[:3]) + lines[3][:50])  # the writer is in the middle of a line
    growing.look()
    first = growing.steps[0]
    with path.open("ab") as file:
        file.write(lines[3][50:] + lines[4])
    growing.look()
    assert [step.step for step in growing.steps] == [1, 2, 3, 4, 5]
    assert growing.steps[0] is first


def test_a_resume_replaces_the_lines(tmp_path):
    path, steps = tmp_path / "metrics.jsonl", make_steps(6)
    growing = GrowingSteps(path)
    with MetricsLog(path) as log:
        for step in steps[:5]:
            log.append(step)
        growing.look()
        log.restart(b"".join(map(to_line, steps[:2])), step=2)
        log.append(steps[2])
        growing.look()
    assert growing.steps == steps[:3]


def test_a_damaged_line_is_named_and_a_link_is_not_followed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(to_line(make_steps(1)[0]) + b"{}\n")
    growing = GrowingSteps(path)
    for _ in range(2):  # a second look is at the same lines
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2: not a line of metrics"):
            growing.look()
    assert growing.steps == []
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(RunDirectoryError, match="a link or a socket"):
        GrowingSteps(link).look()
