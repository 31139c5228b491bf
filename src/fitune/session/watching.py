"""A run as its directory shows it, also from another process while it trains: then its page is written again and
again until it has ended. And the page of a folder's runs: a table with live curves, and the report of each run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from fitune.checkpoint.commit import last_saved
from fitune.errors import FituneError, RunDirectoryError
from fitune.report.local_pages import curve_of, run_refused_html, runs_html, runs_table_html
from fitune.report.page import write_page
from fitune.report.run_files import RunFiles, read_run
from fitune.report.run_page import page_of
from fitune.report.run_words import UnderWay, state_line
from fitune.session.signals import quiet_stop
from fitune.track.metrics import GrowingSteps
from fitune.units import format_bytes, format_number, format_rate, format_seconds
from fitune.values.rank_status import read_statuses, status_of
from fitune.values.reports import STOPPED_IN_EXPORT
from fitune.values.run_directory import LOCK, LOGS
from fitune.values.run_lock import owners_of
from fitune.values.words import method_name

Log = Callable[[str], None]

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
        is_exporting = files.run is not None and files.run.reason == STOPPED_IN_EXPORT and self.is_alive
        files = replace(files, steps=tuple(self._steps.steps), run=None if is_exporting else files.run)
        return files, None if files.run is not None else self._under_way(files)

    def _under_way(self, files: RunFiles) -> UnderWay:
        now = time.time()
        last = files.steps[-1] if files.steps else None
        # the first step warms up
        recent = [one.step_seconds + one.data_seconds for one in files.steps[1:][-50:] or files.steps]
        saved = last_saved(self.directory)
        logs = self.directory / LOGS
        signs = tuple(
            (status, _age(logs / status_of(rank), now))
            for rank, status in sorted(read_statuses(logs).items())
        )
        ages = [_age(self.directory / name, now) for name in _SIGNS]
        return UnderWay(
            at=now,
            owners=owners_of(self.directory),
            last_sign_s=min([*ages, *(seconds for _, seconds in signs)]),
            step=last.step if last else 0,
            total_steps=last.total_steps if last else 0,
            remaining_s=max(last.total_steps - last.step, 0) * sum(recent) / len(recent) if last else 0.0,
            saved_step=saved.step if saved else None,
            signs=signs,
        )


def watch_run(directory: Path, *, log: Log, every_s: float, sure_s: float = 10.0) -> bool:
    """Write report.html every few seconds until the run in ``directory`` has ended; False if a signal came before that.

    A run without a report and without an owner for ``sure_s`` seconds has ended: it was killed, and nobody took it
    over. Where there is no directory yet it is waited for. Raises RunDirectoryError where another thing is there.
    """
    view, told, idle_s = RunView(directory), False, 0.0
    look_s = min(every_s, _LOOK_SECONDS)
    with quiet_stop() as stopped:
        if not _has_begun(view):
            log(f"waiting for a run to begin in {directory}; Ctrl-C ends this")
        while not _has_begun(view):
            if stopped.wait(look_s):
                return False
        while True:
            began, wrote = time.process_time(), time.monotonic()
            line = _write(view, refresh_s=max(1, round(every_s)))
            if line and not told:
                log(f"{directory / 'report.html'} follows the run until it ends; Ctrl-C ends this\n{line}")
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


MOST_RUNS = 200
"""The newest ones: a page of more is no table that anybody reads."""
REFRESH_SECONDS = 5


class RunsFolder:
    """The runs of one folder, looked at again and again; of their metrics only what is new is read."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RunDirectoryError(
                f"--runs {folder}: no such folder", hint="a folder that holds output_dirs of runs"
            )
        self.folder = folder
        self._views: dict[str, RunView] = {}

    def page(self, question: Mapping[str, str]) -> str:
        """HTML of the whole page; what is asked does not matter."""
        return runs_html(
            title=f"fitune: runs in {self.folder}", folder=str(self.folder), table=self.table(question)
        )

    def table(self, question: Mapping[str, str]) -> str:
        """HTML of the table as the files are now."""
        return runs_table_html(
            rows=[_row(name, view) for name, view in self._found().items()], folder=str(self.folder)
        )

    def run(self, question: Mapping[str, str]) -> str:
        """The report of the run ``name``, which must be one of the table: no other path is read. Raises nothing."""
        name = question.get("name", "")
        view = self._found().get(name)
        if view is None:
            return run_refused_html(why=f"{self.folder} has no run {name!r}")
        try:
            files, under_way = view.look()
        except FituneError as error:
            return run_refused_html(why=str(error))
        return page_of(files, under_way, refresh_s=REFRESH_SECONDS if under_way and under_way.is_alive else 0)

    def _found(self) -> dict[str, RunView]:
        """Folders with a plan.json, and the folder itself if it has one; the one that wrote last is first."""
        try:
            inside = [self.folder, *(one for one in self.folder.iterdir() if not one.is_symlink())]
            runs = [one for one in inside if (one / "plan.json").is_file()]
        except OSError as error:
            raise RunDirectoryError(f"{self.folder}: cannot be read: {error.strerror or error}") from None
        now, written = time.time(), ("report.json", "metrics.jsonl", "plan.json")
        found = sorted(runs, key=lambda one: min(_age(one / name, now) for name in written))
        names = {one.name if one != self.folder else ".": one for one in islice(found, MOST_RUNS)}
        self._views = {name: self._views.get(name) or RunView(one) for name, one in names.items()}
        return self._views


def _row(name: str, view: RunView) -> dict[str, Any]:
    """Words of one run; of one whose files are damaged, what is wrong."""
    try:
        files, under_way = view.look()
    except FituneError as error:
        return {"name": name, "error": str(error)}
    row = {"name": name, "error": "", **_figures(files)}
    if (report := files.run) is not None:
        said = f"{report.steps:,} of {report.total_steps:,} steps in {format_seconds(report.seconds)}"
        return {**row, "status": report.status, "said": said}
    assert under_way is not None  # a run without a report is under way
    return {
        **row, "status": "running" if under_way.is_alive else "unfinished", "said": state_line(under_way),
    }  # fmt: skip


def _figures(files: RunFiles) -> dict[str, Any]:
    steps, measured = files.steps, files.measured
    held_out = [step.eval_loss for step in steps if step.eval_loss is not None]
    return {
        "model": files.plan.model.name,
        "method": method_name(files.plan.tuning),
        "loss": _from_to([steps[0].loss, steps[-1].loss] if steps else []),
        "held_out": _from_to(held_out),
        "curve": curve_of([(step.step, step.loss) for step in steps]),
        "peak": format_bytes(measured.peak_bytes) if measured.peak_bytes else "–",
        "speed": format_rate(measured.tokens_per_second) if measured.tokens_per_second else "–",
    }


def _from_to(losses: list[float]) -> str:
    """``2.31 → 1.02``: the first and the last, once where they are the same."""
    ends = dict.fromkeys((losses[0], losses[-1])) if losses else ()
    return " → ".join(format_number(loss, digits=3) for loss in ends) or "–"
