"""``fitune doctor --prove`` on a GPU: with its numbers computed all checks pass but Triton's kernels, which nothing
computes here; without them it still goes through to the end."""

import pytest

pytestmark = pytest.mark.null_gpu

SCRIPT = """
import json
from fitune.session.proving.prove import parts_of, prove, this_device
from fitune.values.serial import to_data
parts = parts_of(*this_device())
left_out = [name for name in parts if name == "copies" or name.startswith("liger")]
print(json.dumps(to_data(prove(tell=print, parts={k: v for k, v in parts.items() if k not in left_out}))))
"""
SMALL = "NVIDIA H100 80GB HBM3|90|2"
"""So small that the ten plans are those of a model whose step the processor computes at once."""


@pytest.mark.slow  # three minutes; tests/session/test_prove.py walks through the same steps on a CPU
def test_kernels_losses_and_peaks_are_right_on_the_card(on_null_gpu, tmp_path):
    cache = {"FITUNE_CACHE": tmp_path / "cache", "OMP_NUM_THREADS": 1}
    proof = on_null_gpu(SCRIPT, cards=[SMALL], compute="all", environment=cache).value
    assert [check for check in proof["checks"] if check["passed"] is False] == []
    not_run = {check["name"] for check in proof["checks"] if check["passed"] is None}
    assert not_run == {"attention flash fp32"}
    assert len(proof["rows"]) == 10
    assert all(abs(row["measured"] / row["predicted"] - 1) < 0.03 for row in proof["rows"])
    assert all(row["reserved"] > 0 for row in proof["rows"])
    assert proof["capability"] == [9, 0]
    assert len(list((tmp_path / "cache/proofs").glob("proof-h100-*.json"))) == 1
