"""A tracker in a process of its own: its library neither slows the steps nor prints, and may hang or die.

A request is a line of JSON on standard input, its answer one on standard output; what the library prints goes to the
log. When the run is gone without a word, the process ends what it has begun and follows.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fitune
from fitune.credentials import without_credentials
from fitune.spec.reports import StepReport
from fitune.spec.serial import from_data, parse_object, to_data
from fitune.track.protocol import KILLED, Beginning, End, Tracker, Where
from fitune.track.record import log_of
from fitune.track.trackers import Row

_LONELY_SECONDS = 60.0
"""Longest time a tracker may take for the end of a run that is gone."""
_LONGEST_CAUSE = 300


class TrackerFailed(Exception):
    """The tracker's process raised, or is gone; the text says why."""


class TrackerProcess:
    """The parent's end. Every call waits for its answer; ``kill`` from another thread ends the wait."""

    def __init__(self, name: str, row: Row, directory: Path) -> None:
        log = log_of(directory, name)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, row.tracker], env=_environment(row),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def start(self, beginning: Beginning) -> Where:
        return from_data(Where, self._ask("start", json.dumps(to_data(beginning)).encode()))

    def steps(self, lines: list[bytes]) -> None:
        """``lines``: as metrics.jsonl has them."""
        self._ask("steps", b"[" + b",".join(line.rstrip() for line in lines) + b"]")

    def finish(self, end: End) -> Where:
        return from_data(Where, self._ask("finish", json.dumps(to_data(end)).encode()))

    def kill(self) -> None:
        """End the process and all that its library started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give the process up: killed, unless it has ended by itself."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                _open(pipe).close()
        self._process.wait()

    def _ask(self, what: str, told: bytes) -> Any:
        """The answer to a request. Raises TrackerFailed."""
        try:
            pipe = _open(self._process.stdin)
            pipe.write(b'{"%s": %s}\n' % (what.encode(), told))
            pipe.flush()
            line = _open(self._process.stdout).readline()
            answer = parse_object(line)
        except (OSError, ValueError):
            raise TrackerFailed(f"its process ended ({_status(self._process)})") from None
        if "error" in answer:
            raise TrackerFailed(answer["error"])
        return answer["answer"]


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "both pipes were asked for"
    return pipe


def _status(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=10.0)
    except subprocess.TimeoutExpired:
        return "its pipe is closed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _environment(row: Row) -> dict[str, str]:
    paths = [str(Path(fitune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**row.environment, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> None:
    """Answer the requests on standard input with the tracker that the first argument names, until they end."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = _requests()
    try:
        tracker = _loaded(sys.argv[1])
        for request in requests:
            answers.write(json.dumps({"answer": _answer(tracker, request)}).encode() + b"\n")
            answers.flush()
    except Exception as error:  # whatever a library raises is the end of its tracker, not of the run
        traceback.print_exc()
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):
            answers.write(json.dumps({"error": without_credentials(cause)[:_LONGEST_CAUSE]}).encode() + b"\n")
            answers.flush()
        sys.stderr.flush()
        os._exit(1)  # a library's own threads may hang


def _loaded(name: str) -> Tracker:
    module, _, attribute = name.partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), attribute)()
    return tracker


def _answer(tracker: Tracker, request: dict[str, Any]) -> Any:
    match request:
        case {"start": data}:
            return to_data(tracker.start(from_data(Beginning, data)))
        case {"steps": data}:
            return tracker.steps([from_data(StepReport, step) for step in data])
        case {"finish": data}:
            return to_data(_finished(tracker, from_data(End, data)))
    raise ValueError(f"unknown request {sorted(request)}")


def _finished(tracker: Tracker, end: End) -> Where:
    """Attach copies of the files in which passwords and tokens are hidden."""
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for file in map(Path, end.files):
            copy = Path(folder) / file.name
            copy.write_text(without_credentials(file.read_text(encoding="utf-8")), encoding="utf-8")
            copies.append(str(copy))
        return tracker.finish(
            End(status=end.status, figures=end.figures, table=end.table, files=tuple(copies))
        )


def _requests() -> Iterator[dict[str, Any]]:
    """Requests in their order; when the run is gone before it said its end, one that ends what has begun.

    A thread reads them, so that a tracker that hangs does not outlive the run for long.
    """
    received: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            received.put(parse_object(line))
        watchdog = threading.Timer(_LONELY_SECONDS, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
        received.put(None)

    threading.Thread(target=read, daemon=True).start()
    has_begun = False
    while (request := received.get()) is not None:
        yield request
        has_begun = "finish" not in request
    if has_begun:
        yield {"finish": to_data(KILLED)}


if __name__ == "__main__":
    main()
