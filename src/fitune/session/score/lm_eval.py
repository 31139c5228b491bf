"""Tasks of lm-evaluation-harness on a model: they are loaded, an engine answers, and lm-eval's results are written."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError, require_library
from fitune.files import write_atomically
from fitune.models.readers import read_config
from fitune.models.weight_files import identity
from fitune.recipe.score_recipe import ScoreRecipe
from fitune.score.answers import claim
from fitune.score.engines.opening import (
    check_all,
    dtype_of,
    open_engine,
    open_texts,
)
from fitune.score.shards import FOLDER
from fitune.session.events import Emit, emit_notes, emit_weights
from fitune.session.score.score_plan import plan_of
from fitune.session.score.scoring import Pace
from fitune.units import format_seconds, text_table
from fitune.values.run_lock import lock_directory
from fitune.values.serial import to_data

RESULTS = "lm_eval.json"
"""lm-eval's results as it gives them; the samples of each task are in files beside it."""
OWN_TEMPLATE = "own"
"""--chat-template own: the tokenizer's."""


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

    def text(self) -> str:
        """A table with a line for each metric."""
        lines = [("task", "metric", "value", "", "rows", "shots")]
        for score in self.scores:
            name = (
                score.metric if score.answer_filter == "none" else f"{score.metric} ({score.answer_filter})"
            )
            arrow = {True: " ↑", False: " ↓", None: ""}[score.is_higher_better]
            spread = "" if score.error is None else f"± {score.error:.4f}"
            shots = "" if score.shots is None else f"{score.shots}"
            lines.append((score.task, name + arrow, f"{score.value:.4f}", spread, f"{score.rows:,}", shots))
        model = f"{self.model} with {self.adapter}" if self.adapter else self.model
        ended = f"{model}: {format_seconds(self.seconds)}; ± is the standard error, ↑ higher is better"
        return "\n".join([text_table(lines, left=(0, 1, 3)), ended, f"results and samples: {self.results}"])

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        data: dict[str, Any] = to_data(self)
        return data


def score_tasks(recipe: ScoreRecipe, *, emit: Emit) -> TaskScores:
    """Run tasks of lm-evaluation-harness on a model; its results and the samples of each task are written into ``out``.

    ``chat_template``: empty: prompts are plain texts; "own": chats, by the tokenizer's template; else a Jinja file.
    """
    require_library("lm_eval", needed_by="--lm-eval", extra="lm-eval")
    plan, out, limit, seed = plan_of(recipe), recipe.out, recipe.limit, recipe.seed
    if plan.chat_template == OWN_TEMPLATE:
        plan = replace(plan, chat_template="")

    say = emit_notes(emit)
    check_all(plan, say=say)  # faults of engine, model or adapter before the tasks are loaded
    from lm_eval.models.utils import resolve_max_length

    from fitune.score.lm_eval import EngineLM
    from fitune.score.lm_eval_tasks import load_tasks, run_tasks

    names, folder = [*recipe.lm_eval], recipe.lm_eval_tasks
    loaded = load_tasks(names, folder=folder, shots=recipe.shots, say=say)
    started = time.perf_counter()
    tokenizer, template = open_texts(plan)
    said: dict[str, Any] = {
        "tasks": names, "tasks_folder": str(folder or ""), "shots": recipe.shots, "limit": limit,
        "engine": f"{plan.engine} {plan.url}".strip(), "model": identity(plan.model), "adapter": identity(plan.adapter),
        "chat_template": template.source if recipe.chat_template else "", "seed": seed,
        "dtype": dtype_of(plan),
    }  # fmt: skip
    with lock_directory(out):
        if (out / FOLDER).exists():
            raise RunDirectoryError(f"{out} holds the answers of a dataset", hint="name a new folder: --out")
        # samples alone are of a run that ended between them and the results
        is_begun = (out / RESULTS).exists() or any(out.glob("samples_*.jsonl"))
        claim(out, said, has_shards=is_begun)
        pace = Pace(emit)
        engine_lm = EngineLM(
            lambda: open_engine(
                plan, tokenizer, template,
                on_bytes=emit_weights(emit),
            ),
            tokenizer, engine=plan.engine, template=said["chat_template"], seed=seed, on_rows=pace.rows,
            on_tokens=pace.add,
            context=resolve_max_length(read_config(plan.model), tokenizer),  # 2048 for a model without positions
        )  # fmt: skip
        with closing(engine_lm) as asked:
            results = run_tasks(asked, loaded, limit=limit, chat=bool(recipe.chat_template), say=say)
        _write(out, results, said)
    return TaskScores(
        model=plan.model, adapter=plan.adapter, results=str(out / RESULTS), seconds=time.perf_counter() - started,
        scores=tuple(_scores_of(results)),
    )  # fmt: skip


def _scores_of(results: Mapping[str, Any]) -> Iterator[TaskScore]:
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


def _write(out: Path, results: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The samples first: where the results are, all is."""
    from lm_eval.utils import handle_non_serializable

    for task, samples in results.get("samples", {}).items():
        lines = [json.dumps(each, default=handle_non_serializable, ensure_ascii=False) for each in samples]
        name = re.sub(r"[^\w.-]", "_", task)
        write_atomically(out / f"samples_{name}.jsonl", "".join(f"{line}\n" for line in lines))
    shown = {
        **{name: value for name, value in results.items() if name != "samples"},
        "fitune": dict(settings),
    }
    text = json.dumps(shown, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomically(out / RESULTS, text + "\n")
