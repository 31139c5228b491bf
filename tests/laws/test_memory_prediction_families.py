"""Predicted against measured for every architecture: q/k norms, tied embeddings, mixtures, parallel blocks, fused
projections, LayerNorms, capped and broadcast attention. Tolerance 3 % of the peak."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fitune.measure.memory import LiveTensors
from fitune.models.weights import compute_dtype
from fitune.train.prepare import prepare_loaded
from laws.test_memory_prediction import bench
from rehearse.tiny_configs import FAMILIES, OTHERS, tiny

TOLERANCE = 0.03
ROWS = (32, 32, 32)

GROUPED = {"num_kv_heads": 2, "new_decoder_architecture": True}
CASES = [
    *(pytest.param(family, {}, id=family) for family in (*FAMILIES, *OTHERS)),
    pytest.param("falcon", GROUPED, id="falcon, grouped"),
]


def measured_peak(config, plan, rows):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(compute_dtype(plan.precision))
    prepared = prepare_loaded(model, plan)

    def step(enter):
        prepared.engine.forward_backward(rows, divisor=rows.supervised_tokens, enter_phase=enter)
        prepared.engine.update(learning_rate=1e-4, enter_phase=enter)

    step(lambda phase: None)
    tracker = LiveTensors(prepared.resident_tensors())
    with tracker:
        step(tracker.enter)
    return max(tracker.peaks.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "different"), CASES)
@pytest.mark.parametrize(("tuning", "precision", "recompute"), [("full", "fp32", 0), ("lora", "bf16", 2)])
def test_peak_of_the_family_is_predicted(family, different, tuning, precision, recompute):
    config, model = tiny(family, **different)
    plan = bench.plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=True)
    rows = bench.random_rows(ROWS, vocab_size=model.vocab_size)
    predicted = max(bench.predicted_peaks(plan, rows).values())
    assert predicted == pytest.approx(measured_peak(config, plan, rows), rel=TOLERANCE)
