"""A tracker in a process of its own: its library neither slows the steps nor prints, and may hang or die.

Requests and answers are JSON; what the library prints goes to the log. When the run is gone without a word, the process
ends what it has begun and follows.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitune.child import requests
from fitune.credentials import without_credentials
from fitune.track.trackers import KILLED, Beginning, End, Tracker
from fitune.values.reports import StepReport
from fitune.values.serial import from_data, parse_object, to_data

_LONELY_SECONDS = 60.0
"""Longest time a tracker may take for the end of a run that is gone."""
_LONGEST_CAUSE = 300


def main() -> None:
    """Answer the requests of the parent with the tracker that the second argument names, until they end."""
    tracker: Tracker | None = None
    has_begun = False
    for connection, message in requests(sys.argv, lonely_s=_LONELY_SECONDS):
        request = parse_object(message)
        try:
            if tracker is None:
                module, _, attribute = sys.argv[2].partition(":")
                tracker = getattr(importlib.import_module(module), attribute)()
            connection.send_bytes(json.dumps({"answer": _answer(tracker, request)}).encode())
        except Exception as error:  # whatever a library raises is the end of its tracker, not of the run
            traceback.print_exc()
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            with contextlib.suppress(OSError):
                told = {"error": without_credentials(cause)[:_LONGEST_CAUSE]}
                connection.send_bytes(json.dumps(told).encode())
            sys.stderr.flush()
            os._exit(1)  # a library's own threads may hang
        has_begun = "finish" not in request
    if tracker and has_begun:
        tracker.finish(KILLED)


def _answer(tracker: Tracker, request: dict[str, Any]) -> Any:
    match request:
        case {"start": data}:
            return to_data(tracker.start(from_data(Beginning, data)))
        case {"steps": data}:
            return tracker.steps([from_data(StepReport, step) for step in data])
        case {"finish": data}:
            end = from_data(End, data)
            with tempfile.TemporaryDirectory() as folder:  # copies in which passwords and tokens are hidden
                copies = []
                for file in map(Path, end.files):
                    copies.append(copy := Path(folder) / file.name)
                    copy.write_text(without_credentials(file.read_text(encoding="utf-8")), encoding="utf-8")
                return to_data(tracker.finish(replace(end, files=tuple(map(str, copies)))))
    raise ValueError(f"unknown request {sorted(request)}")


if __name__ == "__main__":
    main()
