"""Trackers fed beside the steps: a thread each, a queue of bounded length, and an end that is waited for so long only.

A step never waits for a tracker. Steps that find the queue full are lost to this tracker, and counted; metrics.jsonl
has them all. A tracker that fails begins again after a pause, a few times, and is left out then.
"""

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fitune.child import Child, ChildEnded
from fitune.credentials import without_credentials
from fitune.track.metrics import to_line
from fitune.track.record import Tracked, log_of, read_tracked, write_tracked
from fitune.track.trackers import Beginning, End, TrackerRow, Where
from fitune.values.plan import Plan
from fitune.values.reports import RunReport, StepReport
from fitune.values.serial import from_data, parse_object, to_data, to_json

MOST_WAITING = 10_000
"""Steps in the queue of one tracker: some 6 MB."""
_MOST_AT_ONCE = 500
_WRITE_S = 10.0
"""Seconds between two writings of the record: a run that is killed has counted what it sent until then."""
PAUSES_S = (5.0, 60.0, 300.0)
"""Before a tracker that failed begins again."""
FLUSH_S = 5.0
"""For the last steps to arrive, before the report says how many did."""
END_S = 30.0
"""For all of the end: a tracker that takes longer is ended."""
UNFINISHED_END_S = 10.0
"""Seconds for all of the end of a run that was stopped or failed: whoever stopped it may not wait long."""


class Trackers:
    """All trackers of a run, as one of its sinks. ``say`` is told lines for people, in the thread of the run."""

    def __init__(
        self, rows: Mapping[str, TrackerRow], directory: Path, *, say: Callable[[str], None]
    ) -> None:
        self._rows, self._directory, self._say, self._end_s = rows, directory, say, END_S
        self._feeds: list[Feed] = []
        self._lock = threading.Lock()
        self._until = 0.0
        self._earlier: tuple[Tracked, ...] = ()

    @property
    def tracked(self) -> tuple[Tracked, ...]:
        """The run so far as each tracker has it; trackers of earlier attempts are among them."""
        now = [feed.tracked for feed in self._feeds]
        named = {one.tracker for one in now}
        return (*now, *(one for one in self._earlier if one.tracker not in named))

    def start(self, plan: Plan, run_name: str) -> None:
        """Begins the feed of every tracker; a run that was tracked before goes on under its old id."""
        self._earlier = read_tracked(self._directory)
        known = {one.tracker: one for one in self._earlier}
        for name, row in self._rows.items():
            before = known.get(name) or Tracked(
                tracker=name, run_id=plan.run.tracking.run_id or uuid.uuid4().hex
            )
            beginning = Beginning(
                run_id=before.run_id,
                is_new=not (before.has_begun or plan.run.tracking.run_id),
                name=run_name,
                tracking=plan.run.tracking,
                directory=str(self._directory.absolute()),
                plan=without_credentials(to_json(plan)),
            )
            self._feeds.append(Feed(row, beginning, replace(before, failure=""), on_change=self._write))
        self._write()
        for feed in self._feeds:
            feed.begin()

    def step(self, report: StepReport) -> None:
        """Hands the line to every tracker without waiting, and says what has become of them."""
        line = to_line(report)
        for feed in self._feeds:
            feed.put(line)
        self._say_news()

    def finish(self, report: RunReport | None) -> None:
        """Wait a moment for the last steps, so that what the report says of the trackers is true."""
        if report is None or report.status != "complete":
            self._end_s = min(self._end_s, UNFINISHED_END_S)
        self._until = time.monotonic() + self._end_s
        until = min(self._until, time.monotonic() + FLUSH_S)
        for feed in self._feeds:
            feed.flush(until)
        self._write()
        self._say_news()

    def close(self, end: End) -> bool:
        """Attach what ``end`` has and end all trackers, within the time that is left; True if one did not take it."""
        until = self._until or time.monotonic() + self._end_s
        for feed in self._feeds:
            feed.end(end)
        for feed in self._feeds:
            feed.join(until, waited_s=self._end_s)
        self._write()
        for feed in self._feeds:
            self._say(feed.tracked.describe())
        return any(feed.tracked.failure for feed in self._feeds)

    def _say_news(self) -> None:
        for feed in self._feeds:
            if news := feed.take_news():
                self._say(f"tracker {feed.tracked.tracker}: {news}")

    def _write(self) -> None:
        with self._lock, suppress(OSError):  # a record that cannot be written is not worth the run
            write_tracked(self._directory, self.tracked)


class _Failed(Exception):
    """The tracker raised; the text says what."""


