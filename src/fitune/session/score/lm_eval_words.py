"""Figures of lm-evaluation-harness's tasks, and a table of them. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fitune.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One metric of one task or group. ``error`` is its standard error, where lm-eval knows one."""

    task: str
    metric: str
    answer_filter: str
    value: float
    error: float | None
    rows: int
    shots: int | None
    is_higher_better: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """All metrics of the tasks that were run; ``results`` is the file with lm-eval's own results."""

    model: str
    adapter: str
    results: str
    seconds: float
    scores: tuple[TaskScore, ...]


def scores_of(results: Mapping[str, Any]) -> Iterator[TaskScore]:
    """One score for each number among lm-eval's results, groups behind tasks."""
    found = {**results["results"], **results.get("groups", {})}
    for task, values in found.items():
        better = results.get("higher_is_better", {}).get(task, {})
        rows = results.get("n-samples", {}).get(task, {}).get("effective", values.get("sample_len", 0))
        for key, value in values.items():
            metric, comma, answer_filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{answer_filter}")
            yield TaskScore(
                task=task, metric=metric, answer_filter=answer_filter, value=float(value),
                error=float(error) if isinstance(error, int | float) else None, rows=rows,
                shots=results.get("n-shot", {}).get(task), is_higher_better=better.get(metric),
            )  # fmt: skip


def explain_tasks(scores: TaskScores) -> str:
    """A table with a line for each metric."""
    lines = [("task", "metric", "value", "", "rows", "shots")]
    for score in scores.scores:
        name = score.metric if score.answer_filter == "none" else f"{score.metric} ({score.answer_filter})"
        arrow = {True: " ↑", False: " ↓", None: ""}[score.is_higher_better]
        spread = "" if score.error is None else f"± {score.error:.4f}"
        shots = "" if score.shots is None else f"{score.shots}"
        lines.append((score.task, name + arrow, f"{score.value:.4f}", spread, f"{score.rows:,}", shots))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    styles = [f"{side}{width}" for side, width in zip("<<><>>", widths, strict=True)]
    gaps = ("", "  ", "  ", " ", "  ", "  ")
    table = [
        "".join(f"{gap}{cell:{style}}" for gap, cell, style in zip(gaps, line, styles, strict=True)).rstrip()
        for line in lines
    ]
    model = f"{scores.model} with {scores.adapter}" if scores.adapter else scores.model
    ended = f"{model}: {format_seconds(scores.seconds)}; ± is the standard error, ↑ higher is better"
    return "\n".join([*table, ended, f"results and samples: {scores.results}"])
