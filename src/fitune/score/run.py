"""Score a model on a dataset: ask, answer, grade, report; stopped at any moment, it goes on where it was."""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import to_json as json_bytes

from fitune.data.conversations.templates import ChatTemplate
from fitune.errors import RecipeError, RunDirectoryError, ScoringFailed
from fitune.files import remove_stale_siblings, write_atomically, written_whole
from fitune.models.weight_files import identity
from fitune.score.answers import OURS, Line, answer_text, body_of, claim
from fitune.score.asking import ENGINE_FAILED, Asker, OpenEngine
from fitune.score.engines.opening import check_all, dtype_of, open_engine, open_texts, rows_of_a_shard
from fitune.score.grades.graders import CHOICE_GRADERS, Grader, References, open_graders, require_one_way
from fitune.score.grades.grading import grade_shards, try_graders
from fitune.score.grades.intervals import mean_interval
from fitune.score.index import Index, index_input, open_index
from fitune.score.plan import ScorePlan, names_of
from fitune.score.questions import Input, Question, first_row_has_choices
from fitune.score.shards import FOLDER, Shards, groups
from fitune.score.tasks import Answer, Task, to_given_tasks, to_tasks
from fitune.units import counted
from fitune.values.reports import ScoreReport
from fitune.values.run_directory import require_real_files
from fitune.values.run_lock import lock_directory
from fitune.values.serial import to_json

_ROW_GROUP = 1024
"""Rows that a group of the parquet file holds, and this process at a time."""

Elsewhere = Callable[[Iterator[list[Task]], Callable[[int], None]], Iterator[list[Answer]]]
"""Answers groups of tasks in other processes, in the order of the groups; it may tell how many rows are done of those
that it works at."""


def score(
    plan: ScorePlan,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    opens: OpenEngine = open_engine,
    elsewhere: Elsewhere | None = None,
) -> ScoreReport:
    """Answer and grade every row; write answers.jsonl, answers.parquet, grades.jsonl and report.json.

    The same settings go on where they stopped: a row that has an answer keeps it, a row whose engine failed is asked
    again. ``progress`` is told the rows done and the rows in all, ``on_tokens`` the tokens of each shard.
    Rows are answered in this process, by the engine that ``opens`` returns, unless ``elsewhere`` does it.

    Raises DataError for rows or ids that cannot be used, RunDirectoryError for a directory of other settings,
    CheckpointError for an adapter that does not fit, ModelError for weights that are no numbers, ScoringFailed when the
    engine fails for every row.
    """
    names = plan.graders
    if not names and first_row_has_choices(plan.sources):
        names = CHOICE_GRADERS
        say(f"graders: {', '.join(names)} (the first row has choices)")
    graders = open_graders(names)
    require_one_way(graders)
    try_graders(graders)
    data = Input(
        sources=plan.sources, id_column=plan.id_column,
        by_loglikelihood=any(grader.row.grade_likelihoods for grader in graders),
    )  # fmt: skip
    check_all(plan, say=say)  # before the model is loaded: settings and configs say enough to refuse most
    started = time.perf_counter()
    tokenizer, template = open_texts(plan)

    def tasks_of(questions: Sequence[Question]) -> list[Task]:
        """Tasks to be answered, or with the texts whose log-likelihoods are asked."""
        if data.by_loglikelihood:
            return to_given_tasks(questions, template=template)
        return to_tasks(questions, template=template, sampling=plan.sampling)

    with open_index() as index:
        references = index_input(data, index)
        if not graders:
            names, why = references.graders()
            say(f"graders: {', '.join(names) or 'none'} ({why})")
            graders = open_graders(names)
        _require_references(graders, references, names_of(plan.sources))
        with lock_directory(directory := Path(plan.output_dir)):
            shards = _shards_in(directory, plan, template, index, by_loglikelihood=data.by_loglikelihood)
            total, pending = index.count_rows(), index.count_pending()
            progress(total - pending, total)
            if pending:
                asked = elsewhere or partial(_asked_here, Asker(plan, tokenizer, template, opens=opens))
                rows = data.numbered(index.pending())
                tasks = map(tasks_of, groups(rows, plan.shard_rows or rows_of_a_shard(plan)))
                _answer_pending(
                    plan, shards, partial(asked, tasks), done=total - pending,
                    progress=lambda done: progress(done, total), on_tokens=on_tokens,
                )  # fmt: skip
                shards.add_to(index)
            grade_shards(shards, graders)
            tally = _Tally(graders)
            _write_outputs(directory, index, shards, graders, on_row=tally.add)
            report = tally.report(plan, seconds=time.perf_counter() - started, rows_asked=pending)
            write_atomically(directory / "report.json", to_json(report))
            return report


