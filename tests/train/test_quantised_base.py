"""Packed bases: what is checked of their bytes, and where their dense weights go for a merge (test_methods.py trains on
them)."""

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

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")


def on(base, plan):
    return replace(plan, tuning=replace(plan.tuning, base=base))


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
