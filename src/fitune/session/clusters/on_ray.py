"""Training on a Ray cluster: this process plans, asks the nodes, and tells people what the workers say.

Room for more workers that lasts is taken, after a save: Ray Train would grow by itself, but it ends its workers without
one, and counts cores that others hold.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fitune.checkpoint.commit import Commit, last_saved
from fitune.engine.ranks import WAIT
from fitune.errors import FituneError, OutOfMemory, RecipeError, TrainingFailed
from fitune.launch.ray_cluster import (
    RayCluster,
    RayPlace,
    cluster_now,
    connected,
    loaded_ray,
    ray_place,
    spread,
    with_room,
)
from fitune.launch.ray_workers import open_mailbox, ray_parts, run_workers
from fitune.launch.torchrun import Ended, ended, fresh_logs
from fitune.recipe.recipe import Recipe, dump_recipe
from fitune.report.run_page import write_report
from fitune.session.clusters.ray_nodes import hardware_of_workers, own_settings, require_shared
from fitune.session.clusters.ray_ranks import (
    WORD_SECONDS,
    Change,
    Orders,
    cause_of_loss,
    take_down_losses,
    train_as_rank,
)
from fitune.session.events import Emit, Note, StepsBegin
from fitune.session.planning import plan_for, with_average_row
from fitune.session.signals import INTERRUPTED, StopRequest, stop_requests
from fitune.session.train.attempts import (
    LOST,
    Attempt,
    failure,
    next_attempt,
    owned_directory,
    shortage_of_ranks,
)
from fitune.session.train.beginning import first_attempt
from fitune.track.trackers import settings_of_environment
from fitune.values.machines.hardware import Hardware
from fitune.values.rank_status import read_statuses
from fitune.values.run_directory import LOGS
from fitune.values.serial import from_json, to_json

LASTS_SECONDS = 25.0
"""Room is taken once it was there for so long: Ray looks every 20 s which nodes there are, and would start a group on
those that it knows."""
_LOOK_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class Growth:
    """Number of workers that train, and of those that have had room for a while."""

    each: Mapping[str, float]
    most: int
    left: set[str] = field(default_factory=set)
    """Ids of nodes that will be taken away."""
    workers: int = 0
    """Workers that train; 0 while none are known to."""
    wanted: int = 0
    """Workers that the group that begins should have."""
    _looked_at: float = 0.0
    _room_since: float | None = None

    def larger(self) -> int:
        """Workers that have room now, where more than those that train have had it for a while; else 0."""
        now = time.monotonic()
        if not 0 < self.workers < self.most or now - self._looked_at < min(_LOOK_SECONDS, LASTS_SECONDS):
            return 0
        self._looked_at = now
        room = min(self.most, workers_with_room(cluster_now().without(self.left), self.each, self.workers))
        if room <= self.workers:
            self._room_since = None
            return 0
        if self._room_since is None:
            self._room_since = now
        return room if now - self._room_since >= LASTS_SECONDS else 0

    def begin(self, workers: int) -> None:
        """A group of workers begins its steps. One that is smaller than wanted shows that Ray has no place for more."""
        if workers < self.wanted:
            self.most = workers
        self.workers, self.wanted, self._room_since = workers, 0, None


def workers_with_room(cluster: RayCluster, each: Mapping[str, float], workers: int) -> int:
    """Workers that have room beside everybody else, ``workers`` of this run among them.

    Where less is held than they need, they have just ended, and what is free is theirs.
    """
    held = {
        name: sum(node.resources.get(name, 0.0) for node in cluster.nodes) - cluster.free.get(name, 0.0)
        for name in each
    }
    are_there = all(held[name] >= workers * amount for name, amount in each.items())
    return workers + cluster.free_slots(each) if are_there else workers


_STORAGE = f"{LOGS}/ray"
"""Folder in the run directory for what Ray Train writes; nothing is read from it."""


def place_on_ray(recipe: Recipe, *, address: str, workers: str, restarts: int) -> RayPlace:
    """The place that the command line says; as many workers as the recipe has GPUs unless ``workers`` says another
    number."""
    workers = workers or str((recipe.gpus or 1) * recipe.nodes)
    return ray_place(address=address, workers=workers, restarts=restarts)


def train_on_ray(recipe: Recipe, place: RayPlace, *, overwrite: bool, emit: Emit) -> int:
    """Plan for the workers' hardware and train there; returns the exit code.

    Raises HardwareError where the cluster cannot be reached, has no room, or its nodes differ from this machine.
    """
    with connected(place.address) as cluster:
        ray_parts()  # before anything is planned
        # a GPU where the recipe names one or the cluster has any, and a core
        names_cpu = (recipe.gpu or "").lower() == "cpu"
        wants_gpu = not names_cpu and (recipe.gpu is not None or cluster.has_gpus)
        each = {"CPU": 1.0, "GPU": 1.0} if wants_gpu else {"CPU": 1.0}
        cluster = with_room(cluster, place, each)
        asked = place
        if place.is_elastic:  # Ray counts on the whole cluster, also on what others hold
            place = replace(place, most=min(place.most, max(place.fewest, cluster.free_slots(each))))
        worlds = range(place.fewest, place.most + 1)
        shapes, found = _shapes(recipe, worlds, cluster.slots(each))
        largest = shapes[place.most]
        attempt = first_attempt(largest, overwrite=overwrite, emit=emit, hardware=found[place.most])
        if not isinstance(attempt, Attempt):
            return 0
        _require_shared(attempt)
        attempts = {place.most: attempt}
        for world in worlds[:-1]:
            attempts[world] = _of_number(world, attempt, shapes[world], found[world])
        with owned_directory(attempt.directory):
            growth = Growth(each=each, most=asked.most if attempt.plan.run.saves else place.most)
            return _Job(recipe=recipe, place=place, attempts=attempts, growth=growth, emit=emit).run()


def _shapes(
    recipe: Recipe, worlds: Iterable[int], slots: Sequence[int]
) -> tuple[dict[int, Recipe], dict[int, Hardware]]:
    """The recipe and the hardware of each number of workers, on so many nodes with so many each. Raises
    HardwareError."""
    sizes = {world: spread(world, slots) for world in worlds}
    shapes = {
        world: recipe.model_copy(update={"nodes": nodes, "gpus": each})
        for world, (nodes, each) in sizes.items()
    }
    return shapes, hardware_of_workers(shapes)


def _require_shared(attempt: Attempt) -> None:
    sources = [source.path for source in attempt.plan.data.sources]
    require_shared(attempt.directory, [attempt.plan.model_path, *sources])


def _of_number(world: int, most: Attempt, recipe: Recipe, hardware: Hardware) -> Attempt:
    """The attempt of another number of workers at the same global batch."""
    batch = most.plan.batch
    rows = batch.micro_batch_size * batch.accumulation * most.plan.hardware.num_gpus
    pins = {"global_batch_size": rows, "gradient_accumulation_steps": None}
    recipe = with_average_row(recipe.model_copy(update=pins), most.plan)
    try:
        report = plan_for(recipe, purposes=("plan", "train"), hardware=hardware)
    except FituneError as error:
        raise RecipeError(
            f"with {world} workers in place of {most.plan.hardware.num_gpus}, at the same global batch of {rows} rows: "
            f"{error.message}",
            hint="a global_batch_size that every number of workers divides, or a narrower range of --workers",
        ) from error
    chosen = replace(report.chosen, plan=replace(report.chosen.plan, run=most.plan.run))
    return replace(most, recipe=dump_recipe(recipe), report=replace(report, chosen=chosen))


@dataclass(slots=True, kw_only=True)
class _Job:
    """The workers' part of a run: Ray starts them again when some are lost, this when a node is to be taken away, there
    is room for more, or memory ran out."""

    recipe: Recipe
    place: RayPlace
    attempts: dict[int, Attempt]
    growth: Growth
    emit: Emit
    change: Change | None = None
    """Why the present attempt follows on another one that saved."""
    had: Commit | None = None
    """The last checkpoint before the present attempt."""
    larger: int = 0
    """Workers that have room, for which the present attempt is left; 0 while there are no more."""
    failed: Ended | None = None
    """End of the rank that failed first by itself."""

    @property
    def largest(self) -> Attempt:
        """The attempt of the most workers."""
        return self.attempts[self.place.most]

    @property
    def directory(self) -> Path:
        """The run's."""
        return self.largest.directory.absolute()

    def run(self) -> int:
        """Returns the exit code."""
        while True:
            with stop_requests() as request:
                end, why = self._trained(request)
            if end is None or not end.is_well:
                self._after_failure(end, why)
            elif end.exit_code == 0:
                return 0
            elif request.received or not (end.left_nodes or self.larger):
                self.emit(Note("interrupted: the step was finished and saved; add --resume to go on"))
                return request.exit_code if request.received else INTERRUPTED
            elif end.left_nodes:
                self.emit(Note("a node will be taken away: saved, going on without it"))
                self._resume("a node was to be taken away")
                self.growth.left.update(end.left_nodes)
                room = sum(cluster_now().without(self.growth.left).slots(self.growth.each))
                self.place = replace(self.place, most=max(self.place.fewest, min(self.place.most, room)))
            else:
                self.emit(Note(f"room for {self.larger} workers: saved, going on with them"))
                self._resume("there was room for more workers")
                self.place = replace(self.place, most=self.larger)
                self.growth.wanted = self.larger

    def _trained(self, request: StopRequest) -> tuple[Ended | None, str]:
        """The end that rank 0 tells, else None and Ray's error."""
        fresh_logs(self.directory)
        self.growth.workers, self.larger = 0, 0
        ray, mailbox = loaded_ray(), open_mailbox()
        self.had, self.failed = last_saved(self.directory), None
        orders = Orders(
            attempts={world: to_json(attempt) for world, attempt in self.attempts.items()},
            had=self.had,
            change=self.change,
            folder=os.getcwd(),
            environment=own_settings() | dict(settings_of_environment()),
            threads=self.largest.plan.hardware.threads_per_process,
            mailbox=mailbox,
        )
        is_stopping, failed_at = False, 0.0

        def watch() -> bool:
            """Passes on events and requests to stop; True once a failed rank's run is not worth waiting for."""
            nonlocal is_stopping, failed_at
            events, failed = ray.get(mailbox.take.remote(), timeout=WAIT.total_seconds())
            for event in events:
                if isinstance(event, StepsBegin):
                    request.start(event.plan, event.run_name)
                    self.growth.begin(event.plan.hardware.num_gpus)
                self.emit(event)
            if not is_stopping and (request.asked() or self._can_grow()):
                is_stopping = True
                mailbox.stop.remote()
            if failed and not failed_at:
                failed_at, self.failed = time.monotonic(), from_json(Ended, failed)
            if not failed_at or shortage_of_ranks(self.directory) is not None:
                return False
            waited = time.monotonic() - failed_at
            first = read_statuses(self.directory / LOGS).get(0)  # it ends with the report written
            return first is None or first.has_ended or waited > WORD_SECONDS

        try:
            return run_workers(
                train_as_rank, {"orders": orders}, place=self.place, each=self.growth.each,
                directory=self.directory / _STORAGE, mailbox=mailbox, watch=watch,
                lost=partial(take_down_losses, self.directory / LOGS), timeout_s=WAIT.total_seconds(),
            )  # fmt: skip
        finally:
            ray.kill(mailbox)

    def _can_grow(self) -> bool:
        """True once there is room for more workers, and plans for them: ``larger`` says for how many."""
        room = self.growth.larger()
        new = range(max(self.attempts) + 1, room + 1)
        try:
            if new:
                attempt = self.largest
                shapes, found = _shapes(self.recipe, new, cluster_now().slots(self.growth.each))
                _require_shared(attempt)
                for world in new:
                    self.attempts[world] = _of_number(world, attempt, shapes[world], found[world])
        except FituneError as error:
            room = max(self.attempts)
            self.growth.most = room
            self.emit(
                Note(f"there is room for more workers than {room}, and none are added: {error.message}")
            )
        self.larger = room if room > self.growth.workers else 0
        return self.larger > 0

    def _resume(self, cause: str) -> None:
        self.change = Change(cause=cause, workers_before=self.growth.workers)
        self.attempts = {
            world: replace(attempt, resume=True, overwrite=False) for world, attempt in self.attempts.items()
        }

    def _after_failure(self, end: Ended | None, why: str) -> None:
        """Prepare the next attempt when memory ran out. Raises the cause of any other end."""
        self.change = None
        shortage = shortage_of_ranks(self.directory)
        if shortage is not None and self.place.is_elastic:
            raise OutOfMemory(
                shortage.message, hint="--workers with one number: the plan is then made smaller"
            )
        if shortage is not None:
            self.attempts[self.place.most] = next_attempt(
                self.largest, shortage, had=self.had, emit=self.emit
            )
            return
        directory = self.directory
        if (directory / "report.json").is_file() and not (directory / "report.html").is_file():
            with suppress(
                FituneError, OSError
            ):  # the first rank was ended between both; the cause is worth more
                write_report(directory)
        statuses = read_statuses(directory / LOGS)
        told = ended({}, directory, received=[], ranks=range(max(statuses, default=0) + 1))
        if not told.cause:
            told = self.failed or end or told
        if not told.cause:
            restarts = self.place.restarts
            after = f", after {restarts} restart{'s' * (restarts != 1)}" if restarts else ""
            cause = cause_of_loss(statuses) if statuses else (why or LOST)
            told = Ended(exit_code=TrainingFailed.exit_code, cause=f"{cause}{after}")
        raise failure(told)
