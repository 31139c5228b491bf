"""Tasks to answers through an engine: one row that fails fails alone."""

import gc
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fitune.data.conversations.templates import ChatTemplate
from fitune.errors import FituneError, ScoringFailed, exit_code_of
from fitune.score.engines.engine import (
    Completion,
    Continuation,
    Engine,
    EngineDied,
    Likelihood,
    Request,
    failed,
)
from fitune.score.engines.opening import open_engine, open_texts, stop_ids_of
from fitune.score.plan import ScorePlan
from fitune.score.tasks import Answer, Task, to_answer

_FAULTS = (RuntimeError, ValueError, IndexError, KeyError)
"""Errors that an engine raises for a row that it cannot answer."""
ENGINE_FAILED = "engine_failed"
"""Code of the error of such a row."""

OpenEngine = Callable[[ScorePlan, Any, ChatTemplate], Engine]
"""Opens the engine of a plan, beside its tokenizer and template."""
Call = Callable[[Engine, Any], Iterator[Any]]
"""Asks an engine for the Completions or Likelihoods of some rows."""


class Restarted:
    """An engine that is opened when it is first asked, and again when it died, at most three times in all."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._open = open_engine
        self._engine: Engine | None = None
        self._restarts = 3

    def each(self, asked: Sequence[Any], call: Call) -> Iterator[Any]:
        """A Completion for each request, a Likelihood for each continuation; those that a dead engine left are asked of
        a new one.

        Raises ScoringFailed when the engine died too often.
        """
        left: dict[str, Any] = {one.id: one for one in asked}
        while left:
            try:
                for found in self._some(list(left.values()), call):
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
        """Closes the engine that is open, if one is; the next question would open another."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _some(self, asked: Sequence[Any], call: Call) -> Iterator[Any]:
        """All together; where that raises, those that are left one by one, so that only the row that fails fails."""
        if self._engine is None:
            self._engine = self._open()
        engine, left = self._engine, {one.id: one for one in asked}
        try:
            for found in call(engine, asked):
                del left[found.id]
                yield found
        except _FAULTS:
            for one in left.values():
                try:
                    answers = list(call(engine, [one]))  # to its end, where an engine may say that it is done
                except _FAULTS as fault:
                    answers = [failed(one, ENGINE_FAILED, f"{type(fault).__name__}: {fault}"[:500])]
                yield from answers


class Asker:
    """Asks the engine of ``plan``, which is opened with the first tasks, to write answers, or to tell
    the log-likelihoods of those that the tasks give."""

    def __init__(
        self, plan: ScorePlan, tokenizer: Any, template: ChatTemplate, *,
        opens: OpenEngine = open_engine,
    ) -> None:  # fmt: skip
        self._engine = Restarted(lambda: opens(plan, tokenizer, template))
        self._decode, self._sampling = template.decode, plan.sampling
        self._stop_ids = stop_ids_of(plan, template)

    def ask(
        self,
        tasks: Sequence[Task],
        *,
        on_answer: Callable[[], None] = lambda: None,
        ahead: Sequence[Task] = (),
    ) -> list[Answer]:
        """An answer or an error for each task, in their order. ``on_answer`` is called after each.

        ``ahead``: tasks of the next call; an engine that writes may begin with them. Raises ScoringFailed when the
        engine died too often.
        """
        for task in tasks:
            if task.problem:
                on_answer()
        if any(task.given for task in tasks):
            return self._loglikelihoods(tasks, on_answer)
        next_ones = self._requests(ahead)
        found: dict[str, Completion] = {}
        for completion in self._engine.each(
            self._requests(tasks), lambda engine, some: engine.answer(some, ahead=next_ones)
        ):
            found[completion.id] = completion
            on_answer()
        return [to_answer(task, found.get(task.id), self._decode, self._stop_ids) for task in tasks]

    def close(self) -> None:
        """Frees the engine. It may be called twice."""
        self._engine.close()

    def _requests(self, tasks: Sequence[Task]) -> list[Request]:
        return [
            Request(id=task.id, prompt_ids=task.prompt_ids, sampling=task.sampling or self._sampling)
            for task in tasks
            if not task.problem
        ]

    def _loglikelihoods(self, tasks: Sequence[Task], on_answer: Callable[[], None]) -> list[Answer]:
        asked = [
            Continuation(id=f"{number} {task.id}", prompt_ids=task.prompt_ids, token_ids=given.token_ids)
            for task in tasks
            for number, given in enumerate(task.given)
        ]
        left = Counter(one.id.partition(" ")[2] for one in asked)
        found: dict[str, Likelihood] = {}
        for likelihood in self._engine.each(asked, lambda engine, some: engine.loglikelihoods(some)):
            found[likelihood.id] = likelihood
            task_id = likelihood.id.partition(" ")[2]
            left[task_id] -= 1
            if not left[task_id]:
                on_answer()
        answers = []
        for task in tasks:
            likelihoods = tuple(found[f"{number} {task.id}"] for number in range(len(task.given)))
            fault = next((one for one in likelihoods if one.error), Likelihood(id=""))
            code, error = ("bad_row", task.problem) if task.problem else (fault.code, fault.error)
            answers.append(
                Answer(
                    task=task, text="", finish_reason="error" if error else "stop", completion_tokens=0, code=code,
                    error=error, likelihoods=() if error else likelihoods,
                )
            )  # fmt: skip
        return answers


class ScoringWorker:
    """Opens the engine of ``plan`` with its first group, on ``threads`` threads."""

    def __init__(self, plan: ScorePlan, folder: str, environment: Mapping[str, str], threads: int) -> None:
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)  # paths of the plan begin there
        torch.set_num_threads(threads)
        self._plan = plan
        self._asker: Asker | None = None
        self._done = 0

    def hello(self) -> str:
        """Where it runs, for the log."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def work(self, tasks: Sequence[Task], ahead: Sequence[Task] | None) -> list[Answer]:
        """An answer for each task; the engine may begin with those ``ahead``.

        Raises ScoringFailed with the words and the exit code of whatever error of fitune's it met."""
        self._done = 0
        is_first = self._asker is None
        try:
            if self._asker is None:
                self._asker = Asker(self._plan, *open_texts(self._plan))
            answers = self._asker.ask(tasks, on_answer=self._count, ahead=ahead or ())
            if is_first:
                gc.freeze()  # libraries and model stay: to look for garbage there takes 0.3 s each time
            return answers
        except FituneError as error:
            told = ScoringFailed(error.message, hint=error.hint)  # it travels: others have other arguments
            told.exit_code = exit_code_of(error)
            raise told from None

    def done(self) -> int:
        """Tasks answered of the group at work."""
        return self._done

    def _count(self) -> None:
        self._done += 1
