"""Score a model on a dataset: ask, answer, grade, report; stopped at any moment, it goes on where it was."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json as json_bytes

from fitune.data.conversations.templates import ChatTemplate, load_template
from fitune.errors import RecipeError, RunDirectoryError, ScoringFailed
from fitune.files import cache_folder, remove_stale_siblings, write_atomically, written_whole
from fitune.models.adapter_file import check_adapter
from fitune.models.door import notes_on
from fitune.models.tokens import load_tokenizer
from fitune.models.weight_files import OnBytes, nobody
from fitune.score.answers import (
    OURS,
    Line,
    answer_logprob,
    answer_text,
    claim,
    is_cut_off,
    manifest,
    tokens_of,
)
from fitune.score.asking import ENGINE_FAILED
from fitune.score.choices import first_row_has_choices
from fitune.score.engines.continuous import Watch, unwatched
from fitune.score.engines.opening import check_engine, dtype_of, rows_of_a_shard, tokenizer_folder
from fitune.score.grades.graders import CHOICE_GRADERS, Grader, References, open_graders, require_one_way
from fitune.score.grades.grading import grade_shards, try_graders
from fitune.score.grades.intervals import WeightedMean
from fitune.score.index import Index, index_input, open_index, read_numbered
from fitune.score.plan import ScorePlan, names_of
from fitune.score.shards import FOLDER, Shards, groups
from fitune.score.tasks import Answer, Question, Task, to_tasks
from fitune.score.weighing import to_given_tasks
from fitune.score.worker import open_asker
from fitune.spec.reports import ScoreReport
from fitune.spec.run_directory import require_real_files
from fitune.spec.run_lock import lock_directory
from fitune.spec.serial import to_json
from fitune.units import counted

_ROW_GROUP = 1024
"""Rows that a group of the parquet file holds, and this process at a time."""

Elsewhere = Callable[[str, Iterator[list[Task]], Callable[[int], None]], Iterator[list[Answer]]]
"""Answers groups of tasks in other processes, in the order of the groups. It is told which graders weigh given answers,
empty where answers are written, and may tell how many rows are done of those that it works at."""


def score(
    plan: ScorePlan,
    *,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    on_bytes: OnBytes = nobody,
    watch: Watch = unwatched,
    elsewhere: Elsewhere | None = None,
) -> ScoreReport:
    """Answer and grade every row; write answers.jsonl, answers.parquet, grades.jsonl and report.json.

    The same settings go on where they stopped: a row that has an answer keeps it, a row whose engine failed is asked
    again. ``progress`` is told the rows done and the rows in all, ``on_tokens`` the tokens of each shard.
    Rows are answered in this process unless ``elsewhere`` does it.

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
    weighed = any(grader.row.weigh for grader in graders)
    for note in notes_on(plan.model):
        say(f"note: {note}")
    check_engine(plan)
    if plan.adapter:  # before the model is loaded: its config says enough to refuse most of what does not fit
        for warning in check_adapter(Path(plan.adapter), base=plan.model):
            say(f"warning: {warning}")
    started = time.perf_counter()
    tokenizer = load_tokenizer(tokenizer_folder(plan))
    template = load_template(tokenizer, plan.chat_template)

    def tasks_of(questions: Sequence[Question]) -> list[Task]:
        if weighed:
            return to_given_tasks(questions, template=template)
        return to_tasks(questions, template=template, sampling=plan.sampling)

    with open_index(cache_folder() / "scoring") as index:
        references = index_input(plan.sources, index, id_column=plan.id_column, weighed=weighed)
        if not graders:
            names, why = references.graders()
            say(f"graders: {', '.join(names) or 'none'} ({why})")
            graders = open_graders(names)
        _require_references(graders, references, names_of(plan.sources))
        with lock_directory(directory := Path(plan.output_dir)):
            shards = _shards_in(directory, plan, template, index, weighed=weighed)
            if pending := index.count_pending():
                weighed_by = ", ".join(grader.name for grader in graders) if weighed else ""
                asked = elsewhere or partial(_asked_here, plan, tokenizer, template, on_bytes, watch)
                rows = read_numbered(plan.sources, index.pending(), id_column=plan.id_column, weighed=weighed)
                tasks = map(tasks_of, groups(rows, plan.shard_rows or rows_of_a_shard(plan)))
                for tokens in _answer_pending(
                    plan, index, shards, partial(asked, weighed_by, tasks), progress
                ):
                    on_tokens(tokens)
            else:
                progress(index.count_rows(), index.count_rows())
            grade_shards(shards, graders)
            keys = {grader.name: grader.key for grader in graders}
            tally = _Tally(graders)
            _write_outputs(directory, index, shards, keys, on_row=tally.add)
            report = tally.report(plan, seconds=time.perf_counter() - started, rows_asked=pending)
            write_atomically(directory / "report.json", to_json(report))
            return report


