"""The desk: where the ranks on a Ray cluster and the driver that started them leave each other word."""

from typing import Any

from fitune.launch.ray_cluster import loaded_ray


class Desk:
    """An actor beside the driver: ranks lay down there what is to be told, and learn that they are to stop."""

    def __init__(self) -> None:
        import asyncio

        self._events: list[Any] = []
        self._is_stopping = asyncio.Event()
        self._begun: dict[int, int] = {}
        self._failed = ""
        self._controller: Any = None
        self._has_controller = asyncio.Event()

    async def tell(self, event: Any) -> None:
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
        self._is_stopping.set()

    async def stop_asked(self) -> None:
        """Returns when the ranks are to stop."""
        await self._is_stopping.wait()


def open_desk() -> Any:
    ray = loaded_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Desk)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False))
        .remote()
    )
