"""Files of a run that are not what a run writes: one readable refusal wherever they are read."""

import pytest

SHAPES = {
    "a list": "[1, 2]",
    "null": "null",
    "deep": "[" * 100_000,
    "strings": '{"plan": "x", "status": 5, "estimate": [], "model": {}}',
    "a huge number": '{"seconds": 1' + "0" * 400 + "}",
    "bytes": "\udcff\udcfe",
    "twice": '{"status": "complete", "status": "failed"}',
    "empty": "",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plan.json", "report.json", "estimate.json", "metrics.jsonl"])
def test_a_file_of_another_shape_is_named(call, saved, name, shape):
    more = b"\n{}\n" if name == "metrics.jsonl" else b""  # its last line may be torn
    (saved / name).write_bytes(SHAPES[shape].encode("utf-8", "surrogateescape") + more)
    for command in ("report", "export"):
        call(command, saved).ends(2, name)


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
def test_going_on_from_a_file_of_another_shape_is_refused(train, saved, name):
    (saved / name).write_text("[1, 2]\n{}\n")
    train("--resume", save_steps=1, max_steps=3).ends(2, name)


def test_a_log_of_another_shape_is_put_back(train, saved):
    """As a kill leaves it: there is no report.json."""
    (saved / "report.json").unlink()
    before = (saved / "metrics.jsonl").read_text()
    (saved / "metrics.jsonl").write_text("[1, 2]\n{}\n")
    train("--resume", save_steps=1, max_steps=3).ends(
        0, "was changed or cut; the lines up to step 2 are put back"
    )
    assert (saved / "metrics.jsonl").read_text().startswith(before)
