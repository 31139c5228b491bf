"""Rows 29 and 31 of the fault table: workers that are lost, errors of a rank, requests that cannot be met."""

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.errors import HardwareError, TrainingFailed
from fitune.files import process_lives
from fitune.launch.ray_cluster import RayPlace, ask_nodes, connected
from fitune.launch.ray_workers import open_mailbox, run_workers
from fitune.recipe.recipe import dump_recipe
from fitune.session.clusters import on_ray
from fitune.session.clusters.on_ray import train_on_ray
from fitune.session.clusters.ray_nodes import facts_of_node, require_same_versions
from ray_runs import (
    Faulty,
    Heard,
    by_one_process,
    is_committed,
    losses,
    rank_of,
    report_of,
    spoil_ray,
    wait_for,
    wait_until_idle,
)

pytestmark = pytest.mark.ray
TWO = RayPlace(fewest=2, most=2, restarts=0)


def test_a_worker_killed_beyond_the_limit_is_the_cause(cluster, recipe, monkeypatch, tmp_path):
    """Twice: rank 0 does not see it by itself, until Ray ends it, and then it does."""
    once = RayPlace(fewest=2, most=2, restarts=1)
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("kill", call=5, deaf=str(tmp_path / "deaf")))
    wanted = recipe(zero=0)
    with pytest.raises(TrainingFailed, match=r"^rank 1 .*ended without a word") as failed:
        train_on_ray(wanted, once, overwrite=False, emit=(heard := Heard()))
    assert failed.value.exit_code == 1
    assert "--resume" in str(failed.value.hint)
    assert (tmp_path / "deaf").exists()
    assert re.search(r"rank 1 .*ended without a word.*: starting again", heard.text)


@pytest.mark.parametrize("is_controlled", [False, True])
def test_a_run_that_is_stopped_while_it_waits_for_room_asks_ray_no_more_and_waits_for_none(
    cluster, tmp_path, is_controlled
):
    """At once, when Ray's controller does not live yet, and later, when it does."""
    import ray

    mailbox = open_mailbox()

    def is_waiting():
        return any(group["state"] == "PENDING" for group in ray.util.placement_group_table().values())

    def watch():
        if not is_controlled or is_waiting():
            raise SystemExit(130)
        return False

    with pytest.raises(SystemExit):
        run_workers(
            print, {}, place=RayPlace(fewest=9, most=9), each={"CPU": 1.0}, directory=tmp_path, mailbox=mailbox,
            watch=watch, lost=print, timeout_s=60,
        )  # fmt: skip
    assert not [thread for thread in threading.enumerate() if thread.name == "fit"]
    wait_for(lambda: not is_waiting(), what="room was reserved for nobody", seconds=10)


def test_a_driver_killed_and_started_again_ends_with_the_losses_of_one_process(cluster, recipe, tmp_path):
    one = by_one_process(recipe("one"))
    settings = {"zero": 2, "backend": "deepspeed"}
    file, held, folder = tmp_path / "recipe.yaml", tmp_path / "held", tmp_path / "two"
    file.write_text(dump_recipe(recipe("two", **settings)))
    words = ["train", str(file), "--on", "ray", "--ray-address", cluster.address, "--workers", "2"]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, str(here / "held_driver.py"), *words],
        env={**os.environ, "HELD": str(held), "PYTHONPATH": paths},
    )
    try:
        wait_for(
            lambda: (held.exists() and is_committed(folder, 4)) or driver.poll() is not None,
            what="waited for the checkpoint",
        )
        assert held.exists()
        workers = [rank_of(folder, rank).pid for rank in (0, 1)]
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(map(process_lives, workers)), what="the workers outlived their driver")
    wait_until_idle()
    assert train_on_ray(recipe("two", resume=True, **settings), TWO, overwrite=False, emit=Heard()) == 0
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)


def test_only_our_commits_count_whatever_ray_has_lost(cluster, recipe, monkeypatch, tmp_path):
    """A worker dies behind a COMMIT of which Ray was told nothing, and its snapshot is torn: the next workers go on
    from there. So does the next driver, to which two more steps are given."""
    longer = {"resume": True, "max_steps": 8}
    one = by_one_process(recipe("one"))
    by_one_process(recipe("one", **longer))
    two = recipe("two", zero=0)
    folder = Path(str(two.output_dir))
    spoiling = Faulty("spoil", call=9, folder=str(folder), marker=str(tmp_path / "spoiled"))
    with monkeypatch.context() as patched:
        patched.setattr(on_ray, "train_as_rank", spoiling)
        assert train_on_ray(two, RayPlace(fewest=2, most=2, restarts=1), overwrite=False, emit=Heard()) == 0
    [restart] = report_of(folder).restarts
    assert restart.after_step == 4
    spoil_ray(folder)
    assert train_on_ray(recipe("two", zero=0, **longer), TWO, overwrite=False, emit=Heard()) == 0
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    assert len(losses(one)) == 8


def test_a_rank_without_memory_lets_the_next_attempt_take_less_and_train_the_model_of_one_process(
    cluster, recipe, monkeypatch, tmp_path
):
    one, heard = by_one_process(recipe("one")), Heard()
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("memory", call=5, marker=str(tmp_path / "happened")))
    two = recipe("two", zero=0)
    assert train_on_ray(two, TWO, overwrite=False, emit=heard) == 0
    folder = Path(str(two.output_dir))
    report = report_of(folder)
    [retry] = report.retries
    assert "rank 1" in retry.reason
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    assert report.status == "complete"
    assert len(report.ranks) == 2
    assert report.best_eval_loss == pytest.approx(report_of(one).best_eval_loss, abs=1e-5)
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert len(heard.events) > 6
    again = Heard()
    assert train_on_ray(two, TWO, overwrite=False, emit=again) == 0
    assert "already complete" in again.text


def test_an_address_where_nobody_answers_is_an_error_before_ray_is_asked(cluster, monkeypatch):
    """Ray itself would try for half a minute."""
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
    with pytest.raises(HardwareError, match=r"no Ray cluster at 127\.0\.0\.1:9"), connected("127.0.0.1:9"):
        pass


def test_other_versions_on_a_node_are_named(cluster):
    answers = ask_nodes(facts_of_node, {}).values()
    require_same_versions(answers)
    others = [replace(each, versions=each.versions | {"transformers": "4.57.0"}) for each in answers]
    with pytest.raises(HardwareError, match=r"transformers differs: .* on .* '4\.57\.0' on node "):
        require_same_versions(others)
