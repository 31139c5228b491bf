"""The page of a folder's runs: a table with live curves, and the report of each run as its files are now."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fitune.errors import FituneError, RunDirectoryError
from fitune.report.compare import measure
from fitune.report.local_pages import curve_of, run_refused_html, runs_html, runs_table_html
from fitune.report.run_files import RunFiles
from fitune.report.run_page import page_of
from fitune.report.under_way import UnderWay, state_line
from fitune.session.watching import RunView
from fitune.spec.words import method_name
from fitune.units import format_bytes, format_number, format_rate, format_seconds

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
        return runs_html(str(self.folder), table=self.table(question))

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
            return run_refused_html(f"{self.folder} has no run {name!r}")
        try:
            files, under_way = view.look()
        except FituneError as error:
            return run_refused_html(str(error))
        return page_of(files, under_way, refresh_s=REFRESH_SECONDS if under_way and under_way.is_alive else 0)

    def _found(self) -> dict[str, RunView]:
        """Folders with a plan.json, and the folder itself if it has one; the one that wrote last is first."""
        try:
            inside = [self.folder, *(one for one in self.folder.iterdir() if not one.is_symlink())]
            found = sorted(
                (one for one in inside if (one / "plan.json").is_file()), key=_last_written, reverse=True
            )
        except OSError as error:
            raise RunDirectoryError(f"{self.folder}: cannot be read: {error.strerror or error}") from None
        names = {one.name if one != self.folder else ".": one for one in islice(found, MOST_RUNS)}
        self._views = {name: self._views.get(name) or RunView(one) for name, one in names.items()}
        return self._views


def _last_written(directory: Path) -> float:
    for name in ("report.json", "metrics.jsonl", "plan.json"):
        if (file := directory / name).is_file():
            return file.stat().st_mtime
    return 0.0


def _row(name: str, view: RunView) -> dict[str, Any]:
    """Words of one run; of one whose files are damaged, what is wrong."""
    try:
        files, under_way = view.look()
    except FituneError as error:
        return {"name": name, "error": str(error)}
    return {"name": name, "error": "", **_state(files, under_way), **_figures(files)}


def _state(files: RunFiles, under_way: UnderWay | None) -> dict[str, str]:
    if files.run is not None:
        report = files.run
        said = f"{report.steps:,} of {report.total_steps:,} steps in {format_seconds(report.seconds)}"
        return {"status": report.status, "said": said}
    assert under_way is not None  # a run without a report is under way
    return {"status": "running" if under_way.is_alive else "unfinished", "said": state_line(under_way)}


def _figures(files: RunFiles) -> dict[str, Any]:
    steps, measured = files.steps, measure(files.run, files.steps)
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
