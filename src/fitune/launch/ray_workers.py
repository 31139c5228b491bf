"""A function in every worker of Ray's TorchTrainer.

Restarts of lost workers are Ray's (FailureConfig, Train V2); which checkpoint counts is never asked of Ray.
"""

import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fitune.errors import HardwareError
from fitune.launch.ray_cluster import RayPlace, last_words, loaded_ray
from fitune.recipe.job import TESTED_RAY

_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 15.0
"""For the controller to be known, which takes seconds after ``fit`` began, and then for ``fit`` to see its end."""
_TRIES_FOR_ROOM = 5
"""Times that Ray looks for room, 20 s each, for every restart: a lost node may come back, and for up to 20 s Ray counts
on one that is gone."""

_NEVER_SECONDS = 1e9
"""Ray would end the workers without a save to start more of them; the driver does it with one."""


class Mailbox:
    """An actor beside the driver, in which ranks leave events, and learn that they are to stop."""

    def __init__(self) -> None:
        import asyncio

        self._events: list[Any] = []
        self._is_stopping = asyncio.Event()
        self._begun: dict[int, int] = {}
        self._failed = ""
        self._controller: Any = None
        self._has_controller = asyncio.Event()

    async def tell(self, event: Any) -> None:
        """Lays ``event`` down until ``take``."""
        self._events.append(event)

    async def take(self) -> tuple[list[Any], str]:
        """The events since the last call, and the end of the rank that failed first by itself, as JSON; empty while
        none has."""
        events, self._events = self._events, []
        return events, self._failed

    async def fail(self, end: str) -> None:
        """A rank fails by an error of its own, which would come again."""
        self._failed = self._failed or end

    async def begin(self, rank: int) -> int:
        """Count a group of workers that begins; returns how many times this rank began before."""
        self._begun[rank] = self._begun.get(rank, -1) + 1
        return self._begun[rank]

    async def control(self, controller: Any) -> None:
        """``controller``, an actor of Ray Train's, starts and watches the workers."""
        self._controller = controller
        self._has_controller.set()

    async def controller(self) -> Any:
        """Returns it once it is known."""
        await self._has_controller.wait()
        return self._controller

    async def stop(self) -> None:
        """All ranks that wait in ``stop_asked`` are let go; it cannot be taken back."""
        self._is_stopping.set()

    async def stop_asked(self) -> None:
        """Returns when the ranks are to stop."""
        await self._is_stopping.wait()


def open_mailbox() -> Any:
    """A handle of a new Mailbox on the driver's own node, which takes no CPU from the workers."""
    ray = loaded_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Mailbox)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False))
        .remote()
    )


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
    mailbox: Any,
    watch: Callable[[], bool],
    lost: Callable[[list[int]], None],
    timeout_s: float,
) -> tuple[Any, str]:
    """Run ``function(config)`` in every worker of a TorchTrainer; what rank 0 returned, or None and the error.

    ``watch`` is called several times a second, until it says that Ray's end is not worth waiting for; ``lost`` in a
    process of Ray on this node, with ranks that ended. ``mailbox`` is that of open_mailbox. Whatever ends the call ends
    the workers, and no thread asks Ray any more, also where it still waited for room: Ray ends a process that asks it
    from behind ray.shutdown().
    """
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
            name=uuid.uuid4().hex,
            storage_path=str(directory),
            failure_config=FailureConfig(
                max_failures=place.restarts,
                controller_failure_limit=_TRIES_FOR_ROOM * place.restarts,
                max_preemption_failures=place.restarts,
            ),
            logging_config=LoggingConfig(log_level="CRITICAL"),
            callbacks=[parts.LossesTold(lost), parts.ControllerTold(mailbox)],
        ),
    )
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    end: list[Any] = [None, ""]

    def fit() -> None:  # in a thread: Ray's own handler of SIGINT would take the place of ours
        """Runs the trainer: ``end[0]`` becomes what rank 0 returned, or ``end[1]`` the error in words."""
        try:
            end[0] = trainer.fit().return_value
        except TrainingFailedError as error:
            failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
            of_ranks = (f"rank {rank}: {last_words(failure)}" for rank, failure in failures.items())
            end[1] = "; ".join(of_ranks) or last_words(getattr(error, "controller_failure", error))
        except RayError as error:  # the cluster is gone, or the controller was ended
            end[1] = last_words(error)

    thread = threading.Thread(target=fit, name="fit", daemon=True)
    thread.start()
    try:
        while not watch() and thread.is_alive():
            thread.join(_LOOK_SECONDS)
    finally:
        _leave(thread, mailbox)
    watch()
    return end[0], end[1]


def _leave(thread: threading.Thread, mailbox: Any) -> None:
    """End ``fit`` with the workers, or before there is room for them, and give their room back.

    The controller is killed: its own ``abort`` is not heard while it waits for room, and took more than 5 s
    with workers on a cluster without a dashboard.
    """
    if not thread.is_alive():
        return
    ray = loaded_ray()
    with suppress(ray.exceptions.RayError):  # the cluster is gone, and fit with it
        controller = ray.get(mailbox.controller.remote(), timeout=_LEAVE_SECONDS)
        ray.kill(controller)
        thread.join(_LEAVE_SECONDS)
        ray_parts().remove_groups_of(controller)
    thread.join(_LEAVE_SECONDS)
