"""The cards that the null GPU shows: torch and fitune see what a real one would tell."""

import pytest

pytestmark = pytest.mark.null_gpu

SEEN = """
import json, torch
p = torch.cuda.get_device_properties(0)
try:
    torch.zeros(2, device="cuda") + 1
    ran = "ran"
except RuntimeError as error:
    ran = str(error).splitlines()[0]
print(json.dumps([p.name, p.major * 10 + p.minor, ran]))
"""


def test_torch_sees_the_card(on_null_gpu):
    name, sm, ran = on_null_gpu(SEEN, cards=["4090"]).value
    assert (name, sm, ran) == ("NVIDIA GeForce RTX 4090", 89, "ran")


def test_a_card_without_kernels_in_the_wheel_fails_as_it_does_there(on_null_gpu):
    name, sm, ran = on_null_gpu(SEEN, cards=["v100"]).value
    assert (name, sm) == ("Tesla V100-SXM2-32GB", 70)
    assert "no kernel image is available" in ran
