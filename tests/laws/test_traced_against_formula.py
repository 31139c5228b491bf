"""Where a family has formulas, its traced blocks take the same bytes: to 0.5 % of the peak."""

import runpy
from pathlib import Path

import pytest

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "traced_vs_formula.py"))


WEEKLY = ("llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-2-2b", "phi-3-mini")
"""Others have all that these have: norms of heads, windows, experts, biases, learned places."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "weekly" if name in WEEKLY else "slow"))
        for name in BENCH["MODELS"]
    ],
)
def test_trace_and_formula_agree(name, tmp_path, traces):
    for row in BENCH["compared"](name, tmp_path / "model"):
        assert abs(row["error"]) < BENCH["TOLERANCES"].get(name, 0.005), row
