"""report.html: one page about one run, with nothing to load from anywhere and nothing to execute."""

from pathlib import Path

from fitune.errors import MissingExtra
from fitune.report import headline, sections
from fitune.report.attempts import attempts
from fitune.report.compare import compare, measure
from fitune.report.page import page, write_page
from fitune.report.pictures import Pictures, draw_pictures
from fitune.report.pieces import element, join
from fitune.report.run_files import RunFiles, read_run


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory, from whatever files of the run there are.

    Without matplotlib the page says how to get the pictures. Raises RunDirectoryError.
    """
    return write_page(directory / "report.html", render(read_run(directory)))


def render(run: RunFiles) -> str:
    rows = compare(run.estimate, run.run, run.steps)
    measured = measure(run.run, run.steps)
    pictures, advice = _pictures(run)
    body = join(
        [
            headline.header(run, measured),
            sections.prediction(rows, run, pictures, advice),
            sections.curves(run, pictures),
            attempts(run),
            sections.samples(run),
            sections.plan(run),
            sections.alternatives(run),
            sections.data(run),
            sections.reproduce(run),
            element("footer", f"fitune report of {run.directory.name}"),
        ]
    )
    return page(f"{run.plan.model.name}: fitune report", body)


def _pictures(run: RunFiles) -> tuple[Pictures | None, str]:
    """The pictures, or how to get them."""
    try:
        return draw_pictures(run), ""
    except MissingExtra as error:
        return None, f"No {error.what}: {error.hint}"
