"""Where a family has formulas, its traced blocks take the same bytes: to 0.5 % of the peak."""

import runpy
from pathlib import Path

import pytest

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "traced_vs_formula.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCH["MODELS"])
def test_trace_and_formula_agree(name, tmp_path, traces):
    for row in BENCH["compared"](name, tmp_path / "model"):
        assert abs(row["error"]) < BENCH["TOLERANCES"].get(name, 0.005), row
