"""Tasks to answers through an engine: one row that fails fails alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fitune.errors import ScoringFailed
from fitune.score.engine import Completion, Engine, EngineDied, Request, Sampling, failed
from fitune.score.tasks import Answer, Task, to_answer


class Asker:
    """Asks an engine; ``reopen`` starts it again when it died, at most ``restarts`` times in all."""

    def __init__(
        self, open_engine: Callable[[], Engine], tokenizer: Any, *, sampling: Sampling, stop_ids: frozenset[int],
        restarts: int = 3,
    ) -> None:  # fmt: skip
        self._open = open_engine
        self._engine: Engine | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._restarts = restarts

    def ask(self, tasks: Sequence[Task], *, on_answer: Callable[[], None]) -> list[Answer]:
        """An answer or an error for each task, in their order. ``on_answer`` is called after each.

        Raises ScoringFailed when the engine died too often, or failed for every row.
        """
        found: dict[str, Completion] = {}
        requests = []
        for task in tasks:
            request = Request(
                id=task.id, prompt_ids=task.prompt_ids, sampling=task.sampling or self._sampling
            )
            if task.problem:
                found[task.id] = failed(request, "bad_row", task.problem)
                on_answer()
            else:
                requests.append(request)
        for completion in self._complete(requests):
            found[completion.id] = completion
            on_answer()
        return [to_answer(task, found[task.id], self._tokenizer, self._stop_ids) for task in tasks]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _complete(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Each request once; those that a dead engine left are asked of a new one."""
        left = {request.id: request for request in requests}
        while left:
            try:
                for completion in self._answered(list(left.values())):
                    del left[completion.id]
                    yield completion
                if left:
                    raise EngineDied(f"it returned nothing for {len(left)} rows")
            except EngineDied as death:
                self.close()
                if not self._restarts:
                    raise ScoringFailed(
                        f"the engine died: {death}",
                        hint="start again: rows that have an answer keep it",
                    ) from None
                self._restarts -= 1

    def _answered(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """All together; where that raises, those that are left one by one, so that only the row that fails fails."""
        if self._engine is None:
            self._engine = self._open()
        left = {request.id: request for request in requests}
        try:
            for completion in self._engine.answer(requests):
                del left[completion.id]
                yield completion
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            yield from self._one_by_one(list(left.values()), error)

    def _one_by_one(self, requests: Sequence[Request], error: Exception) -> Iterator[Completion]:
        assert self._engine is not None
        has_answer = False
        for request in requests:
            try:
                completion = next(iter(self._engine.answer([request])))
                has_answer = True
            except (RuntimeError, ValueError, IndexError, KeyError) as fault:
                if len(requests) > 1 and not has_answer and request is requests[-1]:
                    raise ScoringFailed(f"the engine fails for every row: {fault}") from error
                completion = failed(request, "engine_failed", f"{type(fault).__name__}: {fault}"[:500])
            yield completion
