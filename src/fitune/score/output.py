"""The files that a finished scoring leaves: every row once, in the order of the input, merged from the shards."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.files import sync_folder, temporary_sibling, write_synced
from fitune.score.answers import answer_logprob, answer_text
from fitune.score.index import Index
from fitune.score.shards import Shards, groups
from fitune.spec.serial import parse_json

_ROW_GROUP = 4096
"""Rows that a group of the parquet file holds, and this process at a time."""


def write_outputs(directory: Path, index: Index, shards: Shards, keys: Mapping[str, str]) -> None:
    """Write answers.jsonl, grades.jsonl and answers.parquet, each whole. ``keys``: grader -> key of its grades."""
    _write(directory / "answers.jsonl", (shards.line(*place) for place in index.places()))
    _write(directory / "grades.jsonl", _grade_lines(index, shards, keys))
    _write_parquet(directory / "answers.parquet", _records(index, shards, keys), graders=tuple(keys))


def read_lines(index: Index, shards: Shards) -> Iterator[dict[str, Any]]:
    """The answer lines in the order of the input."""
    return (parse_json(shards.line(*place)) for place in index.places())


def read_grades(index: Index, shards: Shards, key: str) -> Iterator[dict[str, Any]]:
    """Lines of one grader, in the order of the input."""
    return (parse_json(shards.grade(number, key, place)) for number, place in index.places())


def _grade_lines(index: Index, shards: Shards, keys: Mapping[str, str]) -> Iterator[bytes]:
    for number, place in index.places():
        line, task = parse_json(shards.line(number, place)), parse_json(shards.line(number, place, "tasks"))
        given = {name: parse_json(shards.grade(number, key, place)) for name, key in keys.items()}
        row = {
            "id": line["custom_id"],
            "expected": task["expected"],
            "grades": {name: found["grade"] for name, found in given.items()},
        }
        for field, named in (("errors", "error"), ("weights", "weight"), ("said", "said")):
            if told := {name: found[named] for name, found in given.items() if found.get(named)}:
                row[field] = told
        yield f"{json.dumps(row, ensure_ascii=False)}\n".encode()


def _records(index: Index, shards: Shards, keys: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for number, place in index.places():
        line, task = parse_json(shards.line(number, place)), parse_json(shards.line(number, place, "tasks"))
        body = line["response"]["body"] if line["response"] else None
        finish = body["choices"][0].get("finish_reason") if body else None
        yield {
            "custom_id": line["custom_id"],
            "prompt": task["prompt"],
            "expected": task["expected"],
            "answer": answer_text(line),
            "finish_reason": finish,
            "prompt_tokens": body["usage"]["prompt_tokens"] if body else None,
            "completion_tokens": body["usage"]["completion_tokens"] if body else None,
            "logprob": answer_logprob(line),
            "error": line["error"]["message"] if line["error"] else None,
            **{
                f"grade_{name}": parse_json(shards.grade(number, key, place))["grade"]
                for name, key in keys.items()
            },
        }


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """The file is the old one or the new one, never a part of it; not held in memory."""
    temporary = temporary_sibling(path)
    try:
        write_synced(temporary, chunks)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write_parquet(path: Path, records: Iterator[dict[str, Any]], *, graders: Sequence[str]) -> None:
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
    temporary = temporary_sibling(path)
    try:
        with pq.ParquetWriter(temporary, schema) as writer:
            for group in groups(records, _ROW_GROUP):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
        sync_folder(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
