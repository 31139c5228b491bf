"""After memory ran out the next attempt has a process of its own: address space and heap are whole there."""

import subprocess
import sys

import pytest

from faults import one_failure
from fitune.errors import RunDirectoryError
from fitune.session.planning import plan_for
from fitune.session.train.attempts import Attempt, hand_over, take_over
from fitune.spec.recipe.recipe import canonical_keys, dump_recipe, parse_recipe
from fitune.spec.reports import Restart
from fitune.spec.run_directory import RETRY
from runs import report_of, set_words

RESTART = Restart(
    cause="a worker is gone", workers_before=2, workers=1, after_step=2, lost_steps=1, lost_at=100.0,
    repeated_seconds=1.0,
)  # fmt: skip


ONE_BATCH = {"gradient_accumulation_steps": 1, "max_steps": 3, "save_steps": 1}


@pytest.mark.parametrize(
    ("words", "processes"),
    [(("train",), 1), pytest.param(("compare", "--tunings", "lora"), 2, marks=pytest.mark.slow)],
    ids=["train", "compare"],
)
def test_the_program_begins_anew_and_goes_on(tmp_path, settings, words, processes):
    ended = subprocess.run(
        [sys.executable, one_failure.__file__, *words, *set_words(settings | ONE_BATCH)],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    begun = [line for line in ended.stdout.splitlines() if line.startswith("process ")]
    assert len(begun) == 2
    assert len(set(begun)) == processes
    directory = tmp_path / "run" / ("lora" if words[0] == "compare" else "")
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
