"""Budgets of a step as the host gives it to a card: launches, synchronisations, allocations."""

import json

import pytest

from null_gpu.conftest import ROOT

pytestmark = pytest.mark.null_gpu


def counted(on_null_gpu, case):
    """Of a step of 8 B with four blocks; torch refuses to synchronise in its two micro-batches."""
    command = ["python", ROOT / "bench/null_gpu_steps.py", case, "--shape", "8b-4"]
    return json.loads(on_null_gpu(command).out.splitlines()[-1])


@pytest.mark.parametrize("case", ["lora", "qlora", "full", "lora-activations-away"])
def test_a_micro_batch_makes_nothing_wait_and_nothing_new_is_allocated(on_null_gpu, case):
    found = counted(on_null_gpu, case)
    assert found["synchronisations_in_micro_batches"] == 0
    assert found["synchronisations_of_update"] <= 1
    assert found["mallocs"] == 0


def test_the_update_of_lora_is_a_few_launches(on_null_gpu):
    """One tensor at a time it was four launches each and more: 1,803 for the 448 of 8 B."""
    found = counted(on_null_gpu, "lora")
    assert found["trained_tensors"] == 56
    assert found["launches_of_update"] <= 40


COLUMNS = """
import json, torch
from torch.nn import Parameter
from fitune.engine.fused_rules import AdaLomoRule
found = []
for shape in ((128256, 4096), (14336, 4096), (16, 1536, 2048)):
    weight = Parameter(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
    rule = AdaLomoRule({"w": weight}, weight_decay=0.0, divisions={})
    rule.begin()
    gradient = torch.empty_like(weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rule.use("w", gradient, learning_rate=1e-3, factor=1.0)
    found.append((torch.cuda.max_memory_allocated() - before) / (4 * weight.numel()))
print(json.dumps(found))
"""


def test_adalomo_takes_one_fp32_copy_of_a_gradient_and_no_more(on_null_gpu):
    """Column norms in one reduction take 252 MiB more for Llama-3's table, 12 %."""
    assert all(1.0 <= copies < 1.006 for copies in on_null_gpu(COLUMNS).value)
