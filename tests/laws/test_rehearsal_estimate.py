"""The arithmetic against the rehearsal: at most 2 % of the peak apart.

bench/estimate_vs_rehearsal.py does the same for real shapes.
"""

from dataclasses import replace

import pytest

from estimate.tiny_plans import CPU, gpu, plan_for
from fitune.estimate.memory import predict_memory
from fitune.rehearse.peaks import peaks_by_kind
from fitune.rehearse.run import trace_plan
from fitune.spec.plan import Nf4
from rehearse.tiny_configs import FAMILIES, tiny

TOLERANCE = 0.02
MISSES = {"phi3": 0.035, "qwen3_moe": 0.035}
"""LoRA, every block recomputed, gradients accumulated: 3.1 % too low at these tiny widths. A temporary of the
recomputed block's backward is not in the arithmetic yet; it shrinks with the width."""
CHOICES = [
    {"tuning": "full", "precision": "fp32", "recompute": 2, "chunk": 64},
    {"tuning": "full", "precision": "bf16-master", "recompute": 0},
    {"tuning": "full", "precision": "bf16", "recompute": 4, "accumulation": 2},
    {"tuning": "lora", "precision": "bf16", "recompute": 0, "chunk": 64},
    {"tuning": "lora", "precision": "bf16-master", "recompute": 4, "accumulation": 2},
]


def rehearsed_peak(plan, config) -> int:
    """The CPU's tensors are not rounded to blocks; a model this small would be blocks more than bytes."""
    trace, _ = trace_plan(plan, config, exact=True)
    return max(sum(kinds.values()) for kinds in peaks_by_kind(trace, on_cuda=False).values())


QUANTISED = [
    {"base": Nf4(), "precision": "bf16", "recompute": 0, "chunk": 64},
    {"base": Nf4(double_quant=False), "precision": "bf16-master", "recompute": 4, "accumulation": 2},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("hardware", [CPU, gpu("h100")], ids=["cpu", "h100"])
def test_estimate_and_rehearsal_agree(family, choice, hardware):
    config, spec = tiny(family)
    plan = plan_for(spec, hardware=hardware, seq_len=128, rows=2, **choice)
    is_missed = choice is CHOICES[-1]
    tolerance = MISSES.get(family, TOLERANCE) if is_missed else TOLERANCE
    expected = rehearsed_peak(plan, config)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", QUANTISED, ids=lambda c: "-".join(map(str, c.values())))
def test_on_a_quantised_base(family, choice):
    pytest.importorskip("bitsandbytes")
    config, spec = tiny(family)
    tolerance = MISSES.get(family, TOLERANCE) if choice is QUANTISED[-1] else TOLERANCE
    choice = dict(choice)
    base = choice.pop("base")
    plan = plan_for(spec, hardware=gpu("h100"), tuning="lora", seq_len=128, rows=2, **choice)
    plan = replace(plan, tuning=replace(plan.tuning, base=base))
    expected = rehearsed_peak(plan, config)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(expected, rel=tolerance)
