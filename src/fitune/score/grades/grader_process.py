"""Graders that may raise or hang, in a process beside this one: a pattern, a schema, a function by path.

Each grade has a time limit. What raises or takes longer is an error of its row; a process that hangs is ended, and the
next row gets a new one.
"""

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitune.data.children import Child, ChildEnded, requests

LIMIT_S = 10.0
"""Seconds for one grade."""
_START_S = 60.0
"""Seconds for a process to start and load the function; on a busy machine an import takes many."""


class GradeFailed(Exception):
    """The grader gave no grade for a row; its text says why."""


class _TooLong(Exception):
    """No OSError, as TimeoutError would be: that means that the process is gone."""


class GuardedGrader:
    """Calls a grader of ``kind`` (regex, json_schema, python) with ``argument`` in a process of its own."""

    def __init__(self, kind: str, argument: str, *, limit_s: float = LIMIT_S) -> None:
        self._settings = {"kind": kind, "argument": argument}
        self._limit_s = limit_s
        self._child: Child | None = None
        self._until = 0.0

    def grade(self, *, answer: str, expected: str | None, prompt: str) -> float:
        """Raises GradeFailed."""
        self.start()
        found = self._ask({"answer": answer, "expected": expected, "prompt": prompt}, self._limit_s)
        return float(found["grade"])

    def start(self) -> None:
        """Start the process unless it runs. Raises GradeFailed when the grader cannot be loaded."""
        if self._child is None:
            self._child = Child("fitune.score.grades.grader_process", beat=self._beat)
            self._ask(self._settings, _START_S)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._child is not None
        self._until = time.monotonic() + limit_s
        try:
            self._child.send(json.dumps(message).encode())
            found: dict[str, Any] = json.loads(self._child.receive())
        except _TooLong:
            self.close()
            raise GradeFailed(f"the grader took longer than {limit_s:g} s") from None
        except ChildEnded as ended:
            self._child = None
            raise GradeFailed(f"the grader's process ended: {ended.how}") from None
        if "error" in found:
            raise GradeFailed(found["error"])
        return found

    def _beat(self) -> None:
        if time.monotonic() > self._until:
            raise _TooLong


def main() -> None:
    """Loads the grader that the first request names, then answers one request after the other with a grade or an
    error."""
    grade: Callable[..., Any] | None = None
    for connection, message in requests(sys.argv):
        asked = json.loads(message)
        found: dict[str, Any] = {}
        try:
            if grade is None:
                grade = _loaded(**asked)
            else:
                found = {"grade": _finite(grade(**asked))}
        except Exception as error:  # whatever somebody's function raises is an error of the row
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        connection.send_bytes(json.dumps(found).encode())


def _loaded(*, kind: str, argument: str) -> Callable[..., Any]:
    from fitune.score.grades.graders import json_schema, regex

    if kind == "python":
        return _function(argument)
    grader = {"regex": regex, "json_schema": json_schema}[kind]
    grader("", argument)  # a pattern that is none, a schema that is none, a library that is missing
    return lambda answer, expected, prompt: grader(answer, argument)


def _function(place: str) -> Callable[..., Any]:
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"the function returned {value!r:.40}, not a finite number")
    return float(value)


if __name__ == "__main__":
    main()
