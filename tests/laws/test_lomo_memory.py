"""LOMO and AdaLomo: predicted, rehearsed and measured on the CPU."""

from dataclasses import replace

import pytest

from fitune.spec.plan import ClipByNorm, ClipByValue, Lomo, Sgd
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench
from laws.test_rehearsal_estimate import check
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import FAMILIES, tiny

BY_VALUE, BY_NORM = ClipByValue(value=1.0), ClipByNorm(max_norm=1.0)
METHODS = [
    Lomo(adaptive=adaptive, clip=BY_VALUE) for adaptive in (False, True) for clip in (BY_VALUE, BY_NORM)
]
NAMES = ["lomo", "lomo by norm", "adalomo", "adalomo by norm"]


def real_plan(model, method, *, precision, recompute, chunked):
    plan = bench.plan_of(model, tuning="full", precision=precision, recompute=recompute, chunked=chunked)
    return replace(plan, tuning=method, optimizer=Sgd())


@pytest.mark.thinned(5)
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize(
    ("precision", "recompute", "chunked"), [("fp32", 0, True), ("bf16", 3, False), ("fp16", bench.LAYERS, True)]
)  # fmt: skip
def test_the_estimate_is_the_real_step(model, method, precision, recompute, chunked):
    """Within 1 % of the peak and 2 % of the phases."""
    test_memory_prediction.check(
        real_plan(model, method, precision=precision, recompute=recompute, chunked=chunked)
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_the_rehearsal_is_the_real_step(model, method):
    """Within 1 % of the peak and of every phase."""
    test_rehearsal_real_step.check(real_plan(model, method, precision="bf16", recompute=2, chunked=True))


@pytest.mark.thinned(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "precision", "recompute", "hardware"),
    [
        (METHODS[0], "bf16", 0, gpu("h100")),
        pytest.param(METHODS[1], "fp32", 2, CPU, marks=pytest.mark.slow),
        pytest.param(METHODS[2], "bf16", 4, CPU, marks=pytest.mark.slow),
        pytest.param(METHODS[3], "fp16", 2, gpu("v100-32gb"), marks=pytest.mark.slow),
    ],
)
def test_estimate_and_rehearsal_agree(family, method, precision, recompute, hardware):
    config, spec = tiny(family)
    plan = plan_for(
        spec, precision=precision, recompute=recompute, hardware=hardware, seq_len=128, rows=2, chunk=64
    )
    check(replace(plan, tuning=method, optimizer=Sgd()), config)


def test_the_two_gradients_of_a_tied_table_are_one_when_it_is_stepped():
    """A table that outweighs all else: a second gradient of it beside its step was a fifth of the peak."""
    config, spec = tiny("gemma2", head_dim=16, vocab_size=20_000, tie_word_embeddings=True)
    plan = plan_for(spec, hardware=CPU, seq_len=64, rows=1, precision="bf16", tuning="full", recompute=1)
    check(replace(plan, tuning=Lomo(adaptive=True, clip=BY_VALUE), optimizer=Sgd()), config, tolerance=0.005)
