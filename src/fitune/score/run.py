"""Score a model on a dataset: ask, answer, grade, report; stopped at any moment, it goes on where it was."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fitune.data.templates import ChatTemplate, load_template
from fitune.files import remove_stale_siblings, write_atomically
from fitune.models.adapter_check import check_adapter
from fitune.models.adapters import load_adapter, saved_rows
from fitune.models.door import notes_on
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import load_model, load_tokenizer, require_finite, require_rows
from fitune.score.answers import (
    OURS,
    Line,
    answer_line,
    answer_text,
    append_lines,
    claim,
    completion_tokens,
    manifest,
    read_answers,
    require_same_prompts,
)
from fitune.score.generate_hf import Sampling, answer_all
from fitune.score.tasks import Task, check_graders, choose_graders, grade, read_tasks
from fitune.spec.model_config import load_model_spec
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport
from fitune.spec.run_directory import lock_directory, require_real_files
from fitune.spec.serial import to_json

_BATCHES_PER_WRITE = 8
"""Answers reach the disk in the order of the input, this many batches at a time: what a kill can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """Model, tasks and output file of a scoring. ``graders`` empty: chosen by the references."""

    model: str
    data: DataSource
    output_dir: str
    adapter: str = ""
    graders: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    chat_template: str = ""
    id_column: str = ""
    batch_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A model ready to answer, with its tokenizer and template."""

    model: Any
    tokenizer: Any
    template: ChatTemplate


def score(
    plan: ScorePlan,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: OnBytes = nobody,
) -> ScoreReport:
    """Answer and grade every row; write answers.jsonl, grades.jsonl and report.json into ``plan.output_dir``.

    The same settings go on where they stopped: a row that has an answer keeps it. ``progress`` is told the rows
    done and the rows in all, ``on_bytes`` the same of the bytes while weights are read.

    Raises DataError for rows or ids that cannot be used, RunDirectoryError for a directory of other settings,
    CheckpointError for an adapter that does not fit, ModelError for weights that are no numbers.
    """
    check_graders(plan.graders)
    for note in notes_on(plan.model):
        say(f"note: {note}")
    _check_adapter(plan, say)
    started = time.perf_counter()
    directory = Path(plan.output_dir)
    device = choose_device()
    dtype = choose_dtype(device)
    tokenizer = load_tokenizer(_tokenizer_folder(plan))
    template = load_template(tokenizer, plan.chat_template)
    tasks = read_tasks(plan.data, template=template, id_column=plan.id_column)
    graders = plan.graders or _announced_graders(tasks, say)
    wanted = manifest(
        model=plan.model, adapter=plan.adapter, data=plan.data, sampling=plan.sampling, dtype=str(dtype)
    )
    with lock_directory(directory):
        require_real_files(directory, names=OURS)
        remove_stale_siblings(directory)
        claim(directory, wanted)
        pending = _pending(directory, tasks)
        progress(len(tasks) - len(pending), len(tasks))
        if pending:
            scorer = Scorer(
                model=_load(plan, dtype, device, on_bytes), tokenizer=tokenizer, template=template
            )
            rows = scorer.model.get_input_embeddings().weight.shape[0]
            largest = max(max(task.prompt_ids, default=0) for task in pending)
            require_rows(_tokenizer_folder(plan), largest_id=largest, rows=rows)
            _answer_into(directory, scorer, pending, plan, progress=progress, total=len(tasks))
        return _finish(directory, plan, tasks, graders, started=started)


def choose_device() -> torch.device:
    """The first GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU; on a GPU bf16, or fp16 where there is none (before Ampere)."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _check_adapter(plan: ScorePlan, say: Callable[[str], None]) -> None:
    """Before the model is loaded: its config says enough to refuse most of what does not fit."""
    if plan.adapter:
        for warning in check_adapter(Path(plan.adapter), base=load_model_spec(plan.model)):
            say(f"warning: {warning}")


def _load(plan: ScorePlan, dtype: torch.dtype, device: torch.device, on_bytes: OnBytes) -> Any:
    model = load_model(plan.model, dtype=dtype, device=device, on_bytes=on_bytes)
    require_finite(model, plan.model)
    return load_adapter(model, plan.adapter).to(device) if plan.adapter else model


def _tokenizer_folder(plan: ScorePlan) -> str:
    """The adapter's, where embedding or head were trained with it: tokens may have been added."""
    folder = Path(plan.adapter) if plan.adapter else None
    if folder is not None and (folder / "tokenizer.json").is_file() and saved_rows(folder):
        return plan.adapter
    return plan.model


def _announced_graders(tasks: Sequence[Task], say: Callable[[str], None]) -> tuple[str, ...]:
    names, why = choose_graders([task.expected for task in tasks])
    say(f"graders: {', '.join(names)} ({why})")
    return names


def _pending(directory: Path, tasks: list[Task]) -> list[Task]:
    """Tasks without an answer on the disk."""
    done = {str(line["custom_id"]): line for line in read_answers(directory / "answers.jsonl")}
    require_same_prompts(directory, done, tasks)
    return [task for task in tasks if task.id not in done]


def _answer_into(
    directory: Path,
    scorer: Scorer,
    pending: list[Task],
    plan: ScorePlan,
    *,
    progress: Callable[[int, int], None],
    total: int,
) -> None:
    """Answer the pending tasks in stretches of the input's order, each written before the next begins."""
    done = total - len(pending)

    def count(new: int) -> None:
        nonlocal done
        done += new
        progress(done, total)

    stretch = plan.batch_size * _BATCHES_PER_WRITE
    for start in range(0, len(pending), stretch):
        answers = answer_all(
            scorer.model, scorer.tokenizer, scorer.template, pending[start : start + stretch], plan.sampling,
            batch_size=plan.batch_size, on_answers=count,
        )  # fmt: skip
        append_lines(
            directory / "answers.jsonl", [answer_line(answer, model=plan.model) for answer in answers]
        )


def _finish(
    directory: Path, plan: ScorePlan, tasks: list[Task], graders: tuple[str, ...], *, started: float
) -> ScoreReport:
    """Grade what is on the disk and report. Rows without an answer are graded 0: a failure is not left out."""
    lines = {str(line["custom_id"]): line for line in read_answers(directory / "answers.jsonl")}
    grades = [_grades(task, lines[task.id], graders) for task in tasks]
    write_atomically(
        directory / "grades.jsonl",
        "".join(
            f"{json.dumps({'id': task.id, 'expected': task.expected, 'grades': row}, ensure_ascii=False)}\n"
            for task, row in zip(tasks, grades, strict=True)
        ),
    )
    answered = sum(answer_text(line) is not None for line in lines.values())
    report = ScoreReport(
        model=plan.model,
        adapter=plan.adapter,
        data=plan.data.path,
        rows=len(tasks),
        answered=answered,
        failed=len(tasks) - answered,
        grades={name: sum(row[name] for row in grades) / len(tasks) for name in graders},
        seconds=time.perf_counter() - started,
        generated_tokens=sum(map(completion_tokens, lines.values())),
    )
    write_atomically(directory / "report.json", to_json(report))
    return report


def _grades(task: Task, line: Line, graders: tuple[str, ...]) -> dict[str, float]:
    answer = answer_text(line)
    return {name: 0.0 if answer is None else grade(name, answer, task.expected) for name in graders}
