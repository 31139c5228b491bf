"""Score a model on a dataset: ask, answer, grade, report; stopped at any moment, it goes on where it was."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.data.templates import ChatTemplate, load_template
from fitune.errors import RecipeError, RunDirectoryError
from fitune.files import cache_folder, remove_stale_siblings, write_atomically
from fitune.models.adapter_check import check_adapter
from fitune.models.door import notes_on
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import load_tokenizer
from fitune.score.answers import OURS, claim, completion_tokens, is_cut_off, manifest
from fitune.score.asking import Asker
from fitune.score.engine import listed_stop_ids
from fitune.score.graders import Grader, References, open_graders
from fitune.score.grading import grade_shards, try_graders
from fitune.score.index import Index, open_index
from fitune.score.intervals import mean_interval
from fitune.score.opening import check_engine, choose_device, choose_dtype, open_engine, tokenizer_folder
from fitune.score.output import read_grades, read_lines, write_outputs
from fitune.score.plan import ScorePlan
from fitune.score.reading import index_input, read_numbered
from fitune.score.shards import FOLDER, Shards, groups
from fitune.score.tasks import to_tasks
from fitune.spec.model_config import load_model_spec
from fitune.spec.reports import ScoreReport
from fitune.spec.run_directory import lock_directory, require_real_files
from fitune.spec.serial import to_json

_BATCHES_PER_SHARD = 16
"""Answers reach the disk in the order of the input, this many batches at a time: what a kill can cost."""


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
    graders = open_graders(plan.graders)
    try_graders(graders)
    for note in notes_on(plan.model):
        say(f"note: {note}")
    check_engine(plan)
    _check_adapter(plan, say)
    started = time.perf_counter()
    tokenizer = load_tokenizer(tokenizer_folder(plan))
    template = load_template(tokenizer, plan.chat_template)
    ears = Ears(say=say, progress=progress, on_bytes=on_bytes)
    with _temporary_index() as index:
        references = index_input(plan.data, index, id_column=plan.id_column)
        graders = graders or _chosen_graders(references, say)
        _require_references(graders, references, plan.data.path)
        with lock_directory(directory := Path(plan.output_dir)):
            shards = _shards_in(directory, plan, template, index)
            if index.count_pending():
                _answer_pending(plan, index, shards, tokenizer, template, ears)
            else:
                progress(index.count_rows(), index.count_rows())
            grade_shards(shards, graders)
            keys = {grader.name: grader.key for grader in graders}
            write_outputs(directory, index, shards, keys)
            report = _report(plan, index, shards, keys, seconds=time.perf_counter() - started)
            write_atomically(directory / "report.json", to_json(report))
            return report


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


def _chosen_graders(references: References, say: Callable[[str], None]) -> tuple[Grader, ...]:
    names, why = references.graders()
    say(f"graders: {', '.join(names) or 'none'} ({why})")
    return open_graders(names)


def _require_references(graders: Sequence[Grader], references: References, path: str) -> None:
    needy = [grader.name for grader in graders if grader.needs_reference]
    if needy and references.missing:
        raise RecipeError(
            f"{', '.join(needy)}: {references.missing} rows of {path} have no reference",
            hint="leave --grader out, or name the column of the references",
        )


def _shards_in(directory: Path, plan: ScorePlan, template: ChatTemplate, index: Index) -> Shards:
    """The shards that are there, checked and in the index, in a directory that belongs to these settings."""
    served = f"{plan.engine}: {plan.served_model or plan.model}" if plan.engine == "server" else plan.engine
    wanted = manifest(
        engine=served, model=plan.model, adapter=plan.adapter, template=template.source, data=plan.data,
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
        lambda: open_engine(plan, tokenizer, template, ears.on_bytes),
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


def _report(
    plan: ScorePlan, index: Index, shards: Shards, keys: dict[str, str], *, seconds: float
) -> ScoreReport:
    """Means over all rows. Rows without an answer are graded 0: a failure is not left out."""
    rows = answered = tokens = cut_off = 0
    for line in read_lines(index, shards):
        rows += 1
        answered += line["response"] is not None
        tokens += completion_tokens(line)
        cut_off += is_cut_off(line)
    means = {name: mean_interval(read_grades(index, shards, key)) for name, key in keys.items()}
    return ScoreReport(
        model=plan.model,
        adapter=plan.adapter,
        data=plan.data.path,
        rows=rows,
        answered=answered,
        failed=rows - answered,
        grades={name: mean for name, (mean, _, _) in means.items()},
        intervals={name: (low, high) for name, (_, low, high) in means.items()},
        seconds=seconds,
        generated_tokens=tokens,
        cut_off=cut_off,
    )
