"""Score a model on a dataset: ask, answer, grade, report; stopped at any moment, it goes on where it was."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fitune.data.templates import ChatTemplate, load_template
from fitune.errors import RecipeError, RunDirectoryError
from fitune.files import cache_folder, remove_stale_siblings, write_atomically
from fitune.models.adapter_check import check_adapter
from fitune.models.adapters import load_adapter, saved_rows
from fitune.models.door import notes_on
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import load_model, load_tokenizer, require_finite
from fitune.score.answers import OURS, claim, completion_tokens, manifest
from fitune.score.asking import Asker
from fitune.score.engine import Engine, EngineName, Sampling, listed_stop_ids
from fitune.score.graders import References, check_graders
from fitune.score.grading import grade_shards
from fitune.score.index import Index, open_index
from fitune.score.output import read_grades, read_lines, write_outputs
from fitune.score.reading import index_input, read_numbered
from fitune.score.shards import FOLDER, Shards, groups
from fitune.score.tasks import to_tasks
from fitune.spec.model_config import load_model_spec
from fitune.spec.plan import DataSource
from fitune.spec.reports import ScoreReport
from fitune.spec.run_directory import lock_directory, require_real_files
from fitune.spec.serial import to_json

_BATCHES_PER_SHARD = 16
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
    shard_rows: int = 0
    """Rows of a shard; 0: _BATCHES_PER_SHARD batches."""
    engine: EngineName = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ears:
    """Who is told: notes in words, rows done and in all, bytes of weights read and in all."""

    say: Callable[[str], None]
    progress: Callable[[int, int], None]
    on_bytes: OnBytes


def score(
    plan: ScorePlan,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_bytes: OnBytes = nobody,
) -> ScoreReport:
    """Answer and grade every row; write answers.jsonl, answers.parquet, grades.jsonl and report.json.

    The same settings go on where they stopped: a row that has an answer keeps it, a row whose engine failed is asked
    again. ``progress`` is told the rows done and the rows in all.

    Raises DataError for rows or ids that cannot be used, RunDirectoryError for a directory of other settings,
    CheckpointError for an adapter that does not fit, ModelError for weights that are no numbers, ScoringFailed when the
    engine fails for every row.
    """
    check_graders(plan.graders)
    for note in notes_on(plan.model):
        say(f"note: {note}")
    _check_adapter(plan, say)
    started = time.perf_counter()
    tokenizer = load_tokenizer(_tokenizer_folder(plan))
    template = load_template(tokenizer, plan.chat_template)
    ears = Ears(say=say, progress=progress, on_bytes=on_bytes)
    with _temporary_index() as index:
        references = index_input(plan.data, index, id_column=plan.id_column)
        plan = dataclasses.replace(plan, graders=_settled_graders(plan, references, say))
        with lock_directory(directory := Path(plan.output_dir)):
            shards = _shards_in(directory, plan, template, index)
            if index.count_pending():
                _answer_pending(plan, index, shards, tokenizer, template, ears)
            else:
                progress(index.count_rows(), index.count_rows())
            keys = grade_shards(shards, plan.graders)
            write_outputs(directory, index, shards, keys)
            report = _report(plan, index, shards, keys, seconds=time.perf_counter() - started)
            write_atomically(directory / "report.json", to_json(report))
            return report


def choose_device() -> torch.device:
    """The first GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU; on a GPU bf16, or fp16 where there is none (before Ampere)."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _temporary_index() -> Any:
    folder = cache_folder() / "scoring"
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_siblings(folder)
    return open_index(folder)


def _check_adapter(plan: ScorePlan, say: Callable[[str], None]) -> None:
    """Before the model is loaded: its config says enough to refuse most of what does not fit."""
    if plan.adapter:
        for warning in check_adapter(Path(plan.adapter), base=load_model_spec(plan.model)):
            say(f"warning: {warning}")


def _tokenizer_folder(plan: ScorePlan) -> str:
    """The adapter's, where embedding or head were trained with it: tokens may have been added."""
    folder = Path(plan.adapter) if plan.adapter else None
    if folder is not None and (folder / "tokenizer.json").is_file() and saved_rows(folder):
        return plan.adapter
    return plan.model


