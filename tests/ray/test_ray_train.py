"""A run on Ray's workers is the run of one process, whatever happens to the workers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.errors import HardwareError, TrainingFailed
from fitune.launch.ray_cluster import RayPlace
from fitune.session.clusters import on_ray
from fitune.session.clusters.on_ray import train_on_ray
from fitune.spec.recipe.recipe import Recipe
from fitune.track.record import read_tracked
from ray_runs import Faulty, Heard, by_one_process, losses, report_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]
TWO = RayPlace(fewest=2, most=2)
LONG = {"max_steps": 20, "save_steps": 4}


def test_two_workers_train_the_model_of_one_process(cluster: Any, recipe: Callable[..., Recipe]) -> None:
    one, heard = by_one_process(recipe("one")), Heard()
    two = recipe("two", zero=0)
    assert train_on_ray(two, TWO, overwrite=False, tell=heard) == 0
    folder = Path(str(two.output_dir))
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    report = report_of(folder)
    assert report.status == "complete"
    assert len(report.ranks) == 2
    assert report.best_eval_loss == pytest.approx(report_of(one).best_eval_loss, abs=1e-5)
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert "step 6" in heard.text or len(heard.events) > 6
    again = Heard()
    assert train_on_ray(two, TWO, overwrite=False, tell=again) == 0
    assert "already complete" in again.text


def test_a_killed_worker_is_replaced_and_the_losses_stay_equal(
    cluster: Any, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = by_one_process(recipe("one", **LONG))
    two = recipe("two", zero=3, backend="fsdp", report_to="tensorboard", **LONG)
    folder = Path(str(two.output_dir))
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("kill", call=25, marker=str(tmp_path / "killed")))
    assert train_on_ray(two, TWO, overwrite=False, tell=Heard()) == 0
    (tracked,) = read_tracked(folder)  # by the first rank alone, and by its successor under the same id
    assert (tracked.failure, tracked.has_begun, tracked.sent > 0) == ("", True, True)
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    [restart] = report_of(folder).restarts
    assert restart.cause.startswith("rank 1")
    assert restart.workers == restart.workers_before == 2
    assert restart.after_step % 4 == 0
    assert restart.after_step > 0
    assert restart.lost_seconds > 0
    assert restart.cause in (folder / "report.html").read_text()


def test_more_workers_than_the_cluster_has_room_for_are_refused(
    cluster: Any, recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(
        HardwareError, match=r"9 workers ask for 9 CPU; free on 1 node: 2 of 2 CPU"
    ) as refused:
        train_on_ray(recipe(), RayPlace(fewest=9, most=9), overwrite=False, tell=Heard())
    assert "--workers 2" in str(refused.value.hint)


def test_a_rank_that_fails_by_itself_is_named_and_not_restarted(
    cluster: Any, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 needs longer to write the report than Ray to see that rank 1 is gone. No thread may ask Ray from behind
    the end: Ray ends a process that asks it after ray.shutdown(), whatever it still had to say."""
    monkeypatch.setattr(on_ray, "train_as_rank", Faulty("error", call=5, is_slow=True))
    wanted = recipe(zero=0)
    with pytest.raises(TrainingFailed, match=r"^rank 1 failed: row 7 of the test cannot be read") as failed:
        train_on_ray(wanted, RayPlace(fewest=2, most=2, restarts=3), overwrite=False, tell=Heard())
    assert failed.value.exit_code == 1
    assert "fit" not in [thread.name for thread in threading.enumerate()]
    report = report_of(Path(str(wanted.output_dir)))
    assert report.status == "failed"
    assert "rank 1 failed: row 7" in report.reason
    assert not report.restarts
    assert "rank 1 failed: row 7" in (Path(str(wanted.output_dir)) / "report.html").read_text()
