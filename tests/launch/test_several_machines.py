"""A plan for several machines is started on each of them, and said so before anything starts here."""

from dataclasses import replace

import pytest

from fitune.errors import HardwareError
from fitune.launch.nodes import OneNode
from fitune.launch.place import Place
from fitune.session import program
from fitune.session.program import require_one_machine
from fitune.units import GIB
from fitune.values.serial import to_json
from plans import gpu, plan_for, recipe_of, small_llama

TWO_NODES = plan_for(small_llama(), hardware=gpu("h100", gpus=4, nodes=2))


def test_the_refusal_says_what_to_start_on_each_machine():
    with pytest.raises(HardwareError, match="2 machines") as caught:
        require_one_machine(TWO_NODES)
    assert "--node-rank 0 (then 1, …) --rendezvous HOST:PORT" in caught.value.hint
    assert "--nnodes 2 --nproc-per-node 4" in caught.value.hint


class _Second(OneNode):
    """Node 1, which is told the plan by node 0."""

    place = Place(node=1, nodes=2, host="a", port=1)

    def from_first(self, make):
        return to_json(TWO_NODES)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"gpus_per_node": 2}, "this node has 2 × h100, and the plan is for 4 × h100 in each"),
        ({"gpu": replace(TWO_NODES.hardware.gpu, memory_bytes=GIB // 2)},
         "does not fit on this node: .* of .* a device"),
    ],
)  # fmt: skip
def test_a_node_that_is_smaller_than_the_first_says_so_before_its_ranks_start(monkeypatch, here, said):
    monkeypatch.setattr(program, "wanted_hardware", lambda recipe: replace(TWO_NODES.hardware, **here))
    with pytest.raises(HardwareError, match=said):
        program.train_by_ranks(None, recipe_of("m"), _Second(), emit=lambda event: None)
