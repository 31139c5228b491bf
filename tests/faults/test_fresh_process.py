"""After memory ran out the next attempt has a process of its own: address space and heap are whole there."""

import subprocess
import sys

import pytest

from faults import one_failure
from fitune.errors import RunDirectoryError
from fitune.recipe.recipe import canonical_keys, dump_recipe, parse_recipe
from fitune.session.planning import plan_for
from fitune.session.train.attempts import Attempt, hand_over, take_over
from fitune.values.reports import Restart
from fitune.values.run_directory import RETRY
from runs import report_of, set_words

RESTART = Restart(
    cause="a worker is gone", workers_before=2, workers=1, after_step=2, lost_steps=1, lost_at=100.0,
    repeated_seconds=1.0,
)  # fmt: skip


ONE_BATCH = {"gradient_accumulation_steps": 1, "max_steps": 3, "save_steps": 1}

REPLACED = """
import os, sys
from pathlib import Path

print(os.getpid(), *sys.argv[1:])
if sys.argv[1] == "train":
    left_open = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(left_open, True)
    os.environ["LEFT_OPEN"] = str(left_open)
    from fitune.session.program import replace_process
    replace_process(Path("run"))
try:
    os.fstat(int(os.environ["LEFT_OPEN"]))
except OSError:
    print("closed")
"""


def test_the_program_begins_anew_in_the_place_of_the_first():
    """Nothing that a library left open is held on to. That it goes on: tests/faults/test_out_of_memory_retries.py."""
    ended = subprocess.run([sys.executable, "-c", REPLACED, "train"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, again, closed = ended.stdout.splitlines()
    process = first.removesuffix(" train")
    assert (again, closed) == (f"{process} go-on run", "closed")


@pytest.mark.slow
def test_a_comparison_goes_on_in_a_child(tmp_path, settings):
    words = ("compare", "--tunings", "lora", *set_words(settings | ONE_BATCH))
    ended = subprocess.run(
        [sys.executable, one_failure.__file__, *words],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    begun = [line for line in ended.stdout.splitlines() if line.startswith("process ")]
    assert (len(begun), len(set(begun))) == (2, 2)
    directory = tmp_path / "run" / "lora"
    report = report_of(directory)
    (retry,) = report.retries
    assert (report.status, retry.after_step) == ("complete", 1)
    assert "micro_batch_size 2 × 2 accumulated" in retry.after
    assert not (directory / RETRY).exists()


def test_an_attempt_is_handed_over_whole_and_once(tmp_path, settings):
    wanted = settings | ONE_BATCH | {"lora_target_modules": "q_proj, v_proj", "output_dir": str(tmp_path)}
    recipe = parse_recipe(canonical_keys(wanted, where="test"))
    for resume in (True, "some/step-8"):
        attempt = Attempt(
            recipe=dump_recipe(recipe),
            report=plan_for(recipe),
            resume=resume,
            overwrite=False,
            restarts=(RESTART,),
        )
        found = take_over(hand_over(attempt))
        assert (found, found.wanted) == (attempt, recipe)
        with pytest.raises(RunDirectoryError, match=RETRY):
            take_over(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"recipe": 1}', "[" * 5000, ""])
def test_what_is_no_attempt_is_refused(call, tmp_path, text):
    (tmp_path / RETRY).write_text(text)
    call("go-on", tmp_path).ends(2, RETRY)
