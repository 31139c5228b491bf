"""Patience with a store: how long an answer is waited for, and how a store that fell silent is told from a slow one.

Clients try so often, with a minute for each try, that nobody would wait for them.
"""

import ftplib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from fitune.errors import FituneError
from fitune.stores.opening import look_at

T = TypeVar("T")

ANSWER_S = 30.0
"""Seconds that a store has for its first answer, whatever its client tries."""
SILENT_S = 90.0
"""Seconds without a part or an answer after which a store that answered before is asked a short question. Without an
answer to it within ANSWER_S, two minutes after the last sign of life, the store is given up."""
STUCK_S = 600.0
"""Seconds without a part or an answer after which a store is given up that still answers the short question."""


class Patience:
    """Patience with one store. Several threads may ask it for answers: a sign of life to one of them counts for all."""

    def __init__(self, url: str, *, probe: Callable[[], object], error: type[FituneError]) -> None:
        """``probe`` asks the store a short question, in a thread of its own. ``error`` is raised for silence."""
        self._url, self._probe, self._error = url, probe, error
        self._moved = self._heard = time.monotonic()
        self.has_answered = False
        """False before the first answer, and after the store fell silent."""

    def heard(self) -> None:
        """The store took or gave a part, or answered."""
        self._moved = self._heard = time.monotonic()

    def answer(self, url: str, ask: Callable[[], T], *, so_far: Callable[[], str]) -> T:
        """The result of ``ask``; the thread that asks a silent store is left alone. ``so_far`` says in words what was
        done until the store fell silent."""
        is_first = not self.has_answered
        result = in_time(url, ask, error=self._error) if is_first else self._while_heard(url, ask, so_far)
        self.has_answered = True
        self.heard()
        return result

    def _while_heard(self, url: str, ask: Callable[[], T], so_far: Callable[[], str]) -> T:
        """The result of ``ask``: its client alone would try for a quarter of an hour, and for ever where the other end
        takes no bytes."""
        self.heard()
        answer = _asked_beside(ask)
        while not wait([answer], timeout=SILENT_S / 20).done:
            now = time.monotonic()
            if now - self._heard < SILENT_S:
                continue
            if now - self._moved > STUCK_S or not self._is_alive():
                self.has_answered = False
                raise self._error(
                    f"{url}: nothing was heard of the store for {time.monotonic() - self._moved:.0f} s, {so_far()}",
                    hint=look_at(url),
                )
            self._heard = time.monotonic()
        return answer.result()

    def _is_alive(self) -> bool:
        """True if the store answers a short question now: on a slow link a part alone may take minutes."""
        try:
            in_time(self._url, self._probe, error=self._error)
        except (FileNotFoundError, PermissionError, ftplib.error_perm):
            pass
        except Exception:  # clients have no error in common; any but those above is no answer
            return False
        return True


def in_time(url: str, ask: Callable[[], T], *, error: type[FituneError]) -> T:
    """The result of a first, short question to a store. Raises ``error`` when no answer comes within ANSWER_S.

    The thread that asks is left alone then.
    """
    answer = _asked_beside(ask)
    if not wait([answer], timeout=ANSWER_S).done:
        raise error(f"{url}: the store did not answer within {ANSWER_S:g} s", hint=look_at(url))
    return answer.result()


def _asked_beside(ask: Callable[[], T]) -> Future[T]:
    """The result to come of ``ask``, which runs in a thread that nobody has to wait for, not even at exit."""
    answer: Future[T] = Future()

    def run() -> None:
        """Puts the result of ``ask`` into ``answer``, or what it raised."""
        try:
            answer.set_result(ask())
        except BaseException as problem:  # raised where the answer is waited for
            answer.set_exception(problem)

    threading.Thread(target=run, name="store", daemon=True).start()
    return answer
