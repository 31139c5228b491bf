"""A model answers a dataset, and the answers are graded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.models.adapter_config import CONFIG
from fitune.score.engine import Sampling
from fitune.score.run import ScorePlan, score
from fitune.session.events import Note, RowsAnswered, Tell, WeightsRead
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport

_LIMITS: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 1_000_000),
    "batch_size": (1, 65_536),
    "temperature": (0.0, 1_000.0),
    "top_p": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
}
"""The smallest and the largest value of every number."""

_ROLES = ("system", "prompt", "completion")


def score_dataset(
    *, model: str, data: str, out: Path, tell: Tell, adapter: str = "", columns: Mapping[str, str] | None = None,
    graders: Sequence[str] = (), sampling: Mapping[str, Any] | None = None, batch_size: int = 16,
    chat_template: str = "", id_column: str = "",
) -> ScoreReport:  # fmt: skip
    """Answer every row, grade, and write answers.jsonl, grades.jsonl and report.json into ``out``.

    ``columns`` maps system, prompt and completion to columns; ``sampling`` are fields of ``Sampling``.
    Raises RecipeError for a number out of its limits and a role that is none.
    """
    _require_allowed({"batch_size": batch_size, **(sampling or {})}, columns or {})
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


def model_and_adapter(exported: Path, *, base: str) -> tuple[str, str]:
    """What ``score_dataset`` is told of an export: a model and "", or ``base`` and an adapter on it."""
    return (base, str(exported)) if (exported / CONFIG).is_file() else (str(exported), "")


def _require_allowed(numbers: Mapping[str, float], columns: Mapping[str, str]) -> None:
    for name, value in numbers.items():
        least, most = _LIMITS[name]
        if not least <= value <= most:
            raise RecipeError(f"{name} = {value!r}: must be from {least:,} to {most:,}")
    for role, column in columns.items():
        if role not in _ROLES or not column:
            fault = f"{role!r} is not a role" if role not in _ROLES else f"{role} names no column"
            raise RecipeError(f"columns: {fault}", hint=f"roles are {', '.join(_ROLES)}")
