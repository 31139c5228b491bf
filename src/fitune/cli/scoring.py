"""``fitune score``."""

import json as json_text
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.cli.loading import loading_bar
from fitune.errors import RecipeError, ScoringFailed
from fitune.score.generate_hf import Sampling
from fitune.score.run import ScorePlan, score
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport
from fitune.spec.serial import to_data
from fitune.units import format_percent, format_seconds

_ROLES = ("system", "prompt", "completion")


def score_dataset(
    *, model: str, adapter: str, data: str, out: Path, columns: Sequence[str], graders: Sequence[str],
    sampling: Mapping[str, Any], batch_size: int, chat_template: str, id_column: str, json: bool,
) -> None:  # fmt: skip
    """Answer, grade, print. With ``json`` only the report goes to standard output."""
    plan = ScorePlan(
        model=model,
        adapter=adapter,
        data=DataSource(path=data, columns=tuple(_column(text) for text in columns)),
        output_dir=str(out),
        graders=tuple(graders),
        sampling=Sampling(**sampling),
        chat_template=chat_template,
        id_column=id_column,
        batch_size=batch_size,
    )
    with loading_bar(quiet=json) as on_bytes:
        report = score(
            plan, say=lambda line: print(line, file=sys.stderr), progress=counter(), on_bytes=on_bytes
        )
    if json:
        print(json_text.dumps(to_data(report), indent=2, ensure_ascii=False))
    else:
        print(describe_score(report, out))
    if report.failed:
        failed = ScoringFailed(
            f"{report.failed} of {report.rows} rows have no answer; they are graded 0",
            hint=f"see the error of those rows in {out / 'answers.jsonl'}",
        )
        print(f"error: {failed}", file=sys.stderr)  # the report stays the one object on standard output
        sys.exit(failed.exit_code)


def describe_score(report: ScoreReport, out: Path) -> str:
    grades = "  ".join(f"{name} {format_percent(value)}" for name, value in report.grades.items())
    failed = f", {report.failed} failed" if report.failed else ""
    return (
        f"{grades}\n{report.answered} of {report.rows} rows answered{failed} in {format_seconds(report.seconds)}, "
        f"{report.generated_tokens:,} tokens generated\nanswers: {out / 'answers.jsonl'}"
    )


def counter() -> Callable[[int, int], None]:
    """Rows done on one line of a terminal; nothing where nobody watches."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} rows", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def _column(text: str) -> tuple[str, str]:
    role, equals, column = text.partition("=")
    if not equals or role not in _ROLES or not column:
        raise RecipeError(f"--columns {text!r} is not role=column", hint=f"roles are {', '.join(_ROLES)}")
    return role, column
