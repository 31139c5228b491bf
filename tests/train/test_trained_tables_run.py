"""Whole runs that train embedding and head beside adapters: learned, resumed bit-equal, exported, offloaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitune.session.exporting import export_run
from fitune.values.plan import Nf4, Offload
from runs import (
    stopped_and_resumed,
    trained,
)
from train.test_offload import ALL_THREE, assert_same_training, plan_of

BOTH = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}


def test_it_learns_more_than_adapters_alone_and_moves_both_tables(make_plan, tmp_path):
    plans = [
        make_plan(**extra, max_steps=25, output_dir=str(tmp_path / name))
        for name, extra in (("tables", BOTH), ("alone", {}))
    ]
    tables, alone = (trained(plan) for plan in plans)
    assert tables.final_loss < 0.8 * alone.final_loss
    assert tables.trainable_parameters - alone.trainable_parameters == 2 * 384 * 32
    adapter = load_file(Path(tables.exported) / "adapter_model.safetensors")
    base = load_file(Path(plans[0].model_path) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert not torch.equal(adapter[f"base_model.model.{name}"], base[name])
    export_run(tmp_path / "tables", None, None)
    assert (tmp_path / "tables/merged/model.safetensors").is_file()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16-master"])
def test_resumed_it_ends_bit_for_bit_the_same(make_plan, tmp_path, precision):
    common = {**BOTH, "max_steps": 6, "save_steps": 2, "precision": precision, "lora_layers": [1]}
    stopped_and_resumed(*(make_plan(**common, output_dir=str(tmp_path / name)) for name in ("one", "two")))


def test_a_packed_base_is_merged_with_its_tables(make_plan):
    pytest.importorskip("bitsandbytes")
    plan = make_plan(**BOTH, max_steps=5, export="merged", learning_rate=5e-2)
    plan = replace(plan, tuning=replace(plan.tuning, base=Nf4()))
    merged = load_file(Path(trained(plan).exported) / "model.safetensors")
    base = load_file(Path(plan.model_path) / "model.safetensors")
    assert merged.keys() == base.keys()
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert {"model.embed_tokens.weight", "lm_head.weight"} < moved


def test_with_everything_on_the_host_it_is_the_same():
    plan = plan_of(ALL_THREE, tuning="lora", precision="fp32")
    plan = replace(plan, tuning=replace(plan.tuning, modules_to_save=("embed_tokens", "lm_head")))
    assert_same_training(replace(plan, offload=Offload()), plan)