def _require_references(graders: Sequence[Grader], references: References, path: str) -> None:
    choosing = [grader.name for grader in graders if grader.row.needs_choices]
    if choosing and references.without_choices:
        raise RecipeError(
            f"{', '.join(choosing)}: {counted(references.without_choices, 'row')} of {path} without choices",
            hint="rows with choices have question, choices and answer (docs/scoring.md), or map "
            "choices=COLUMN beside prompt and completion; perplexity and loglikelihood take any reference",
        )
    needy = [grader.name for grader in graders if grader.row.needs_reference]
    if needy and references.missing:
        raise RecipeError(
            f"{', '.join(needy)}: {counted(references.missing, 'row')} of {path} without a reference",
            hint="leave --grader out, or name the column of the references",
        )


def _shards_in(
    directory: Path, plan: ScorePlan, template: ChatTemplate, index: Index, *, weighed: bool
) -> Shards:
    """The shards that are there, checked and in the index, in a directory that belongs to these settings."""
    served = f"{plan.engine}: {plan.served_model or plan.model}" if plan.engine == "server" else plan.engine
    wanted = manifest(
        engine=served, model=plan.model, adapter=plan.adapter, template=template.source, sources=plan.sources,
        sampling=None if weighed else plan.sampling, dtype=dtype_of(plan),
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
                f"{directory}: rows answered there that {what}: {count:,} ({', '.join(ids)})",
                hint="score into a new directory; here the data may only grow by new rows",
            )
    return shards


def _answer_pending(
    plan: ScorePlan,
    index: Index,
    shards: Shards,
    asked: Callable[[Callable[[int], None]], Iterator[list[Answer]]],
    progress: Callable[[int, int], None],
) -> Iterator[int]:
    """Answer the pending rows in stretches of the input's order, each a shard on the disk before the next one's; yields
    the tokens of each.

    Raises ScoringFailed, and writes nothing, when the engine fails for all rows of the first.
    """
    total = index.count_rows()
    written = told = total - index.count_pending()
    progress(written, total)

    def look(rows: int) -> None:
        nonlocal told
        told = written + rows
        progress(told, total)

    for number, answers in zip(shards.free_numbers(), asked(look), strict=False):
        if not written and len(answers) > 1 and all(answer.code == ENGINE_FAILED for answer in answers):
            raise ScoringFailed(f"the engine fails for every row: {answers[0].error}")
        shards.write(number, answers, model=plan.model)
        written += len(answers)
        yield sum(answer.tokens for answer in answers)
        if told != written:
            look(0)
    shards.add_to(index)


def _asked_here(
    plan: ScorePlan, tokenizer: Any, template: ChatTemplate, on_bytes: OnBytes, watch: Watch, weighed_by: str,
    tasks: Iterator[list[Task]], look: Callable[[int], None],
) -> Iterator[list[Answer]]:  # fmt: skip
    """The answers of each group by an engine of this process."""
    asker = open_asker(plan, tokenizer, template, on_bytes, weighed_by=weighed_by, watch=watch)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        look(done)

    try:
        group = next(tasks, None)
        while group is not None:
            done, ahead = 0, next(tasks, None)
            yield asker.ask(group, on_answer=count, ahead=ahead or ())
            group = ahead
    finally:
        asker.close()


