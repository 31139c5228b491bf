"""docs/json.md names the keys that commands print."""

import json
import re
import shlex
from pathlib import Path

import pytest

from report.conftest import write_run

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
ROWS = dict(re.findall(r"^\| `fitune ([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE))
PLAN = "plan --model gpt2 --gpu rtx-4090 --tuning lora"
COMMANDS = {
    "plan": PLAN, "plan --largest": f"{PLAN} --largest seq_len", "doctor": "doctor",
    "matrix": "matrix --models gpt2 --context 512 --gpu rtx-4090",
    "data": "data --model MODEL --data DATA --seq-len 64",
    "report": "report RUN",
}  # fmt: skip


def keys_of(text):
    return set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_keys_that_its_row_has(call, model_folder, data_file, tmp_path, name):
    places = {"MODEL": model_folder, "DATA": data_file, "RUN": tmp_path / "run"}
    if name == "report":
        write_run(places["RUN"])
    ended = call(*(places.get(word, word) for word in shlex.split(COMMANDS[name])), "--json")
    assert set(json.loads(ended.out)) == keys_of(ROWS[name])


def test_where_nothing_fits_the_numbers_are_those_of_the_page(call):
    ended = call("plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--zero", "0", "--tuning", "full",
                 "--offload-optimizer", "device", "--offload-parameters", "device", "--json")  # fmt: skip
    error = json.loads(ended.out)["error"]
    said = PAGE[PAGE.index("**An error**") :]
    assert set(error) <= keys_of(said) | set(re.findall(r'"(\w+)"', said))
    assert error["needed_bytes"] > error["usable_bytes"]
    assert set(error["changes"][0]) == {"change", "peak_bytes", "tokens_per_second"}


def test_every_row_is_tried():
    assert ROWS.keys() == COMMANDS.keys()
