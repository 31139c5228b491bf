"""Lines that scoring writes: OpenAI batch output, in an answers file that survives a kill."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import open_for_append, open_regular
from fitune.score.generate_hf import Answer
from fitune.spec.serial import parse_json

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
