"""A demo folder that is there already: what the user put there stays, the demo can be run again."""

import pytest

from fitune.errors import RunDirectoryError
from fitune.session import demo
from fitune.session.events import Planned, ignore_event


@pytest.mark.slow
def test_the_demo_runs_again_over_an_earlier_one_and_keeps_what_is_not_its_own(quick_demo, tmp_path):
    folder = tmp_path / "demo"
    told = []
    demo.run_demo(folder, emit=told.append, gpus=1)
    assert all(event.report.run is not None for event in told if isinstance(event, Planned))
    theirs = [folder / "notes.txt", folder / "lora" / "notes.txt", folder / "mine" / "notes.txt"]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_text("three years")
    adapter = (folder / "lora" / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    demo.run_demo(folder, emit=ignore_event, gpus=1)
    assert [file.read_text() for file in theirs] == ["three years"] * 3
    assert (folder / "lora" / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns > adapter
    assert (folder / "lora" / "scores" / "grades.jsonl").is_file()


def test_a_folder_that_is_no_demo_is_refused_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="no earlier demo"):
        demo.run_demo(tmp_path, emit=ignore_event, gpus=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
