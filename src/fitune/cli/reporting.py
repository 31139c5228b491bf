"""``fitune report``."""

import json as json_text
from pathlib import Path

from fitune.report.compare import Row, compare, comparison_table
from fitune.report.html import write_report
from fitune.report.run_files import read_run


def show_report(directory: Path, *, json: bool) -> None:
    """Print the comparison and write report.html."""
    path = write_report(directory)
    if not json:
        print(comparison_table(comparison(directory)))
        run = read_run(directory).run
        if run is None:
            print("the run has not ended: it is still going, or was killed (fitune train … --resume)")
        elif run.reason:
            print(f"the run is {run.status}: {run.reason}")
        print(f"report: {path}")
        return
    rows = [
        {"what": row.what, "predicted": row.predicted, "measured": row.measured, "error": row.error}
        for row in comparison(directory)
    ]
    print(json_text.dumps({"run": str(directory), "report": str(path), "comparison": rows}, indent=2))


def comparison(directory: Path) -> list[Row]:
    """Predicted | measured of one run."""
    files = read_run(directory)
    return compare(files.estimate, files.run, files.steps)
