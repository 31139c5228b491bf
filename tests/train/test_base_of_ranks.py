"""The frozen base is hashed once on each machine, whatever number of processes trains there."""

from fitune.engine.ranks import Ranks
from fitune.train import start
from fitune.train.start import base_identity


def test_one_rank_of_a_machine_reads_the_base(make_plan, monkeypatch):
    """By ``once_a_node``, of which tests/data/test_cache_keys.py says what it does."""
    monkeypatch.setattr(start, "weights_identity", lambda path: f"the hash of {path}")
    monkeypatch.setattr(Ranks, "once_a_node", lambda self, make: f"told: {make()}")
    plan = make_plan(tuning="lora")
    assert base_identity(plan, Ranks(rank=1, world=2, local=1)) == f"told: the hash of {plan.model_path}"
    assert base_identity(make_plan(tuning="full"), Ranks(rank=0, world=2)) == ""
