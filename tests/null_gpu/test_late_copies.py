"""Offload on a card whose copies are as late as streams allow, and watched by torch's sanitizer: nothing is used, freed
or changed too early. README.md has a table of which of the two finds what."""

import pytest

from null_gpu.conftest import HERE

pytestmark = pytest.mark.null_gpu

LOSS = 1e-6
"""Relative; in bf16 too: attention is computed by the operation that runs on the CPU have."""
SEEN_BY_SANITIZER = {
    "weights are used before they are there",
    "activations are used before they are back",
    "new weights are used before they are there",
    "copies begin before what they copy is computed",
}
FOR_THE_SANITIZER = "copies begin before what they copy is computed"
"""Kernels run when they are launched."""


def is_right(found):
    if "complaint" in found or found["overwritten"]:
        return False
    return found["cuda"] == pytest.approx(found["cpu"], rel=LOSS)


def steps(on_null_gpu, *words):
    late = {"NULLCUDA_LATE_COPIES": int("--sanitizer" not in words)}
    return on_null_gpu(["python", HERE / "offload_steps.py", *words], compute="all", environment=late).value


def test_offload_has_the_losses_of_the_cpu(on_null_gpu):
    for name, found in steps(on_null_gpu).items():
        assert is_right(found), (name, found)


def test_a_wait_left_out_or_memory_freed_early_is_seen(on_null_gpu):
    unseen = {name for name, found in steps(on_null_gpu, "--mutants").items() if is_right(found)}
    assert unseen == {FOR_THE_SANITIZER}


def test_the_sanitizer_has_nothing_to_say_of_offload(on_null_gpu):
    complaints = {name: found.get("complaint") for name, found in steps(on_null_gpu, "--sanitizer").items()}
    assert set(complaints.values()) == {None}, complaints


@pytest.mark.parametrize(
    "names", [sorted(SEEN_BY_SANITIZER), pytest.param((), marks=pytest.mark.slow)], ids=["seen", "all"]
)
def test_the_sanitizer_sees_what_is_not_waited_for_on_the_card(on_null_gpu, names):
    found = steps(on_null_gpu, "--sanitizer", "--mutants", *(["--only", *names] if names else []))
    seen = {name for name, of in found.items() if "CUDASanitizerErrors" in str(of.get("complaint"))}
    assert seen == SEEN_BY_SANITIZER


OVERWRITTEN = """
import json, nullcuda, torch
from fitune.engine.host import HostMemory
host = HostMemory(torch.device("cuda", 0))
found = []
for waits in (True, False):
    room = host.room(4096)
    room.fill_(1)
    sent, arrival = host.give([room])
    if waits:
        arrival.block()
    room.fill_(2)
    torch.cuda.synchronize()
    found.append(nullcuda.overwritten())
print(json.dumps(found))
"""
FORGOTTEN = """
import json, torch
from fitune.engine.host import PinnedMemory
room = PinnedMemory().empty(torch.Size([1 << 20]), torch.float32)
room.copy_(torch.ones(1 << 20, device="cuda"), non_blocking=True)
del room
print(json.dumps("through"))
"""


def test_pinned_memory_changed_before_its_copy_is_reported(on_null_gpu):
    assert on_null_gpu(OVERWRITTEN, compute="all", environment={"NULLCUDA_LATE_COPIES": 1}).value == [0, 1]


def test_pinned_memory_that_nobody_holds_stays_until_copies_to_it_are_through(on_null_gpu):
    """It was unmapped before the copy was waited for, which then wrote to it."""
    assert on_null_gpu(FORGOTTEN, compute="all", environment={"NULLCUDA_LATE_COPIES": 1}).value == "through"
