"""Places on Ray that cannot be had, asked without a cluster: ray is not installed, no room, no GPU."""

import sys

import pytest

from fitune import launch
from fitune.errors import HardwareError, MissingExtra, RecipeError
from fitune.launch.ray_cluster import Node, RayCluster, RayPlace, connected, loaded_ray, ray_place, with_room
from fitune.launch.ray_workers import ray_parts


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(MissingExtra) as refused, connected("127.0.0.1:6379"):
        pass
    assert "pip install 'fitune[ray]'" in str(refused.value)


def test_a_ray_whose_internals_have_moved_is_refused_with_the_version_that_is_tested(monkeypatch):
    pytest.importorskip("ray", reason="needs ray: fitune[ray]")
    loaded_ray()
    monkeypatch.delitem(sys.modules, "fitune.launch.ray_backend", raising=False)
    monkeypatch.delattr(launch, "ray_backend", raising=False)
    monkeypatch.setitem(sys.modules, "ray.train.v2._internal.execution.callback", None)
    said = "only the Ray that fitune was tested with can: .*callback"
    with pytest.raises(HardwareError, match=said) as refused:
        ray_parts()
    assert "pip install 'ray[train,data]==2.60.0'" in str(refused.value.hint)


@pytest.mark.parametrize("address", ["nowhere", "host:99999", ":6379", "http://h:1"])
def test_what_is_no_address_is_refused_before_ray_is_asked(monkeypatch, address):
    with pytest.raises(RecipeError, match=f"--ray-address '{address}' is no address of a Ray cluster"):
        ray_place(address=address, workers="2")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RecipeError, match=f"RAY_ADDRESS '{address}'") as refused, connected(""):
        pass
    assert "HOST:PORT" in str(refused.value.hint)


@pytest.mark.parametrize("workers", ["two", "3..2", "0", "2..", "9" * 5000])
def test_what_is_no_number_of_workers_is_refused(workers):
    with pytest.raises(RecipeError, match=f"--workers '{workers[:40]}' is no number of workers"):
        ray_place(address="", workers=workers)


@pytest.mark.parametrize(
    ("has", "said", "hint"),
    [
        ({}, "2 workers ask for 2 CPU, 2 GPU; .* 0 of 0 GPU",
         "no node of this cluster has a GPU; gpu: cpu trains on cores"),
        ({"GPU": 1}, "1 of 1 GPU", "at most 1 worker now: --workers 1"),
    ],
)  # fmt: skip
def test_a_cluster_with_too_few_gpus_says_how_many_workers_have_room(has, said, hint):
    resources = {"CPU": 8, **has}
    cluster = RayCluster(nodes=(Node(id="a", host="a", resources=resources),), free=resources)
    with pytest.raises(HardwareError, match=said) as refused:
        with_room(cluster, RayPlace(fewest=2, most=2), {"CPU": 1.0, "GPU": 1.0})
    assert refused.value.hint == hint
