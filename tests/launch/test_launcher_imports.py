"""The process that starts ranks waits for them: what they compute with takes seconds and half a gigabyte to import."""

import subprocess
import sys

PROGRAM = """
import os, sys
from fitune.cli import main

sys.argv, words = ["fitune", "train", "--modle", "x"], sys.argv[1:]
for launcher in ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {}):
    own = dict(os.environ)
    os.environ.update(launcher)
    try:
        main()
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules)
    os.environ.clear()
    os.environ.update(own)

from fitune.session import program
from fitune.session.events import ignore_event
from fitune.recipe.recipe import canonical_keys, parse_recipe

model, data, output = words
words = {"model": model, "data": [data], "output_dir": output, "tuning": "lora", "gpu": "cpu", "gpus": 2, "zero": 2}
recipe = parse_recipe(canonical_keys(words, where="test"))
attempt = program.first_attempt(recipe, overwrite=False, emit=ignore_event)
assert attempt.plan.hardware.num_gpus == 2
print(sorted({"transformers", "peft", "datasets", "accelerate"} & set(sys.modules)))
"""


def test_a_recipe_is_read_before_torch_and_ranks_are_started_without_transformers_and_peft(
    model_folder, data_file, tmp_path
):
    """The first by a rank of another launcher, too: a wrong key is said at once."""
    words = [str(model_folder), str(data_file), str(tmp_path / "run")]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines() == ["2 False", "2 False", "[]"], ran.stderr
    assert ran.stderr.count("unknown key 'modle'") == 2