def _require_references(graders: Sequence[Grader], references: References, path: str) -> None:
    choosing = [grader.name for grader in graders if grader.row.needs_choices]
    if choosing and references.without_choices:
        raise RecipeError(
            f"{', '.join(choosing)}: {counted(references.without_choices, 'row')} of {path} without choices",
            hint="rows with choices have question, choices and answer, or map "
            "choices=COLUMN beside prompt and completion; perplexity and loglikelihood take any reference",
        )
    needy = [grader.name for grader in graders if grader.row.needs_reference]
    if needy and references.missing:
        raise RecipeError(
            f"{', '.join(needy)}: {counted(references.missing, 'row')} of {path} without a reference",
            hint="leave --grader out, or name the column of the references",
        )


def _shards_in(
    directory: Path, plan: ScorePlan, template: ChatTemplate, index: Index, *, by_loglikelihood: bool
) -> Shards:
    """The shards that are there, checked and in the index, in a directory that belongs to these settings."""
    # All that an answer depends on but the rows, which are hashed one by one in the shards: so a dataset may grow, and
    # a changed prompt still shows. The tokenizer's files are among the model's.
    wanted = {
        "engine": f"server: {plan.served_model or plan.model}" if plan.engine == "server" else plan.engine,
        "model": identity(plan.model),
        "adapter": identity(plan.adapter),
        "template": hashlib.sha256(template.source.encode()).hexdigest()[:16],
        "data": "; ".join(
            f"{Path(source.path).name}, split {source.split}, sample {source.sample}"
            for source in plan.sources
        ),
        "dtype": dtype_of(plan),
        "sampling": "none: given answers are weighed" if by_loglikelihood else asdict(plan.sampling),
    }
    require_real_files(directory, names=(*OURS, FOLDER))
    for folder in (directory, directory / FOLDER):
        remove_stale_siblings(folder)
    shards = Shards(directory)
    claim(directory, wanted, has_shards=bool(shards.numbers()))
    shards.add_to(index)
    for (count, ids), what in (
        (index.lost(), "are no longer in the data"),
        (index.changed(), "have another prompt or reference now"),
    ):
        if count:
            raise RunDirectoryError(
                f"{directory}: rows answered there that {what}: {count:,} ({', '.join(id_ for (id_,) in ids)})",
                hint="score into a new directory; here the data may only grow by new rows",
            )
    return shards


def _answer_pending(
    plan: ScorePlan,
    shards: Shards,
    asked: Callable[[Callable[[int], None]], Iterator[list[Answer]]],
    *,
    done: int,
    progress: Callable[[int], None],
    on_tokens: Callable[[int], None],
) -> None:
    """Answer the pending rows in stretches of the input's order, each a shard on the disk before the next one's.

    ``done``: rows that have an answer. Raises ScoringFailed, and writes nothing, when the engine fails for all rows of
    the first.
    """
    written = told = done

    def look(rows: int) -> None:
        """Tells of the rows written and of ``rows`` of the shard at work."""
        nonlocal told
        told = written + rows
        progress(told)

    for number, answers in zip(shards.free_numbers(), asked(look), strict=False):
        if not written and len(answers) > 1 and all(answer.code == ENGINE_FAILED for answer in answers):
            raise ScoringFailed(f"the engine fails for every row: {answers[0].error}")
        shards.write(number, answers, model=plan.model)
        written += len(answers)
        on_tokens(sum(answer.tokens for answer in answers))
        if told != written:
            look(0)


def _asked_here(
    asker: Asker, tasks: Iterator[list[Task]], look: Callable[[int], None]
) -> Iterator[list[Answer]]:
    """The answers of each group by an engine of this process."""
    done = 0

    def count() -> None:
        """One row more of the group is answered."""
        nonlocal done
        done += 1
        look(done)

    with closing(asker):
        group = next(tasks, None)
        while group is not None:
            done, ahead = 0, next(tasks, None)
            yield asker.ask(group, on_answer=count, ahead=ahead or ())
            group = ahead