class Feed:
    """One tracker: its queue, its thread, and what has become of it."""

    def __init__(
        self, row: TrackerRow, beginning: Beginning, before: Tracked, *, on_change: Callable[[], None]
    ) -> None:
        self._row, self._beginning, self._before = row, beginning, before
        self._on_change, self._pauses_s = on_change, list(PAUSES_S)
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._end: End | None = None
        self._told = self._sent = 0
        self._is_over = False
        self._news = ""
        self._child: Child | None = None
        self._state = before
        self._thread = threading.Thread(target=self._feed, name=before.tracker, daemon=True)

    @property
    def tracked(self) -> Tracked:
        """Its record: steps sent and lost, those of earlier attempts included."""
        unsent = self._told - self._sent if self._is_over else self._told - self._sent - len(self._waiting)
        return replace(
            self._state, sent=self._before.sent + self._sent, lost=self._before.lost + max(0, unsent)
        )

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queues a line of metrics.jsonl; counts it as lost where the queue is full or the tracker has ended."""
        with self._changed:
            self._told += 1
            if not self._is_over and len(self._waiting) < MOST_WAITING:
                self._waiting.append(line)
                self._changed.notify_all()

    def take_news(self) -> str:
        """The latest news for people, given once; empty where there is none."""
        news, self._news = self._news, ""
        return news

    def flush(self, until: float) -> None:
        """Wait until nothing waits, at most until then."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or not self._waiting, timeout=max(0.0, until - time.monotonic())
            )

    def end(self, end: End) -> None:
        """Ends the tracker with ``end`` once its queue is empty; does not wait (``join``)."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def join(self, until: float, *, waited_s: float) -> None:
        """Wait for the end, at most until then; a tracker that is late is ended."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._state = replace(self._state, failure=f"no answer within {waited_s:g} s of the run's end")
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            if self._child is not None:
                self._child.kill()
            self._thread.join(1.0)

    def _feed(self) -> None:
        while not self._is_over:
            try:
                self._attempt()
                failure = ""
            except ChildEnded as ended:
                failure = f"its process ended ({ended.how})"
            except (_Failed, OSError) as error:
                failure = str(error)
            if self._is_over:  # given up meanwhile, and that is the cause
                return
            self._state = replace(self._state, failure=failure)
            is_over = not failure or not self._pauses_s or self._end is not None
            if failure:
                next_time = (
                    "is left out from here on" if is_over else f"begins again in {self._pauses_s[0]:g} s"
                )
                self._news = f"failed: {failure}; it {next_time}"
            self._is_over = is_over
            self._on_change()
            with self._changed:
                self._changed.notify_all()
                if not self._is_over:
                    self._changed.wait_for(
                        lambda: self._end is not None or self._is_over, timeout=self._pauses_s.pop(0)
                    )

    def _attempt(self) -> None:
        """Tells one process all, from the beginning to the end. Raises _Failed, ChildEnded, OSError."""
        state = self._state
        log = log_of(Path(self._beginning.directory), state.tracker)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as said:
            row = self._row
            self._child = Child("fitune.track.process", row.tracker, environment=row.environment, log=said)
        try:
            is_new = self._beginning.is_new and not state.has_begun
            self._ask_where("start", replace(self._beginning, run_id=state.run_id, is_new=is_new))
            self._news = self._state.link or self._state.note
            written = time.monotonic()
            while batch := self._next():
                self._ask("steps", b"[" + b",".join(line.rstrip() for line in batch) + b"]")
                with self._changed:
                    self._sent += len(batch)
                    for _ in batch:
                        self._waiting.popleft()
                    self._changed.notify_all()
                if time.monotonic() > written + _WRITE_S:
                    self._on_change()
                    written = time.monotonic()
            assert self._end is not None, "only the end ends the batches"
            self._ask_where("finish", self._end)
        finally:
            self._child.close()

    def _ask(self, what: str, told: bytes) -> Any:
        """The answer to a request, which is waited for; ``kill`` from another thread ends the wait."""
        assert self._child is not None
        self._child.send(b'{"%s": %s}' % (what.encode(), told))
        answer = parse_object(self._child.receive())
        if "error" in answer:
            raise _Failed(answer["error"])
        return answer["answer"]

    def _ask_where(self, what: str, told: Beginning | End) -> None:
        """Ask for the run's place in the tracker, and keep it."""
        where = from_data(Where, self._ask(what, json.dumps(to_data(told)).encode()))
        self._state = replace(
            self._state, run_id=where.run_id, has_begun=True, link=where.link, command=where.command, note=where.note,
            failure="",
        )  # fmt: skip
        self._on_change()

    def _next(self) -> list[bytes]:
        """The next steps, which stay in the queue until the tracker has them; none at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._end is not None)
            return list(islice(self._waiting, _MOST_AT_ONCE))
