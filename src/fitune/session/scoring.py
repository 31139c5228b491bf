"""A model answers a dataset, and the answers are graded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.score.generate_hf import Sampling
from fitune.score.run import ScorePlan, score
from fitune.session.events import Note, RowsAnswered, Tell, WeightsRead, tell_nobody
from fitune.session.limits import require_within_limits
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport

_ROLES = ("system", "prompt", "completion")


def score_dataset(
    *, model: str, data: str, out: Path, adapter: str = "", columns: Mapping[str, str] | None = None,
    graders: Sequence[str] = (), sampling: Mapping[str, Any] | None = None, batch_size: int = 16,
    chat_template: str = "", id_column: str = "", tell: Tell = tell_nobody,
) -> ScoreReport:  # fmt: skip
    """Answer every row, grade, and write answers.jsonl, grades.jsonl and report.json into ``out``.

    ``columns`` maps system, prompt and completion to columns; ``sampling`` are fields of ``Sampling``.
    """
    for role, column in (columns or {}).items():
        if role not in _ROLES or not column:
            raise RecipeError(
                f"columns {role}={column!r} is not role=column", hint=f"roles are {', '.join(_ROLES)}"
            )
    require_within_limits({"batch_size": batch_size, **(sampling or {})})
    plan = ScorePlan(
        model=model,
        adapter=adapter,
        data=DataSource(path=data, columns=tuple((columns or {}).items())),
        output_dir=str(out),
        graders=tuple(graders),
        sampling=Sampling(**(sampling or {})),
        chat_template=chat_template,
        id_column=id_column,
        batch_size=batch_size,
    )
    return score(
        plan,
        say=lambda line: tell(Note(line)),
        progress=lambda done, total: tell(RowsAnswered(done=done, total=total)),
        on_bytes=lambda done, total: tell(WeightsRead(done_bytes=done, total_bytes=total)),
    )
