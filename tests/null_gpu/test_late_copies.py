"""Offload on a card whose copies are as late as streams allow: nothing is used, freed or changed too early."""

from typing import Any

import pytest

from null_gpu.conftest import HERE

pytestmark = pytest.mark.null_gpu

LOSS, BF16_LOSS = 1e-5, 3e-3
"""Relative."""
NOT_SHOWN = {
    "copies begin before what they copy is computed": "kernels run when they are launched: for torch's sanitizer",
    "gradients are freed before they left": "the host's own thread waits for the copy at once, which makes it",
    "room of weights that were fetched in vain is free at once": "the late copy hits memory that nobody reads here",
}


def is_right(found: dict[str, Any], tolerance: float) -> bool:
    if "complaint" in found or found["overwritten"]:
        return False
    return found["cuda"] == pytest.approx(found["cpu"], rel=tolerance)


def steps(on_null_gpu: Any, *words: str) -> dict[str, dict[str, Any]]:
    late = {"NULLCUDA_LATE_COPIES": 1}
    return on_null_gpu(["python", HERE / "offload_steps.py", *words], compute="all", environment=late).value


def test_offload_has_the_losses_of_the_cpu(on_null_gpu: Any) -> None:
    for name, found in steps(on_null_gpu).items():
        assert is_right(found, BF16_LOSS if "bf16" in name else LOSS), (name, found)


def test_a_wait_left_out_or_memory_freed_early_is_seen(on_null_gpu: Any) -> None:
    unseen = {name for name, found in steps(on_null_gpu, "--mutants").items() if is_right(found, LOSS)}
    assert unseen <= set(NOT_SHOWN)
