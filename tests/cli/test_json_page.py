"""Every command has --json, and docs/json.md names the keys that it prints."""

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
import yaml

from fitune.cli.app import app
from fitune.session import doctor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "json.md").read_text()
ROWS = dict(re.findall(r"^\| `fitune ([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE))
WITHOUT = {"ui"}
PLAN = "--model gpt2 --gpu rtx-4090 --tuning lora"
TRAIN = "--model MODEL --data DATA --output-dir OUT --gpu cpu --precision fp32 --seq-len 64 --max-steps 1 --samples 0"
COMMANDS = {
    "plan": f"plan {PLAN}",
    "plan --largest": f"plan {PLAN} --largest seq_len",
    "plan --fleet": f"plan {PLAN} --fleet FLEET --rows 9",
    "why": f"why 'tuning: qlora' {PLAN}",
    "rehearse": "rehearse --model MODEL --gpu cpu --tuning lora --seq-len 64",
    "matrix": "matrix --models gpt2 --context 512 --gpu rtx-4090",
    "doctor": "doctor",
    "init": f"init NEW {PLAN} --data DATA",
    "convert": "convert THEIRS",
    "data": "data --model MODEL --data DATA --seq-len 64",
    "launch --print": f"launch --print {PLAN}",
    "launch --print-deepspeed-config": f"launch --print-deepspeed-config {PLAN} --gpus 2 --zero 3 --backend deepspeed",
    "launch --on": f"launch --on slurm {PLAN} --max-steps 9",
    "train": f"train {TRAIN} --tuning lora",
    "compare": f"compare {TRAIN} --val-fraction 0.2 --tunings lora,full",
    "export": "export RUN --as merged --out OUT",
    "report": "report RUN",
    "score": "score --model RUN --data DATA#2 --out OUT --max-new-tokens 2",
    "score --plan": "score --model Qwen/Qwen3-8B --data DATA --gpu h100 --plan",
    "chat": "chat RUN --max-new-tokens 2",
    "serve": "serve RUN --print --server vllm",
    "records check": "records check RECORDS",
    "demo": "demo --out OUT",
}
FLEET = "clusters:\n- {name: here, kind: slurm, gpu: rtx-4090, gpus: 1, nodes: 1}\n"
RECORDS = ROOT / "tests" / "records" / "runs.jsonl"


def commands_of(group):
    """Names of all commands that typer knows, but hidden ones."""
    for name, command in group.commands.items():
        if not command.hidden:
            yield from (
                (f"{name} {each}" for each in commands_of(command))
                if hasattr(command, "commands")
                else [name]
            )


def keys_of(text):
    """Keys that a row names, and those of the command whose keys it has, too."""
    same = (keys_of(ROWS[name]) for name in re.findall(r"`fitune (\w+)`", text))
    return set(re.findall(r"`(\w+)`", text)).union(*same)


def test_every_command_has_the_option_and_a_row_that_is_tried():
    names = set(commands_of(typer.main.get_command(app)))
    assert {
        name for name in names if any(row == name or row.startswith(f"{name} -") for row in ROWS)
    } == names - WITHOUT
    assert ROWS.keys() == COMMANDS.keys()
    assert all(f"`fitune {name}`" in PAGE for name in WITHOUT)


@pytest.fixture
def places(shop, quick_demo, model_folder, data_file, tmp_path, monkeypatch):
    """Words of ``COMMANDS`` that stand for files."""
    monkeypatch.setattr(
        doctor, "largest_here", lambda hardware: {}
    )  # takes seconds: tests/cli/test_doctor.py
    (tmp_path / "fleet.yaml").write_text(FLEET)
    theirs = {"base_model": "gpt2", "adapter": "lora", "datasets": [{"path": "a.jsonl", "type": "alpaca"}]}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({**theirs, "wandb_project": None, "strict": False}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 3?\n"))
    return {
        "MODEL": model_folder, "DATA": data_file, "DATA#2": f"{data_file}#2", "RUN": shop, "OUT": tmp_path / "out",
        "NEW": tmp_path / "new.yaml", "THEIRS": tmp_path / "theirs.yaml", "FLEET": tmp_path / "fleet.yaml",
        "RECORDS": RECORDS,
    }  # fmt: skip


def asked(call, places, command):
    """The object that a command prints."""
    return json.loads(call(*(places.get(word, word) for word in shlex.split(command)), "--json").ends(0))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_one_object_with_the_keys_that_its_row_has(call, places, name):
    found = asked(call, places, COMMANDS[name])
    assert set(found) == keys_of(ROWS[name])
    if name == "train":
        assert asked(call, places, COMMANDS[name]) == found, "a complete run says the same again"
        assert (found["dtype"], found["steps"]) == ("F32", 1)
        assert (found["exported"], found["next"][0]) == (
            f"{places['OUT']}/adapter",
            f"fitune chat {places['OUT']}",
        )
    if name == "matrix":
        assert {setting["sharding"] for setting in found["cells"][0]["settings"]} == {"one device"}
    if name == "compare":
        assert [each["name"] for each in found["methods"]] == ["lora", "full"]
        best = {mark for each in found["methods"] for mark in each["best"]}
        assert {"lowest held-out loss", "least memory"} <= best


def test_where_nothing_fits_the_numbers_are_those_of_the_page(call):
    ended = call("plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--zero", "0", "--tuning", "full",
                 "--offload-optimizer", "device", "--offload-parameters", "device", "--json")  # fmt: skip
    error = json.loads(ended.out)["error"]
    assert (ended.code, error["kind"]) == (2, "NothingFits")
    said = PAGE[PAGE.index("**An error**") :]
    assert set(error) <= keys_of(said) | set(re.findall(r'"(\w+)"', said))
    assert error["needed_bytes"] > error["usable_bytes"]
    assert set(error["changes"][0]) == {"change", "settings", "peak_bytes", "tokens_per_second"}


def test_of_several_ranks_the_first_alone_prints(call, model_folder, monkeypatch):
    """Each of them is refused alike; what others print goes to standard error, whose number is 2."""
    moved = []
    monkeypatch.setattr(os, "dup2", lambda *numbers: moved.append(numbers))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, streams in (("0", []), ("1", [(2, 1)])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, out, err = call("train", f"--model={model_folder}", "--nonsense=3", "--json")
        assert (code, json.loads(out)["error"]["kind"], err, moved) == (2, "RecipeError", "", streams)
