"""An elastic run on Ray grows when room for more workers lasts, and only then."""

import pytest

from fitune.launch.ray_cluster import Node, RayCluster
from fitune.session.clusters import on_ray
from fitune.session.clusters.on_ray import Growth, workers_with_room

CORE = {"CPU": 1.0}


def cluster_of(*cores, free):
    nodes = tuple(
        Node(id=f"node-{place}", host=f"host-{place}", resources={"CPU": room})
        for place, room in enumerate(cores)
    )
    return RayCluster(nodes=nodes, free={"CPU": free})


@pytest.mark.parametrize(
    ("free", "workers"),
    [
        (0.0, 2),  # all cores are held, by this run and others
        (2.0, 4),
        (4.0, 2),  # the run's own workers have just ended
    ],
)
def test_free_cores_are_room_only_beside_workers_that_are_there(free, workers):
    assert workers_with_room(cluster_of(2, 2, free=free), CORE, 2) == workers


def test_a_node_that_will_be_taken_away_is_no_room():
    cluster = cluster_of(2, 1, free=1.0)
    assert workers_with_room(cluster, CORE, 2) == 3
    assert workers_with_room(cluster.without({"node-1"}), CORE, 2) == 2


@pytest.fixture
def moments(monkeypatch):
    """The clock: the last moment is now."""
    clock = [1_000.0]
    monkeypatch.setattr(on_ray.time, "monotonic", lambda: clock[-1])
    return clock


def seen(growth, moments, free, monkeypatch):
    """Answers of ``larger`` every 10 s, while so many of four cores are free."""
    answers = []
    for cores in free:
        moments.append(moments[-1] + 10)
        monkeypatch.setattr(on_ray, "cluster_now", lambda cores=cores: cluster_of(2, 2, free=cores))
        answers.append(growth.larger())
    return answers


def test_room_is_taken_once_it_lasted(moments, monkeypatch):
    growth = Growth(each=CORE, most=3)
    assert seen(growth, moments, [2, 2, 2, 2, 2], monkeypatch) == [0] * 5  # no group has begun
    growth.begin(2)
    assert seen(growth, moments, [2, 2, 2, 2], monkeypatch) == [0, 0, 0, 3]


def test_room_that_comes_and_goes_is_not_taken(moments, monkeypatch):
    growth = Growth(each=CORE, most=4)
    growth.begin(2)
    assert seen(growth, moments, [1, 1, 1, 0, 1, 1, 1, 1], monkeypatch) == [0] * 7 + [3]


def test_a_group_smaller_than_wanted_ends_the_growth(moments, monkeypatch):
    """Ray has no place where cores are free: to ask again would only cost a restart every half minute."""
    growth = Growth(each=CORE, most=4, wanted=3)
    growth.begin(2)
    assert seen(growth, moments, [1] * 5, monkeypatch) == [0] * 5
