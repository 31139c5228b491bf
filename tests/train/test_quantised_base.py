"""Adapters on a packed base: trained by the ordinary loop, resumed bit-equal, exported, and merged into 16 bit only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitune.checkpoint import export
from fitune.errors import ModelError
from fitune.models.low_bit.quantised import PackedWeight
from fitune.models.weights import require_finite
from fitune.train.prepare import prepare
from fitune.values.plan import Hqq, Nf4
from runs import (
    assert_merged,
    stopped_and_resumed,
    trained,
)

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")

LEARN = [
    (Nf4(), "bf16-master"),
    (Hqq(bits=4), "fp32"),
    pytest.param(Hqq(bits=2), "bf16-master", marks=pytest.mark.slow),
    *(
        pytest.param(base, "fp32", marks=pytest.mark.slow)
        for base in (Nf4(double_quant=False), Hqq(bits=8), Hqq(bits=3))
    ),
]


def on(base, plan):
    return replace(plan, tuning=replace(plan.tuning, base=base))


@pytest.mark.parametrize(("base", "precision"), LEARN, ids=str)
def test_it_learns_and_exports_an_adapter(make_plan, base, precision):
    plan = on(base, make_plan(max_steps=25, precision=precision))
    report = trained(plan)
    assert report.final_loss < 0.95 * report.first_loss
    assert report.total_parameters - report.trainable_parameters == sum(
        tensor.numel() for tensor in load_file(Path(plan.model_path) / "model.safetensors").values()
    )
    assert f"in {type(base).__name__.upper()}" in (Path(report.exported) / "README.md").read_text()


@pytest.mark.parametrize("base", [Nf4(), Nf4(double_quant=False), Hqq(bits=4)], ids=str)
def test_packed_bytes_are_no_numbers(make_plan, base):
    """As bf16 some are NaN, and a healthy base was called damaged; a weight that is NaN shows in its scales."""
    whole = prepare(on(base, make_plan(precision="bf16-master"))).model.whole
    packed = next(m for m in whole.modules() if isinstance(m, PackedWeight))
    packed.weight.data.view(torch.uint8).fill_(255)
    require_finite(whole, "the base")
    damaged = torch.randn(packed.shape).bfloat16()
    damaged[3, 5] = torch.nan
    packed.pack(damaged)
    with pytest.raises(ModelError, match="NaN or infinite: .*(scale|mean)"):
        require_finite(whole, "the base")


@pytest.mark.parametrize("base", [Nf4(), pytest.param(Hqq(bits=4), marks=pytest.mark.slow)], ids=str)
def test_resumed_it_ends_bit_for_bit_the_same(make_plan, tmp_path, base):
    common = {"max_steps": 6, "save_steps": 2, "lora_dropout": 0.1}
    folders = (str(tmp_path / name) for name in ("straight", "broken"))
    stopped_and_resumed(*(on(base, make_plan(**common, output_dir=name)) for name in folders))


def test_merged_it_is_the_16_bit_base_and_the_adapter(make_plan):
    """Without any packing."""
    assert_merged(on(Nf4(), make_plan(max_steps=5, learning_rate=5e-2)))


def test_the_dense_base_of_a_merge_is_weighed_by_its_own_size(make_plan, monkeypatch):
    plan = on(Nf4(), make_plan(precision="bf16-master"))
    asked = []

    def weighed(model, *, needed_bytes=None):
        asked.append(needed_bytes)
        return torch.device("cpu")

    monkeypatch.setattr(export, "reload_device", weighed)
    model = prepare(plan).model.whole
    export.on_dense_base(model, plan.model_path)
    stored = load_file(Path(plan.model_path) / "model.safetensors").values()
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert asked == [2 * (sum(tensor.numel() for tensor in stored) + adapters)]
