"""Exports are in the type that their base has on disk, and name the base so that it is found from anywhere."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fitune.models.weight_files import base_reference
from fitune.train.export import model_card
from runs import (
    trained,
)

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    """The same base on disk in each type."""
    made = {}
    for name, dtype in TYPES.items():
        made[name] = tmp_path_factory.mktemp("bases") / name
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).save_pretrained(made[name])
        for file in model_folder.glob("tokenizer*"):
            (made[name] / file.name).write_bytes(file.read_bytes())
    return made


@pytest.mark.parametrize(
    ("stored", "precision", "tuning", "kind"),
    [
        ("bf16", "fp32", "lora", "merged"),
        ("fp16", "fp32", "full", "full"),
        ("fp32", "bf16-master", "full", "full"),
    ],
)
def test_an_export_has_the_type_of_its_base(make_plan, folders, stored, precision, tuning, kind):
    said = []
    plan = make_plan(model=str(folders[stored]), precision=precision, tuning=tuning, export=kind, max_steps=2)
    report = trained(plan, on_note=said.append)
    weights = load_file(Path(report.exported) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {TYPES[stored]}
    config = json.loads((Path(report.exported) / "config.json").read_text())
    assert config["dtype"] == str(TYPES[stored]).removeprefix("torch.")
    assert any(f"exported in {stored}, as the base is" in line for line in said) is (stored != precision)
    base = load_file(folders[stored] / "model.safetensors")
    assert any(not torch.equal(base[name], weights[name]) for name in base)


def test_an_adapter_keeps_the_type_it_was_trained_in_and_names_its_base_absolutely(
    make_plan, folders, monkeypatch
):
    monkeypatch.chdir(folders["bf16"].parent)
    plan = make_plan(model="bf16", precision="fp32", max_steps=2)
    report = trained(plan)
    adapter = Path(report.exported)
    weights = load_file(adapter / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folders["bf16"])
    assert (
        "base_model" not in (adapter / "README.md").read_text()
    )  # the Hub refuses a card that names a folder
    of_the_hub = replace(plan, model_path="meta-llama/Llama-3.1-8B")
    assert base_reference(of_the_hub.model_path) == of_the_hub.model_path
    assert "base_model: meta-llama/Llama-3.1-8B\n" in model_card(of_the_hub, report, kind="adapter")
