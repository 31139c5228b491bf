"""A pool of actors on a Ray cluster: each takes one piece of work after the other; results come in the pieces' order.

A piece whose actor died is given back and done by another one. Each actor knows the piece that it will be given next,
and may begin with it, but only its result counts: a piece that another actor does in the end is done once. Pieces are
taken from their source as actors become free, and nobody runs far ahead of the oldest piece that is not done.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fitune.errors import FituneError, HardwareError
from fitune.launch.ray_cluster import last_words, loaded_ray

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_LOOK_SECONDS = 1.0
_SHOWN_SECONDS = 2.0
_ANSWER_SECONDS = 0.2
_ROOM_SECONDS = 300.0
"""So long may no actor have a place on the cluster: a lost node may come back."""
_AHEAD = 4
"""Pieces for each actor that are begun or done while the oldest one is not."""


@dataclass(slots=True, eq=False)
class _Member(Generic[Piece]):
    actor: Any
    promise: Any
    """Ray's reference to the result of the actor's present call; None while it is free."""
    where: str = ""
    """Empty until it has a place."""
    held: list[tuple[int, Piece]] = field(default_factory=list)
    """The numbered piece that it works at, and the one that it is given next, unless somebody else is free before."""


class ActorPool(Generic[Piece, Result]):
    """``workers`` actors, each ``kind(*words)`` with the resources ``each``; ``restarts`` of them may die in all.

    An actor says by ``hello()`` where it runs, ``work(piece, ahead)`` returns the result of a piece (``ahead`` is the
    one that comes next, or None), and ``done()``, asked beside it, how many parts of the piece are done.
    ``told`` hears of each death in words. As a context manager it ends them all.
    """

    def __init__(
        self, kind: Callable[..., Any], words: tuple[Any, ...], *, workers: int, each: Mapping[str, float],
        restarts: int, told: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._ray = ray = loaded_ray()
        asked = {"CPU": "num_cpus", "GPU": "num_gpus"}
        resources = {asked[name]: amount for name, amount in each.items()}
        options = ray.remote(kind).options(**resources, max_restarts=0, max_concurrency=2)
        self._start: Callable[[], Any] = partial(options.remote, *words)
        self._restarts, self._told, self._ahead = restarts, told, _AHEAD * workers
        self._given_back: deque[tuple[int, Piece]] = deque()
        self._is_over = False
        self._members = [self._member() for _ in range(workers)]
        self._had_place = self._looked = time.monotonic()

    def __enter__(self) -> "ActorPool[Piece, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._ray.kill(member.actor)

    def results(self, pieces: Iterator[Piece], *, look: Callable[[int], None]) -> Iterator[Result]:
        """The result of each piece, in their order. ``look`` is told every other second how many parts are done of the
        pieces that are worked at.

        Raises HardwareError when more died than may be replaced, or none finds a place.
        """
        source, finished, following = enumerate(pieces), dict[int, Result](), 0
        self._is_over = False
        while True:
            self._share_out(source, finished)
            if self._is_over and not self._begun(finished):
                return
            finished.update(self._arrived())
            self._share_out(source, finished)  # nobody waits until a result is written
            while following in finished:
                yield finished.pop(following)
                following += 1
            if time.monotonic() - self._looked >= _SHOWN_SECONDS:
                look(self._parts_done())
                self._looked = time.monotonic()

    def _member(self) -> _Member[Piece]:
        actor = self._start()
        return _Member(actor=actor, promise=actor.hello.remote())

    def _share_out(self, source: Iterator[tuple[int, Piece]], finished: Mapping[int, Result]) -> None:
        """A piece for each member that is free, and the one that comes next, as far as there are pieces."""
        free = [member for member in self._members if member.promise is None]
        for member in [member for member in free if not member.held]:
            task = self._next(source, finished)
            waiting = [each.held for each in self._members if len(each.held) > 1]
            if task is None and waiting:  # the oldest piece that waits for a member which is busy
                task = min(waiting, key=lambda held: held[1][0]).pop()
            member.held += [task] if task is not None else []
        for member in [member for member in free if member.held]:
            ahead = self._next(source, finished)
            member.held += [ahead] if ahead is not None else []
            member.promise = member.actor.work.remote(member.held[0][1], ahead and ahead[1])

    def _next(
        self, source: Iterator[tuple[int, Piece]], finished: Mapping[int, Result]
    ) -> tuple[int, Piece] | None:
        if self._given_back:
            return self._given_back.popleft()
        if self._is_over or self._begun(finished) >= self._ahead:
            return None
        task = next(source, None)
        self._is_over = task is None
        return task

    def _begun(self, finished: Mapping[int, Result]) -> int:
        """Pieces that were taken from the source and whose results were not given out."""
        return sum(len(member.held) for member in self._members) + len(self._given_back) + len(finished)

    def _arrived(self) -> dict[int, Result]:
        """Results that came within a second, by the numbers of their pieces."""
        ray = self._ray
        busy = {member.promise: member for member in self._members if member.promise is not None}
        came, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0)
        if not came:
            came, _ = ray.wait(list(busy), num_returns=1, timeout=_LOOK_SECONDS)
        found: dict[int, Result] = {}
        for member in map(busy.__getitem__, came):
            try:
                value = ray.get(member.promise)
            except ray.exceptions.RayTaskError as error:  # it lives, and says why not
                cause = (
                    error.cause if isinstance(error.cause, FituneError) else HardwareError(last_words(error))
                )
                raise cause from None
            except ray.exceptions.RayError as error:
                self._replace(member, last_words(error))
                continue
            if not member.where:
                member.where = value
            else:
                found[member.held.pop(0)[0]] = value
            member.promise = None
        if any(member.where for member in self._members):
            self._had_place = time.monotonic()
        elif time.monotonic() - self._had_place > _ROOM_SECONDS:
            raise HardwareError(
                f"no worker has found a place for {_ROOM_SECONDS:g} s", hint="ray status says what is free"
            )
        return found

    def _replace(self, member: _Member[Piece], why: str) -> None:
        """Give back the piece of a member that died, and start another one."""
        self._ray.kill(member.actor)  # one that only cannot be reached must not go on
        self._members.remove(member)
        self._given_back += member.held
        lost = f"the worker {member.where}" if member.where else "a worker that was starting"
        if not self._restarts:
            raise HardwareError(
                f"{lost} ended, and no restart is left: {why}",
                hint="start again: what is done stays done; fewer workers a node have more memory each",
            )
        self._restarts -= 1
        self._told(f"{lost} ended ({why}); another one takes over")
        self._members.append(self._member())

    def _parts_done(self) -> int:
        """Parts that the actors have done, of those actors that answer at once: the number is for people to see."""
        ray = self._ray
        asked = [member.actor.done.remote() for member in self._members if member.held]
        came, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
        parts = 0
        for answer in came:
            with suppress(ray.exceptions.RayError):  # it died: seen by its piece
                parts += ray.get(answer)
        return parts
