"""A run as its directory shows it, also from another process while it trains: then its page is written again and
again until it has ended."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fitune.checkpoint.commit import last_saved
from fitune.report.page import write_page
from fitune.report.run_files import RunFiles, read_run
from fitune.report.run_page import page_of
from fitune.report.under_way import Sign, UnderWay, state_line
from fitune.session.signals import quiet_stop
from fitune.spec.rank_status import read_statuses, status_of
from fitune.spec.run_directory import LOCK, LOGS
from fitune.spec.run_lock import owners_of
from fitune.track.metrics import GrowingSteps

Tell = Callable[[str], None]

_LOOK_SECONDS = 1.0
_SHARE = 0.05
"""Share of one core that watching may take: the page of a long run is written less often."""
_SIGNS = ("metrics.jsonl", "estimate.json", "plan.json", LOCK)


class RunView:
    """A run directory that is looked at once or many times; only what is new of metrics.jsonl is read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._steps = GrowingSteps(directory / "metrics.jsonl")

    @property
    def is_alive(self) -> bool:
        """True while a process that owns the directory lives."""
        return any(owner.is_alive for owner in owners_of(self.directory))

    @property
    def has_ended(self) -> bool:
        """True if the run said how it ended and nobody goes on with it."""
        return (self.directory / "report.json").is_file() and not self.is_alive

    def look(self) -> tuple[RunFiles, UnderWay | None]:
        """All that the files say now; the second is None for a run with a report. Raises RunDirectoryError."""
        files = read_run(self.directory, steps=())  # that no link stands there is known from here on
        self._steps.look()
        files = replace(files, steps=tuple(self._steps.steps))
        return files, None if files.run is not None else self._under_way(files)

    def _under_way(self, files: RunFiles) -> UnderWay:
        now = time.time()
        last = files.steps[-1] if files.steps else None
        # the first step warms up
        recent = [one.step_seconds + one.data_seconds for one in files.steps[1:][-50:] or files.steps]
        saved = last_saved(self.directory)
        logs = self.directory / LOGS
        signs = tuple(
            Sign(status=status, seconds=_age(logs / status_of(rank), now))
            for rank, status in sorted(read_statuses(logs).items())
        )
        ages = [_age(self.directory / name, now) for name in _SIGNS]
        return UnderWay(
            at=now,
            owners=owners_of(self.directory),
            last_sign_s=min([*ages, *(sign.seconds for sign in signs)]),
            step=last.step if last else 0,
            total_steps=last.total_steps if last else 0,
            remaining_s=max(last.total_steps - last.step, 0) * sum(recent) / len(recent) if last else 0.0,
            saved_step=saved.step if saved else None,
            signs=signs,
        )


def watch_run(directory: Path, *, tell: Tell, every_s: float, sure_s: float = 10.0) -> bool:
    """Write report.html every few seconds until the run in ``directory`` has ended; False if a signal came before that.

    A run without a report and without an owner for ``sure_s`` seconds has ended: it was killed, and nobody took it
    over. Where there is no directory yet it is waited for. Raises RunDirectoryError where another thing is there.
    """
    view, told, idle_s = RunView(directory), False, 0.0
    look_s = min(every_s, _LOOK_SECONDS)
    with quiet_stop() as stopped:
        if not _has_begun(view):
            tell(f"waiting for a run to begin in {directory}; Ctrl-C ends this")
        while not _has_begun(view):
            if stopped.wait(look_s):
                return False
        while True:
            began, wrote = time.process_time(), time.monotonic()
            line = _write(view, refresh_s=max(1, round(every_s)))
            if line and not told:
                tell(f"{directory / 'report.html'} follows the run until it ends; Ctrl-C ends this\n{line}")
                told = True
            pause = max(every_s, (time.process_time() - began) / _SHARE)
            while time.monotonic() - wrote < pause:
                if view.has_ended or idle_s >= sure_s:
                    return True
                if stopped.wait(look_s):
                    return False
                idle_s = 0.0 if view.is_alive else idle_s + look_s


def _has_begun(view: RunView) -> bool:
    """True once anything is there but a lock that nobody holds."""
    folder = view.directory
    if not folder.is_dir():
        return folder.exists()
    return view.is_alive or any(file.name != LOCK for file in folder.iterdir())


def _write(view: RunView, *, refresh_s: int) -> str:
    """Write the page; returns the state of the run in a line, empty while its owner has written no plan yet."""
    if view.is_alive and not (view.directory / "plan.json").exists():
        return ""
    files, under_way = view.look()
    write_page(view.directory / "report.html", page_of(files, under_way, refresh_s=refresh_s))
    return "" if under_way is None else state_line(under_way)


def _age(file: Path, now: float) -> float:
    """Seconds since the file was written; of the present second where a clock is ahead; infinite where it is not."""
    try:
        return max(0.0, now - file.lstat().st_mtime)
    except OSError:
        return float("inf")
