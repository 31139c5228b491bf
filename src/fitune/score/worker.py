"""Answers to groups of tasks, one group after the other: by an engine of this process, or in a process of its own."""

import gc
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fitune.data.conversations.templates import ChatTemplate
from fitune.errors import FituneError, ScoringFailed, exit_code_of
from fitune.score.asking import Asker
from fitune.score.engines.engine import Engine, listed_stop_ids
from fitune.score.engines.opening import open_engine, open_texts
from fitune.score.plan import ScorePlan
from fitune.score.tasks import Answer, Task

OpenEngine = Callable[[ScorePlan, Any, ChatTemplate], Engine]
"""Opens the engine of a plan, beside its tokenizer and template."""


def open_asker(
    plan: ScorePlan, tokenizer: Any, template: ChatTemplate, *, weighed_by: str = "", opens: OpenEngine = open_engine
) -> Asker:  # fmt: skip
    """Asks the engine of ``plan``, which is opened with the first tasks, to write answers; to weigh given ones where
    the graders ``weighed_by`` want that."""
    return Asker(
        lambda: opens(plan, tokenizer, template), decode=template.decode, sampling=plan.sampling,
        stop_ids=template.stop_ids | listed_stop_ids(plan.model), weighed_by=weighed_by,
    )  # fmt: skip


class ScoringWorker:
    """Opens the engine of ``plan`` with its first group, on ``threads`` threads."""

    def __init__(
        self, plan: ScorePlan, folder: str, environment: Mapping[str, str], threads: int, weighed_by: str
    ) -> None:
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)  # paths of the plan begin there
        torch.set_num_threads(threads)
        self._plan, self._weighed_by = plan, weighed_by
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
                self._asker = open_asker(self._plan, *open_texts(self._plan), weighed_by=self._weighed_by)
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
