"""LOMO and AdaLomo by the ordinary loop: they learn, resume bit-equal and are exported whole."""

from dataclasses import replace
from pathlib import Path

import pytest

from fitune.values.plan import ClipByNorm, ClipByValue, Lomo, Sgd
from runs import (
    stopped_and_resumed,
    trained,
)

METHODS = {
    "lomo": (Lomo(adaptive=False, clip=ClipByNorm(max_norm=1.0)), 0.3),
    "adalomo": (Lomo(adaptive=True, clip=ClipByValue(value=1.0)), 0.1),
}


def lomo_plan(make_plan, method, **settings):
    tuning, rate = METHODS[method]
    plan = make_plan(
        tuning="full", optimizer="sgd", gradient_accumulation_steps=1, learning_rate=rate, **settings
    )
    return replace(plan, tuning=tuning, optimizer=Sgd(weight_decay=0.01))


@pytest.mark.parametrize(("method", "precision"), [("lomo", "bf16"), ("adalomo", "fp32")])
def test_it_learns(make_plan, method, precision):
    plan = lomo_plan(make_plan, method, max_steps=25, precision=precision)
    report = trained(plan)
    assert report.status == "complete"
    assert report.final_loss < 0.7 * report.first_loss
    assert (Path(report.exported) / "model.safetensors").is_file()


@pytest.mark.parametrize("method", [pytest.param("lomo", marks=pytest.mark.slow), "adalomo"])
def test_interrupted_and_resumed_it_ends_bit_for_bit_the_same(make_plan, tmp_path, method):
    folders = (str(tmp_path / name) for name in ("straight", "broken"))
    stopped_and_resumed(
        *(lomo_plan(make_plan, method, max_steps=6, save_steps=2, output_dir=name) for name in folders)
    )
