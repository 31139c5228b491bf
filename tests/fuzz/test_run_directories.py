"""A run that was finished, and then something happened to its files."""

import json
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.conftest import copied, settings_of
from fuzz.hostile import as_json, changed, damaged, nested_json

pytestmark = pytest.mark.fuzz

COMMANDS = ("resume", "report", "export")


@given(st.data(), st.sampled_from(COMMANDS))
def test_damaged_runs(
    orderly,
    finished_run,
    model_folder,
    data_file,
    data,
    command,
):
    run = copied(finished_run, finished_run.parent / "damaged")
    for _ in range(data.draw(st.integers(1, 2))):
        _damage(run, data)
    victim = finished_run.parent / "victim"
    victim.write_text("mine")
    words = {
        "resume": ["train", *settings_of(model_folder, data_file, run, max_steps=3, resume="true")],
        "report": ["report", run],
        "export": ["export", run],
    }[command]
    orderly(*words)
    assert victim.read_text() == "mine"


def _damage(run, data):
    """One file or folder: bytes changed, JSON changed, replaced by another kind of thing, or gone."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "run.lock")
    if not files:
        return
    file = data.draw(st.sampled_from(files))
    match data.draw(
        st.sampled_from(["bytes", "bytes", "json", "nested", "gone", "folder", "link", "pipe", "swap"])
    ):
        case "bytes":
            file.write_bytes(data.draw(damaged(file.read_bytes())))
        case "json" if file.suffix == ".json" or file.name == "COMMIT":
            file.write_text(as_json(data.draw(changed(_json(file)))))
        case "nested":
            file.write_text(nested_json(100_000))
        case "gone":
            shutil.rmtree(file.parent) if data.draw(st.booleans()) and file.parent != run else file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "link":
            file.unlink()
            file.symlink_to(run.parent / "victim")
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case _:
            file.write_bytes(data.draw(st.sampled_from(files)).read_bytes())


def _json(file):
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return {}
