"""A run on Ray's workers is the run of one process, whatever happens to the workers."""

import os
import signal
import threading
from pathlib import Path

import pytest

from fitune.errors import HardwareError, TrainingFailed
from fitune.launch.ray_cluster import RayPlace
from fitune.session.clusters import on_ray
from fitune.session.clusters.on_ray import train_on_ray
from fitune.track.record import read_tracked
from ray_runs import Faulty, Heard, by_one_process, losses, report_of, wait_until_idle

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]
TWO = RayPlace(fewest=2, most=2)
LONG = {"max_steps": 20, "save_steps": 4}


def test_a_rank_that_fails_by_itself_is_named_not_restarted_and_leaves_room_for_the_next_run(
    cluster, recipe, monkeypatch
):
    """Rank 0 needs longer to write the report than Ray to see that rank 1 is gone. No thread may ask Ray from behind
    the end: Ray ends a process that asks it after ray.shutdown(), whatever it still had to say."""
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("error", call=5, is_slow=True))
    wanted = recipe(zero=0)
    with pytest.raises(TrainingFailed, match=r"^rank 1 failed: row 7 of the test cannot be read") as failed:
        train_on_ray(wanted, RayPlace(fewest=2, most=2, restarts=3), overwrite=False, emit=Heard())
    assert failed.value.exit_code == 1
    assert "fit" not in [thread.name for thread in threading.enumerate()]
    wait_until_idle(seconds=10)  # room for the next test, another run of this driver
    report = report_of(Path(str(wanted.output_dir)))
    assert report.status == "failed"
    assert "rank 1 failed: row 7" in report.reason
    assert not report.restarts
    assert "rank 1 failed: row 7" in (Path(str(wanted.output_dir)) / "report.html").read_text()


def test_a_killed_worker_is_replaced_a_signal_lets_all_save_and_one_process_goes_on_with_equal_losses(
    cluster, recipe, monkeypatch, tmp_path
):
    """Rank 1 is killed in step 13; its successor waits in step 15 until the signal, sent at step 13, has come."""
    tracked_by = {"report_to": "tensorboard", **LONG}
    one = by_one_process(recipe("one", **LONG))
    two = recipe("two", zero=3, backend="fsdp", **tracked_by)
    folder = Path(str(two.output_dir))
    killing = Faulty(
        "kill", call=25, marker=str(tmp_path / "killed"), folder=str(folder), saved=12, stop_at=5
    )
    monkeypatch.setattr(on_ray, "train_as_rank", killing)
    heard = Heard(at_step={13: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert train_on_ray(two, TWO, overwrite=False, emit=heard) == 143
    (tracked,) = read_tracked(folder)  # by the first rank alone, and by its successor under the same id
    assert (tracked.failure, tracked.has_begun, tracked.sent > 0) == ("", True, True)
    report = report_of(folder)
    assert report.status == "interrupted"
    assert 13 <= report.steps <= 15
    [restart] = report.restarts
    assert restart.cause.startswith("rank 1")
    assert restart.workers == restart.workers_before == 2
    assert restart.after_step == 12
    assert restart.lost_seconds > 0
    assert restart.cause in (folder / "report.html").read_text()
    by_one_process(recipe("two", resume=True, **tracked_by))
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    assert len(losses(one)) == 20


def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster, recipe):
    with pytest.raises(
        HardwareError, match=r"9 workers ask for 9 CPU; free on 1 node: 2 of 2 CPU"
    ) as refused:
        train_on_ray(recipe(), RayPlace(fewest=9, most=9), overwrite=False, emit=Heard())
    assert "--workers 2" in str(refused.value.hint)
