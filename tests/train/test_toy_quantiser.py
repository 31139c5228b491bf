"""A quantiser is one class for its bytes, one linear and one row: a toy one plans, rehearses, trains and resumes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fitune.errors import RecipeError
from fitune.models.low_bit.quantised import QuantisedLinear, quantised_base
from fitune.recipe.recipe import parse_recipe
from fitune.session.planning import pinned
from fitune.train.prepare import prepare
from fitune.values import serial
from fitune.values.plan import Plan
from fitune.values.quantisers import QUANTISERS, Quantiser
from fitune.values.serial import from_json, to_json
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench
from runs import (
    stopped_and_resumed,
)

BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Absmax(Quantiser):
    """One byte a weight, an fp32 scale per 32 of them."""

    widths: ClassVar = (8,)
    settings: ClassVar = frozenset()
    library: ClassVar = "torch"
    linear: ClassVar = f"{__name__}:AbsmaxLinear"

    @classmethod
    def asked_for(cls, *, bits, group_size, double):
        return cls()

    def __str__(self):
        return "absmax"

    def packed_bytes(self, weights):
        return weights

    def scale_bytes(self, weights, *, element_bytes):
        return 4 * weights // BLOCK


class AbsmaxLinear(QuantisedLinear):
    def pack(self, weight_OI):
        blocks = weight_OI.float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        self.hold((blocks / scales).round().to(torch.int8), scales=scales)

    def dequantised(self):
        codes = self.weight.view(torch.uint8).view(torch.int8).view(-1, BLOCK)
        return (codes * self.scales).to(self.dtype).view(self.out_features, self.in_features)


@pytest.fixture(autouse=True)
def row(monkeypatch):
    monkeypatch.setitem(QUANTISERS, "absmax", Absmax)
    serial._validator.cache_clear()
    yield
    serial._validator.cache_clear()


def test_a_recipe_names_it_and_its_plan_is_trained_saved_and_resumed_bit_for_bit(make_plan, tmp_path):
    common = {"tuning": "qlora", "quantization": "absmax", "max_steps": 4, "save_steps": 2}
    straight = make_plan(**common, output_dir=str(tmp_path / "straight"))
    broken = make_plan(**common, output_dir=str(tmp_path / "broken"))
    assert straight.tuning.base == Absmax()
    assert from_json(Plan, to_json(straight)) == straight
    recipe = parse_recipe({"model": "gpt2"})
    assert pinned(recipe, straight).quantization == "absmax"
    assert quantised_base(prepare(straight).model.whole) == Absmax()
    one = stopped_and_resumed(straight, broken)
    assert "on a base in absmax" in (Path(one.exported) / "README.md").read_text()


def test_its_bytes_are_estimated_and_rehearsed_as_they_are_measured():
    plan = bench.plan_of(bench.small_model(), tuning="lora", precision="fp32", recompute=3, chunked=True)
    plan = replace(plan, tuning=replace(plan.tuning, base=Absmax()))
    measured = test_memory_prediction.measured_peaks(plan)
    test_memory_prediction.check(plan, measured)
    test_rehearsal_real_step.check(plan, measured)


def test_it_is_refused_by_its_widths_and_the_plans_without_it(make_plan):
    with pytest.raises(RecipeError, match="absmax has 8 bits, not quantization_bits = 4"):
        make_plan(tuning="qlora", quantization="absmax", quantization_bits=4)
    with pytest.raises(RecipeError, match="must be 'nf4', 'hqq', 'absmax' or 'none'"):
        make_plan(tuning="qlora", quantization="minmax")
