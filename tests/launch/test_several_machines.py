"""A plan for several machines is started on each of them, and said so before anything starts here."""

from dataclasses import replace

import pytest

from fitune.errors import HardwareError
from fitune.launch.command import require_one_machine
from plans import gpu, plan_for, small_llama


def test_the_refusal_says_what_to_start_on_each_machine():
    plan = plan_for(small_llama(), hardware=replace(gpu("h100", gpus=4), nodes=2))
    with pytest.raises(HardwareError, match="2 machines") as caught:
        require_one_machine(plan)
    assert "--node-rank 0 (then 1, …) --rendezvous HOST:PORT" in (caught.value.hint or "")
    assert "--nnodes 2 --nproc-per-node 4" in (caught.value.hint or "")


def test_one_machine_is_started_here():
    require_one_machine(plan_for(small_llama(), hardware=gpu("h100", gpus=4)))
