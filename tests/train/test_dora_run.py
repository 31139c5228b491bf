"""DoRA through PEFT by the ordinary loop, on dense and packed bases; 8-bit AdamW beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fitune.values.plan import AdamW8bit, Dense, Nf4
from runs import (
    assert_merged,
    stopped_and_resumed,
    trained,
)

pytest.importorskip("bitsandbytes")


DENSE = Dense()


def dora(plan, base=DENSE):
    return replace(plan, tuning=replace(plan.tuning, base=base, dora=True))


@pytest.mark.parametrize(
    ("base", "precision"),
    [pytest.param(Dense(), "bf16-master", marks=pytest.mark.slow), (Nf4(), "fp32")],
    ids=str,
)
def test_dora_learns_and_moves_its_magnitudes(make_plan, base, precision):
    plan = dora(make_plan(max_steps=25, precision=precision), base)
    report = trained(plan)
    assert report.final_loss < 0.95 * report.first_loss
    adapter = load_file(Path(report.exported) / "adapter_model.safetensors")
    assert sum("magnitude" in name for name in adapter) == 2 * 7


def test_merged_dora_is_what_peft_makes_of_it(make_plan):
    assert_merged(dora(make_plan(max_steps=6, learning_rate=5e-2)))


@pytest.mark.parametrize("tuning", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_8_bit_adamw_learns_and_resumes_bit_for_bit(make_plan, tmp_path, tuning):
    plans = [
        replace(
            make_plan(tuning=tuning, max_steps=8, save_steps=2, output_dir=str(tmp_path / name)),
            optimizer=AdamW8bit(),
        )
        for name in ("straight", "broken")
    ]
    report = stopped_and_resumed(*plans, stop_after=5)
    assert report.final_loss < report.first_loss
