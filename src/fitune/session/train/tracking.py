"""The trackers of an attempt at a run, from before its steps until its report is written, which they get as well."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fitune.engine.ranks import Ranks
from fitune.errors import FituneError
from fitune.report.compare import compare, row_texts
from fitune.report.run_files import read_run
from fitune.report.run_page import write_report
from fitune.session.events import Note, Tell
from fitune.spec.plan import Plan
from fitune.track.feed import Trackers
from fitune.track.metrics import Sink
from fitune.track.protocol import End
from fitune.track.trackers import wanted_trackers

_ATTACHED = ("report.html", "report.json", "plan.json", "recipe.yaml")


@contextmanager
def tracked(plan: Plan, *, tell: Tell, ranks: Ranks) -> Iterator[Sequence[Sink]]:
    """Inside, the sinks that feed the plan's trackers; only the first rank has any. At the end they get the report."""
    rows = wanted_trackers(plan.run.report_to) if ranks.is_first else {}
    if not rows:
        yield ()
        return
    directory = Path(plan.run.output_dir)
    trackers = Trackers(rows, directory, say=lambda line: tell(Note(line)))
    try:
        yield (trackers,)
    finally:
        if trackers.tracked and trackers.close(end_of(directory)):
            # the page said nothing of a tracker that failed at the very end
            with suppress(FituneError, OSError):
                write_report(directory)


def end_of(directory: Path) -> End:
    """End of the run in ``directory`` for trackers: predicted beside measured, and the files that say more."""
    try:
        files = read_run(directory)
    except FituneError:
        return End(status="failed", figures={})
    rows = compare(files.estimate, files.run, files.steps)
    figures: dict[str, float] = {}
    for row in rows:
        name = re.sub(r"\W+", "_", row.what.strip().lower()).strip("_")
        for kind, value in (("predicted", row.predicted), ("measured", row.measured), ("error", row.error)):
            if value is not None:
                figures[f"{kind}/{name}"] = float(value)
    return End(
        status="failed" if files.run is None else files.run.status,
        figures=figures,
        table=(("", "predicted", "measured", "error"), *(row_texts(row) for row in rows)),
        files=tuple(str(directory / name) for name in _ATTACHED if (directory / name).is_file()),
    )
