"""Row 30 of the fault table: a node that is lost while its workers train."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fitune.errors import RecipeError
from fitune.launch.ray_cluster import RayPlace, cluster_now
from fitune.recipe.fleet import Cluster
from fitune.session.clusters import on_ray
from fitune.session.clusters.live_fleet import free_by_ray
from fitune.session.clusters.on_ray import train_on_ray
from fitune.values.rank_status import read_statuses
from fitune.values.run_directory import LOGS
from ray_runs import (
    Faulty,
    Heard,
    by_one_process,
    count_room,
    is_committed,
    losses,
    node_args,
    report_of,
    wait_for,
    wait_until_idle,
)

pytestmark = pytest.mark.ray


@pytest.fixture
def second_node(started_cluster):
    """A node with room for one worker more."""
    node = started_cluster.add_node(**node_args(num_cpus=1))
    started_cluster.wait_for_nodes()
    wait_until_idle()  # the node is listed before its cores are, and a run takes the workers that have room
    count_room()
    yield node
    if node in started_cluster.list_all_nodes():
        started_cluster.remove_node(node, allow_graceful=False)


def test_a_global_batch_that_some_number_of_workers_does_not_divide_is_refused(cluster, second_node, recipe):
    wanted = recipe(micro_batch_size=1, global_batch_size=9)
    with pytest.raises(
        RecipeError, match=r"with 2 workers in place of 3, at the same global batch of 9 rows"
    ):
        train_on_ray(wanted, RayPlace(fewest=2, most=4), overwrite=False, emit=Heard())


def test_a_node_that_will_be_taken_away_is_left_after_a_save(
    cluster,
    second_node,
    recipe,
    monkeypatch,
    tmp_path,
):
    """Ray gives notice, as a pod does before it is stopped; the run goes on without the node, which then goes."""
    longer = {"global_batch_size": 12, "max_steps": 20, "save_steps": 50}
    one = by_one_process(recipe("one", **longer))
    some, folder, begun = recipe("some", zero=0, **longer), tmp_path / "some", tmp_path / "begun"
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("notice", call=7, marker=str(begun)))
    notice = [
        "drain-node", "--address", cluster.address, "--node-id", second_node.node_id, "--reason-message", "a test",
        "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "100",
    ]  # fmt: skip
    program = str(Path(sys.executable).parent / "ray")

    def give_notice():
        wait_for(begun.exists, what="waited for the run")
        subprocess.run([program, *notice], check=True, capture_output=True)

    noticing, heard = threading.Thread(target=give_notice), Heard()
    noticing.start()
    assert train_on_ray(some, RayPlace(fewest=2, most=3), overwrite=False, emit=heard) == 0
    noticing.join()
    assert "a node will be taken away: saved, going on without it" in heard.text
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    assert len(report_of(folder).ranks) == 2
    [change] = report_of(folder).restarts
    assert (change.cause, change.workers_before, change.workers) == ("a node was to be taken away", 3, 2)


def test_a_removed_node_leaves_fewer_workers_and_one_that_joins_is_taken_after_a_save_with_equal_losses(
    cluster,
    second_node,
    recipe,
    monkeypatch,
    tmp_path,
):
    """The node is lost in step 4, and two workers do steps 3 and 4 again; another node joins behind step 4, and nothing
    is done twice when the run goes on with three."""
    one = by_one_process(recipe("one", global_batch_size=12))
    some, folder = recipe("some", zero=0, global_batch_size=12), tmp_path / "some"
    held, workers = tmp_path / "held", list[int]()
    monkeypatch.setattr(
        on_ray, "train_as_rank", Faulty("hold", call=7, marker=str(held), stop_at=7)
    )  # in step 5
    monkeypatch.setattr(on_ray, "LASTS_SECONDS", 1.0)
    nodes = []

    def remove():
        wait_for(lambda: held.exists() and is_committed(folder, 2), what="waited for the checkpoint")
        workers.extend(sorted(read_statuses(folder / LOGS)))
        cluster.remove_node(second_node, allow_graceful=False)
        wait_for(lambda: len(cluster_now().nodes) == 1, what="Ray listed the node that is gone")
        count_room()

    def join():
        nodes.append(
            cluster.add_node(**node_args(num_cpus=1))
        )  # Ray's handlers of signals ask for the main thread
        cluster.wait_for_nodes()
        count_room()

    removing, heard = threading.Thread(target=remove), Heard(at_step={4: join})
    removing.start()
    try:
        assert train_on_ray(some, RayPlace(fewest=2, most=4), overwrite=False, emit=heard) == 0
    finally:
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
    removing.join()
    assert workers == [0, 1, 2]
    assert "room for 3 workers: saved, going on with them" in heard.text
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    report = report_of(folder)
    lost, grown = report.restarts
    assert (lost.workers_before, lost.workers, lost.after_step) == (3, 2, 2)
    assert (grown.workers_before, grown.workers, grown.after_step, grown.lost_steps) == (2, 3, 5, 0)
    assert len(report.ranks) == 3
    assert "there was room for more workers; 3 workers instead of 2" in (folder / "report.html").read_text()


def test_free_nodes_are_nodes_of_the_kind_with_all_their_gpus(cluster):
    """Two nodes with one GPU are no node of two, and a T4 is no H100."""
    kinds = [(1, "H100"), (1, "H100"), (2, "H100"), (2, "T4")]
    nodes = [
        cluster.add_node(**node_args(num_cpus=0, num_gpus=gpus, resources={f"accelerator_type:{kind}": 1}))
        for gpus, kind in kinds
    ]
    cluster.wait_for_nodes()
    try:
        counts = [free_by_ray(Cluster(name="c", gpu=gpu, gpus=2, nodes=4)) for gpu in ("h100", "t4", "l40s")]
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert counts == [1, 1, 0]
