"""Tasks to answers through an engine: one row that fails fails alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from fitune.errors import ScoringFailed
from fitune.score.engines.engine import Completion, Engine, EngineDied, Request, Sampling, failed
from fitune.score.tasks import Answer, Task, to_answer


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Asked = TypeVar("Asked", bound=_Named)
Found = TypeVar("Found", bound=_Named)

_FAULTS = (RuntimeError, ValueError, IndexError, KeyError)
"""Errors that an engine raises for a row that it cannot answer."""
ENGINE_FAILED = "engine_failed"
"""Code of the error of such a row."""


class Restarted:
    """An engine that is opened when it is first asked, and again when it died, at most ``restarts`` times in all."""

    def __init__(self, open_engine: Callable[[], Engine], *, restarts: int = 3) -> None:
        self._open = open_engine
        self._engine: Engine | None = None
        self._restarts = restarts

    def each(
        self,
        asked: Sequence[Asked],
        call: Callable[[Engine, Sequence[Asked]], Iterator[Found]],
        fail: Callable[[Asked, str], Found],
    ) -> Iterator[Found]:
        """Each id once; those that a dead engine left are asked of a new one. ``fail`` makes the error of one.

        Raises ScoringFailed when the engine died too often.
        """
        left = {one.id: one for one in asked}
        while left:
            try:
                for found in self._some(list(left.values()), call, fail):
                    del left[found.id]
                    yield found
                if left:
                    raise EngineDied(f"it returned nothing for {len(left)} rows")
            except EngineDied as death:
                self.close()
                if left and death.hint:
                    raise ScoringFailed(f"{death}", hint=death.hint) from None
                if not self._restarts:
                    raise ScoringFailed(
                        f"the engine died: {death}",
                        hint="start again: rows that have an answer keep it",
                    ) from None
                self._restarts -= 1

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _some(
        self,
        asked: Sequence[Asked],
        call: Callable[[Engine, Sequence[Asked]], Iterator[Found]],
        fail: Callable[[Asked, str], Found],
    ) -> Iterator[Found]:
        """All together; where that raises, those that are left one by one, so that only the row that fails fails."""
        if self._engine is None:
            self._engine = self._open()
        engine, left = self._engine, {one.id: one for one in asked}
        try:
            for found in call(engine, asked):
                del left[found.id]
                yield found
        except _FAULTS:
            for one in list(left.values()):
                try:
                    found = next(iter(call(engine, [one])))
                except _FAULTS as fault:
                    found = fail(one, f"{type(fault).__name__}: {fault}"[:500])
                yield found


class Asker:
    """Asks an engine to write answers."""

    def __init__(
        self, open_engine: Callable[[], Engine], tokenizer: Any, *, sampling: Sampling, stop_ids: frozenset[int],
        restarts: int = 3,
    ) -> None:  # fmt: skip
        self._engine = Restarted(open_engine, restarts=restarts)
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stop_ids = stop_ids

    def ask(
        self, tasks: Sequence[Task], *, on_answer: Callable[[], None], ahead: Sequence[Task] = ()
    ) -> list[Answer]:
        """An answer or an error for each task, in their order. ``on_answer`` is called after each.

        ``ahead``: tasks of the next call; the engine may begin with them. Raises ScoringFailed when the engine died too
        often.
        """
        found: dict[str, Completion] = {}
        requests = []
        for task, request in zip(tasks, self._requests(tasks), strict=True):
            if task.problem:
                found[task.id] = failed(request, "bad_row", task.problem)
                on_answer()
            else:
                requests.append(request)
        next_ones = [one for task, one in zip(ahead, self._requests(ahead), strict=True) if not task.problem]

        def answer(engine: Engine, some: Sequence[Request]) -> Iterator[Completion]:
            for place, completion in enumerate(engine.answer(some)):
                if not place:
                    engine.prepare(next_ones)  # behind those that are asked
                yield completion

        completions = self._engine.each(
            requests, answer, lambda request, error: failed(request, ENGINE_FAILED, error)
        )
        for completion in completions:
            found[completion.id] = completion
            on_answer()
        return [to_answer(task, found[task.id], self._tokenizer, self._stop_ids) for task in tasks]

    def _requests(self, tasks: Sequence[Task]) -> list[Request]:
        return [
            Request(id=task.id, prompt_ids=task.prompt_ids, sampling=task.sampling or self._sampling)
            for task in tasks
        ]

    def close(self) -> None:
        self._engine.close()