def _settled_graders(plan: ScorePlan, references: References, say: Callable[[str], None]) -> tuple[str, ...]:
    if not plan.graders:
        names, why = references.graders()
        say(f"graders: {', '.join(names) or 'none'} ({why})")
        return names
    if references.missing:
        raise RecipeError(
            f"{', '.join(plan.graders)}: {references.missing} rows of {plan.data.path} have no reference",
            hint="leave --grader out, or name the column of the references",
        )
    return plan.graders


def _shards_in(directory: Path, plan: ScorePlan, template: ChatTemplate, index: Index) -> Shards:
    """The shards that are there, checked and in the index, in a directory that belongs to these settings."""
    wanted = manifest(
        engine=plan.engine, model=plan.model, adapter=plan.adapter, template=template.source, data=plan.data,
        sampling=plan.sampling, dtype=str(choose_dtype(choose_device())),
    )  # fmt: skip
    require_real_files(directory, names=(*OURS, FOLDER))
    for folder in (directory, directory / FOLDER):
        remove_stale_siblings(folder)
    shards = Shards(directory)
    claim(directory, wanted, has_shards=bool(shards.numbers()))
    shards.add_to(index)
    for (count, ids), what in (
        (index.lost(5), "are no longer in the data"),
        (index.changed(5), "have another prompt or reference now"),
    ):
        if count:
            raise RunDirectoryError(
                f"{directory}: {count} rows answered there {what}: {', '.join(ids)}",
                hint="score into a new directory; here the data may only grow by new rows",
            )
    return shards


def _answer_pending(
    plan: ScorePlan, index: Index, shards: Shards, tokenizer: Any, template: ChatTemplate, ears: Ears
) -> None:
    """Answer the pending rows in stretches of the input's order, each a shard on the disk before the next begins."""
    total = index.count_rows()
    done = total - index.count_pending()
    ears.progress(done, total)

    def count() -> None:
        nonlocal done
        done += 1
        ears.progress(done, total)

    size = plan.shard_rows or plan.batch_size * _BATCHES_PER_SHARD
    number = max(shards.numbers(), default=-1) + 1
    stop_ids = template.stop_ids | listed_stop_ids(plan.model)
    asker = Asker(
        lambda: _open_engine(plan, tokenizer, template, ears),
        tokenizer,
        sampling=plan.sampling,
        stop_ids=stop_ids,
    )
    try:
        questions = read_numbered(plan.data, index.pending(), id_column=plan.id_column)
        for group in groups(questions, size):
            tasks = to_tasks(group, template=template, sampling=plan.sampling)
            shards.write(number, asker.ask(tasks, on_answer=count), model=plan.model)
            number += 1
    finally:
        asker.close()
    shards.add_to(index)


def _open_engine(plan: ScorePlan, tokenizer: Any, template: ChatTemplate, ears: Ears) -> Engine:
    from fitune.score.engine_transformers import TransformersEngine

    device = choose_device()
    model = load_model(plan.model, dtype=choose_dtype(device), device=device, on_bytes=ears.on_bytes)
    require_finite(model, plan.model)
    if plan.adapter:
        model = load_adapter(model, plan.adapter).to(device)
    return TransformersEngine(
        model=model, tokenizer=tokenizer, template=template, tokenizer_folder=_tokenizer_folder(plan),
        batch_size=plan.batch_size,
    )  # fmt: skip


def _report(
    plan: ScorePlan, index: Index, shards: Shards, keys: dict[str, str], *, seconds: float
) -> ScoreReport:
    """Means over all rows. Rows without an answer are graded 0: a failure is not left out."""
    rows = answered = tokens = 0
    for line in read_lines(index, shards):
        rows += 1
        answered += line["response"] is not None
        tokens += completion_tokens(line)
    return ScoreReport(
        model=plan.model,
        adapter=plan.adapter,
        data=plan.data.path,
        rows=rows,
        answered=answered,
        failed=rows - answered,
        grades={name: sum(read_grades(index, shards, key)) / rows for name, key in keys.items()},
        seconds=seconds,
        generated_tokens=tokens,
    )
