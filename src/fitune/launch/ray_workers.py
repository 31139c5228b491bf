"""A function in every worker of Ray's TorchTrainer.

Restarts of lost workers are Ray's (FailureConfig, Train V2); which checkpoint counts is never asked of Ray.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import HardwareError
from fitune.launch.ray_cluster import RayPlace, last_words, loaded_ray
from fitune.spec.machines.job import TESTED_RAY

_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 15.0
"""For the controller to be known, which takes seconds after ``fit`` began, and then for ``fit`` to see its end."""
_TRIES_FOR_ROOM = 5
"""Times that Ray looks for room, 20 s each, for every restart: a lost node may come back, and for up to 20 s Ray counts
on one that is gone."""

_NEVER_SECONDS = 1e9
"""Ray would end the workers without a save to start more of them; the driver does it with one."""


@dataclass(slots=True)
class WorkersEnd:
    """End of ``fit``: the value that rank 0 returned, or the errors of the workers of the last group, by rank."""

    returned: Any = None
    failures: dict[int, str] = field(default_factory=dict)
    error: str = ""


def ray_parts() -> Any:
    """The module with the parts of a run that Ray calls. Raises HardwareError where this version of Ray has no place
    for them: one stands on Ray's internals, since nothing else says which actor its controller is."""
    ray = loaded_ray()
    try:
        from fitune.launch import ray_backend
    except ImportError as error:
        raise HardwareError(
            f"Ray {ray.__version__} cannot run the workers, only the Ray that fitune was tested with can: {error}",
            hint=f"pip install 'ray[train,data]=={TESTED_RAY}' here and on every node",
        ) from error
    return ray_backend


def run_workers(
    function: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    *,
    place: RayPlace,
    each: Mapping[str, float],
    directory: Path,
    name: str,
    desk: Any,
    watch: Callable[[], bool],
    lost: Callable[[list[int]], None],
    timeout_s: float,
) -> WorkersEnd:
    """Run ``function(config)`` in every worker of a TorchTrainer. ``watch`` is called several times a second, until it
    says that Ray's end is not worth waiting for; ``lost`` in a process of Ray on this node, with ranks that ended.
    ``desk`` is that of open_desk. Whatever ends the call ends the workers, and no thread asks Ray any more, also where
    it still waited for room: Ray ends a process that asks it from behind ray.shutdown()."""
    parts = ray_parts()
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    gpus = bool(each.get("GPU"))
    trainer = TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=parts.OwnInterface(
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=int(timeout_s)
        ),
        scaling_config=ScalingConfig(
            num_workers=(place.fewest, place.most) if place.is_elastic else place.most,
            use_gpu=gpus,
            resources_per_worker=dict(each),
            elastic_resize_monitor_interval_s=_NEVER_SECONDS,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(directory),
            failure_config=FailureConfig(
                max_failures=place.restarts,
                controller_failure_limit=_TRIES_FOR_ROOM * place.restarts,
                max_preemption_failures=place.restarts,
            ),
            logging_config=LoggingConfig(log_level="CRITICAL"),
            callbacks=[parts.LossesTold(lost), parts.ControllerTold(desk)],
        ),
    )
    end = WorkersEnd()
    thread = threading.Thread(target=_fit, args=(trainer, end), name="fit", daemon=True)
    thread.start()
    try:
        while not watch() and thread.is_alive():
            thread.join(_LOOK_SECONDS)
    finally:
        _leave(thread, desk)
    watch()
    return end


def _leave(thread: threading.Thread, desk: Any) -> None:
    """End ``fit`` with the workers, or before there is room for them, and give their room back.

    The controller is killed: its own ``abort`` is not heard while it waits for room, and took more than 5 s
    with workers on a cluster without a dashboard.
    """
    if not thread.is_alive():
        return
    ray = loaded_ray()
    with suppress(ray.exceptions.RayError):  # the cluster is gone, and fit with it
        controller = ray.get(desk.controller.remote(), timeout=_LEAVE_SECONDS)
        ray.kill(controller)
        thread.join(_LEAVE_SECONDS)
        ray_parts().remove_groups_of(controller)
    thread.join(_LEAVE_SECONDS)


def _fit(trainer: Any, end: WorkersEnd) -> None:
    """Runs ``fit`` in a thread: Ray's own handler of SIGINT would take the place of ours."""
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    try:
        end.returned = trainer.fit().return_value
    except TrainingFailedError as error:
        failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
        end.failures = {rank: last_words(failure) for rank, failure in failures.items()}
        end.error = "; ".join(f"rank {rank}: {words}" for rank, words in end.failures.items()) or last_words(
            getattr(error, "controller_failure", error)
        )
    except RayError as error:  # the cluster is gone, or the controller was ended
        end.error = last_words(error)