class _Tally:
    """Counts and means over all rows, which are added one after another. Rows without an answer are graded 0: a
    failure is not left out. Rows without a grade are."""

    def __init__(self, graders: Sequence[Grader]) -> None:
        self._graders = graders
        self._counts: Counter[str] = Counter()
        self._graded = {grader.name: array("d") for grader in graders}  # each grade and its weight
        self._ungraded: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any], grades: Mapping[str, Line]) -> None:
        """``record``: the row of answers.parquet."""
        self._counts["rows"] += 1
        self._counts["answered"] += record["error"] is None
        self._counts["cut_off"] += record["finish_reason"] == "length"
        for what in ("completion_tokens", "weighed_tokens", "prompt_tokens"):
            self._counts[what] += record[what] or 0
        for name, found in grades.items():
            self._errors[name] += bool(found.get("error"))
            if found["grade"] is None:
                self._ungraded[name] += 1
            else:
                self._graded[name].extend((found["grade"], found.get("weight", 1.0)))

    def report(self, plan: ScorePlan, *, seconds: float, rows_asked: int) -> ScoreReport:
        """The report of all rows; ``seconds`` and ``rows_asked`` are of this run alone."""
        counts, scales = self._counts, {grader.name: grader.scale for grader in self._graders}
        means = {name: mean_interval(graded, scales[name]) for name, graded in self._graded.items()}
        return ScoreReport(
            model=plan.model,
            adapter=plan.adapter,
            data=names_of(plan.sources),
            rows=counts["rows"],
            answered=counts["answered"],
            failed=counts["rows"] - counts["answered"],
            grades={name: mean for name, (mean, _, _) in means.items()},
            intervals={name: (low, high) for name, (_, low, high) in means.items()},
            seconds=seconds,
            generated_tokens=counts["completion_tokens"],
            cut_off=counts["cut_off"],
            scales=scales,
            measures={grader.name: grader.measures for grader in self._graders},
            ungraded=dict(+self._ungraded),
            grader_errors=dict(+self._errors),
            weighed_tokens=counts["weighed_tokens"],
            prompt_tokens=counts["prompt_tokens"],
            rows_asked=rows_asked,
        )


def _write_outputs(
    directory: Path, index: Index, shards: Shards, graders: Sequence[Grader], *,
    on_row: Callable[[Mapping[str, Any], Mapping[str, Line]], None],
) -> None:  # fmt: skip
    """Write answers.jsonl, grades.jsonl and answers.parquet, each whole, in one walk over the rows.

    ``on_row`` is given each row's record and grades. Raises OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, count = pa.string(), pa.int64()
    schema = pa.schema(
        [
            ("custom_id", text), ("prompt", text), ("expected", text), ("answer", text), ("finish_reason", text),
            ("prompt_tokens", count), ("completion_tokens", count), ("logprob", pa.float64()), ("error", text),
            *((f"grade_{grader.name}", pa.float64()) for grader in graders),
        ]
    )  # fmt: skip
    with ExitStack() as stack:
        answers, graded, table = (
            stack.enter_context(written_whole(directory / name))
            for name in ("answers.jsonl", "grades.jsonl", "answers.parquet")
        )
        writer = stack.enter_context(pq.ParquetWriter(table, schema))
        for group in groups(index.places(), _ROW_GROUP):
            records = []
            for number, place in group:
                line, task = shards.row(number, place), shards.row(number, place, "tasks")
                grades = {grader.name: shards.grade(number, grader.key, place) for grader in graders}
                answers.write(shards.lines(number, "answers")[place])
                graded.write(_grade_line(line, task, grades))
                records.append(_record(line, task, grades))
                on_row(records[-1], grades)
            writer.write_table(pa.Table.from_pylist(records, schema=schema))


def _grade_line(line: Line, task: Line, grades: Mapping[str, Line]) -> bytes:
    row = {
        "id": line["custom_id"],
        "expected": task["expected"],
        "grades": {name: found["grade"] for name, found in grades.items()},
    }
    for field, named in (("errors", "error"), ("weights", "weight"), ("said", "said")):
        if told := {name: found[named] for name, found in grades.items() if found.get(named)}:
            row[field] = told
    return json_bytes(row) + b"\n"


def _record(line: Line, task: Line, grades: Mapping[str, Line]) -> dict[str, Any]:
    """The row of the parquet file, and the tokens of its given answers."""
    body = body_of(line)
    choice = body["choices"][body.get("right", 0)] if body else {}  # the right one of those that were given
    usage = body.get("usage", {})
    return {
        "custom_id": line["custom_id"],
        "prompt": task["prompt"],
        "expected": task["expected"],
        "answer": answer_text(line),
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "weighed_tokens": usage.get("weighed_tokens"),
        "logprob": choice.get("logprob"),
        "error": line["error"]["message"] if line["error"] else None,
        **{f"grade_{name}": found["grade"] for name, found in grades.items()},
    }