class _Tally:
    """Counts and means over all rows, which are added one after another. Rows without an answer are graded 0: a
    failure is not left out. Rows without a grade are."""

    def __init__(self, graders: Sequence[Grader]) -> None:
        self._graders = graders
        self._counts: Counter[str] = Counter()
        self._means = {grader.name: WeightedMean(grader.scale) for grader in graders}
        self._ungraded: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, line: Line, grades: Mapping[str, Line]) -> None:
        self._counts["rows"] += 1
        self._counts["answered"] += line["response"] is not None
        self._counts["cut_off"] += is_cut_off(line)
        for what in ("completion_tokens", "weighed_tokens", "prompt_tokens"):
            self._counts[what] += tokens_of(line, what)
        for name, found in grades.items():
            self._errors[name] += bool(found.get("error"))
            if found["grade"] is None:
                self._ungraded[name] += 1
            else:
                self._means[name].add(float(found["grade"]), found.get("weight", 1.0))

    def report(self, plan: ScorePlan, *, seconds: float, rows_asked: int) -> ScoreReport:
        counts, means = self._counts, {name: mean.interval() for name, mean in self._means.items()}
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
            scales={grader.name: grader.scale for grader in self._graders},
            measures={grader.name: grader.measures for grader in self._graders},
            ungraded={name: count for name, count in self._ungraded.items() if count},
            grader_errors={name: count for name, count in self._errors.items() if count},
            weighed_tokens=counts["weighed_tokens"],
            prompt_tokens=counts["prompt_tokens"],
            rows_asked=rows_asked,
        )


def _write_outputs(
    directory: Path,
    index: Index,
    shards: Shards,
    keys: Mapping[str, str],
    *,
    on_row: Callable[[Line, Mapping[str, Line]], None],
) -> None:
    """Write answers.jsonl, grades.jsonl and answers.parquet, each whole, in one walk over the rows.

    ``keys``: grader -> key of its grades. ``on_row`` is given each row's answer and grades. Raises OSError.
    """
    with ExitStack() as stack:
        answers, graded, table = (
            stack.enter_context(written_whole(directory / name))
            for name in ("answers.jsonl", "grades.jsonl", "answers.parquet")
        )
        add_record = stack.enter_context(_parquet(table, graders=tuple(keys)))
        for id_, number, place in index.places():
            line, task = shards.answer(number, place, id_), shards.row(number, place, "tasks")
            grades = {name: shards.grade(number, key, place) for name, key in keys.items()}
            answers.write(shards.line(number, place))
            graded.write(_grade_line(line, task, grades))
            add_record(_record(line, task, grades))
            on_row(line, grades)


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
    body = line["response"]["body"] if line["response"] else None
    return {
        "custom_id": line["custom_id"],
        "prompt": task["prompt"],
        "expected": task["expected"],
        "answer": answer_text(line),
        "finish_reason": body["choices"][0].get("finish_reason") if body else None,
        "prompt_tokens": body["usage"]["prompt_tokens"] if body else None,
        "completion_tokens": body["usage"]["completion_tokens"] if body else None,
        "logprob": answer_logprob(line),
        "error": line["error"]["message"] if line["error"] else None,
        **{f"grade_{name}": found["grade"] for name, found in grades.items()},
    }


@contextmanager
def _parquet(file: BinaryIO, *, graders: Sequence[str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Takes records, and writes them in groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, count = pa.string(), pa.int64()
    schema = pa.schema(
        [
            ("custom_id", text), ("prompt", text), ("expected", text), ("answer", text), ("finish_reason", text),
            ("prompt_tokens", count), ("completion_tokens", count), ("logprob", pa.float64()), ("error", text),
            *((f"grade_{name}", pa.float64()) for name in graders),
        ]
    )  # fmt: skip
    group: list[dict[str, Any]] = []
    with pq.ParquetWriter(file, schema) as writer:

        def write() -> None:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            group.clear()

        def add(record: dict[str, Any]) -> None:
            group.append(record)
            if len(group) == _ROW_GROUP:
                write()

        yield add
        if group:
            write()
