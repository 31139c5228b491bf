"""An option that would do nothing beside others, or without them, is refused by one table; none is swallowed."""

import json

import pytest
from typer import Context
from typer.main import get_command

from fitune.cli.app import app
from fitune.cli.keys import BESIDE, WITHOUT, CheckedCommand

SCORE = "score --model m --data d"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --fleet f.yaml --why zero:3", "--why has no effect with --fleet"),
        ("plan --details --why zero:3", "--details has no effect with --why"),
        ("launch --print --job j.yaml", "--job has no effect without --on"),
        (f"{SCORE} --plan --against o", "--against has no effect with --plan"),
        (f"{SCORE} --shots 5", "--shots has no effect without --lm-eval"),
        (f"{SCORE} --plan --fleet f.yaml --gpu h100", "--gpu has no effect with --fleet"),
        ("train --ray-address h:1", "--ray-address has no effect without --on"),
        ("train --on ray --node-rank 0", "--node-rank has no effect with --on"),
    ],
)
def test_an_option_without_effect_is_refused(call, words, said):
    call(*words.split()).ends(2, said)


def test_the_table_names_commands_and_options_that_are_there():
    commands = get_command(app).commands
    for table in (BESIDE, WITHOUT):
        for name, rows in table.items():
            assert isinstance(commands[name], CheckedCommand)
            named = {*rows, *(other for others in rows.values() for other in others)}
            assert named <= {param.name for param in commands[name].get_params(Context(commands[name]))}


TWO_CARDS = "--model llama-3.2-1b --gpu h100 --gpus 2 --tuning lora --objective least-memory"


def test_train_and_launch_keep_the_objective_that_plan_was_given(call):
    words = TWO_CARDS.split()
    assert "objective=least-memory" in call("plan", *words).ends(0).partition("Train it")[2]
    stage = json.loads(call("plan", *words, "--json").ends(0))["plan"]["sharding"]["stage"]
    call("launch", *words, "--on", "slurm").ends(0, f"zero: {stage}", "objective: least-memory")
    call("launch", *words, "--print").ends(0, "--set objective=least-memory")
