"""After memory ran out the next attempt has a process of its own: address space and heap are whole there."""

import json
import subprocess
import sys

import pytest

from faults import one_failure
from fitune.errors import RunDirectoryError, is_out_of_memory
from fitune.session.fresh_process import hand_over, take_over
from fitune.session.planning import plan_for
from fitune.session.train.attempts import Attempt
from fitune.spec.recipe.recipe import canonical_keys, dump_recipe, parse_recipe
from fitune.spec.reports import Restart
from fitune.spec.run_directory import RETRY

RESTART = Restart(
    cause="a worker is gone", workers_before=2, workers=1, after_step=2, lost_steps=1, lost_at=100.0,
    repeated_seconds=1.0,
)  # fmt: skip


def _settings(model_folder, data_file, directory):
    return {
        "model": str(model_folder), "data": str(data_file), "tuning": "lora", "precision": "fp32", "gpu": "cpu",
        "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "samples": 0,
        "save_steps": 1, "output_dir": str(directory),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "processes"),
    [(("train",), 1), pytest.param(("compare", "--tunings", "lora"), 2, marks=pytest.mark.slow)],
    ids=["train", "compare"],
)
def test_the_program_begins_anew_and_goes_on(tmp_path, model_folder, data_file, words, processes):
    settings = _settings(model_folder, data_file, tmp_path / "run")
    ended = subprocess.run(
        [
            sys.executable, one_failure.__file__, *words,
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
        ],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    begun = [line for line in ended.stdout.splitlines() if line.startswith("process ")]
    assert len(begun) == 2
    assert len(set(begun)) == processes
    directory = tmp_path / "run" / ("lora" if words[0] == "compare" else "")
    report = json.loads((directory / "report.json").read_text())
    assert report["status"] == "complete"
    (retry,) = report["retries"]
    assert retry["after_step"] == 1
    assert "micro_batch_size 2 × 2 accumulated" in retry["after"]
    assert not (directory / RETRY).exists()


def test_an_attempt_is_handed_over_whole_and_once(tmp_path, model_folder, data_file):
    settings = _settings(model_folder, data_file, tmp_path)
    recipe = parse_recipe(canonical_keys({**settings, "lora_target_modules": "q_proj, v_proj"}, where="test"))
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


def test_an_address_space_that_is_full_is_memory_that_ran_out():
    assert is_out_of_memory(RuntimeError("unable to mmap 4096 bytes from file <weights>"))
