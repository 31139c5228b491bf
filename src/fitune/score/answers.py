"""The answers file of a scoring: OpenAI batch output lines that survive a kill, and the fingerprint beside them.

The fingerprint is of model, adapter, data and sampling: equal for two equal scorings.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import open_for_append, open_regular, write_atomically
from fitune.models.weight_files import identity
from fitune.score.generate_hf import Answer, Sampling
from fitune.score.tasks import Task
from fitune.spec.plan import DataSource
from fitune.spec.run_directory import LOCK
from fitune.spec.serial import parse_json, read_object

Line = dict[str, Any]


def answer_line(answer: Answer, *, model: str) -> Line:
    """One line as OpenAI's batch API writes it; ``request_id`` is the hash of the prompt's token ids."""
    task = answer.task
    line: Line = {"id": f"answer-{task.fingerprint}", "custom_id": task.id, "response": None, "error": None}
    if answer.error:
        return line | {
            "error": {"code": "prompt_too_long", "message": answer.error, "request_id": task.fingerprint}
        }
    prompt, completion = len(task.prompt_ids), answer.completion_tokens
    body = {
        "object": "chat.completion",
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    return line | {"response": {"status_code": 200, "request_id": task.fingerprint, "body": body}}


def prompt_fingerprint(line: Line) -> str:
    return str((line["response"] or line["error"])["request_id"])


def answer_text(line: Line) -> str | None:
    """The model's answer, or None where the row carries an error."""
    return line["response"]["body"]["choices"][0]["message"]["content"] if line["response"] else None


def completion_tokens(line: Line) -> int:
    return line["response"]["body"]["usage"]["completion_tokens"] if line["response"] else 0


def read_answers(path: Path) -> list[Line]:
    """The lines written so far; a last line torn by a kill is cut off the file.

    Raises RunDirectoryError for a line that is damaged further up: no kill of ours does that.
    """
    try:
        with open_regular(path, follow_links=False) as file:
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return [
        _parse(text, where=f"{path}:{number}") for number, text in enumerate(content[:whole].splitlines(), 1)
    ]


def _parse(text: bytes, *, where: str) -> Line:
    try:
        line = parse_json(text)
    except ValueError as error:
        raise RunDirectoryError(
            f"{where}: not a line of answers: {error}", hint="score into a new directory"
        ) from None
    if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
        raise RunDirectoryError(f"{where}: not a line of answers", hint="score into a new directory")
    return line


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """One write, then fsync: after a kill only the last line can be torn."""
    with open_for_append(path) as file:
        file.write("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


MANIFEST = "manifest.json"
OURS = (MANIFEST, "answers.jsonl", "grades.jsonl", "report.json", LOCK)
"""The names that scoring writes into its directory."""


def manifest(*, model: str, adapter: str, data: DataSource, sampling: Sampling, dtype: str) -> dict[str, Any]:
    """The settings that an answer depends on. Prompts are hashed one by one, in the answers themselves:
    so a dataset may grow, and a changed prompt, template or tokenizer still shows.
    """
    return {
        "model": identity(model),
        "adapter": identity(adapter),
        "data": f"{Path(data.path).name}, split {data.split}, sample {data.sample}",
        "dtype": dtype,
        "sampling": dataclasses.asdict(sampling),
    }


def claim(directory: Path, wanted: dict[str, Any]) -> None:
    """Write the manifest into a directory without answers, or agree with the one its answers were made under.

    Raises RunDirectoryError with the table of differences, or when the directory holds foreign files.
    """
    path, answers = directory / MANIFEST, directory / "answers.jsonl"
    if answers.exists() and path.exists():
        _refuse_differences(directory, _read(path), wanted)
        return
    foreign = sorted(
        entry.name for entry in directory.iterdir() if entry.name not in OURS and entry.name[0] != "."
    )
    if foreign or answers.exists():
        found = ", ".join(foreign[:3]) or "answers.jsonl without a manifest"
        raise RunDirectoryError(
            f"{directory}: not a scoring directory, it holds {found}", hint="name a new one"
        )
    write_atomically(path, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")


def remove_scores(directory: Path) -> None:
    """Remove what scoring wrote into ``directory``, and the folder when nothing else is in it."""
    if not (directory / MANIFEST).is_file():
        return
    for name in OURS:
        (directory / name).unlink(missing_ok=True)
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def require_same_prompts(directory: Path, done: dict[str, Line], tasks: list[Task]) -> None:
    """Every answer on disk must belong to a row of the data, with the same prompt. Raises RunDirectoryError."""
    by_id = {task.id: task for task in tasks}
    lost = [id_ for id_ in done if id_ not in by_id]
    changed = [
        id_ for id_ in done if id_ in by_id and prompt_fingerprint(done[id_]) != by_id[id_].fingerprint
    ]
    for ids, what in ((lost, "are no longer in the data"), (changed, "have another prompt now")):
        if ids:
            raise RunDirectoryError(
                f"{directory}: {len(ids)} rows answered there {what}: {', '.join(ids[:5])}",
                hint="score into a new directory; data, template and tokenizer may only grow by new rows here",
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, follow_links=False)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path}: cannot be read: {error}", hint="score into a new directory"
        ) from None


def _refuse_differences(directory: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"  {key}: {found.get(key)!r} there, {wanted.get(key)!r} now"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]
    if differences:
        raise RunDirectoryError(
            f"{directory} holds answers of other settings:\n" + "\n".join(differences),
            hint="name a new directory, or the settings that began this one",
        )
