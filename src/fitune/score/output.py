"""The files that a finished scoring leaves: every row once, in the order of the input, merged from the shards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json

from fitune.files import written_whole
from fitune.score.answers import Line, answer_logprob, answer_text
from fitune.score.index import Index
from fitune.score.shards import Shards

_ROW_GROUP = 1024
"""Rows that a group of the parquet file holds, and this process at a time."""

Graded = Mapping[str, Line]
"""Grader -> the line of its grade."""


def write_outputs(
    directory: Path,
    index: Index,
    shards: Shards,
    keys: Mapping[str, str],
    *,
    on_row: Callable[[Line, Graded], None],
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


def _grade_line(line: Line, task: Line, grades: Graded) -> bytes:
    row = {
        "id": line["custom_id"],
        "expected": task["expected"],
        "grades": {name: found["grade"] for name, found in grades.items()},
    }
    for field, named in (("errors", "error"), ("weights", "weight"), ("said", "said")):
        if told := {name: found[named] for name, found in grades.items() if found.get(named)}:
            row[field] = told
    return to_json(row) + b"\n"


def _record(line: Line, task: Line, grades: Graded) -> dict[str, Any]:
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
