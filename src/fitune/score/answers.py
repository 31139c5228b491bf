"""Lines of OpenAI's batch output, and the manifest of a scoring's directory: settings that its answers depend on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, write_atomically
from fitune.score.tasks import Answer
from fitune.values.run_directory import LOCK
from fitune.values.serial import read_object

Line = dict[str, Any]

LIKELIHOODS = "likelihoods"
"""The object of a line with the log-likelihoods of given texts, in place of chat.completion."""


def answer_line(answer: Answer, *, model: str) -> Line:
    """One line as OpenAI's batch API writes it; ``request_id`` is the hash of the prompt's token ids.

    ``token_ids`` and ``logprob`` (their sum in nats) stand beside the message, as far as the engine tells them.
    """
    task, asked = answer.task, answer.task.fingerprint
    line: Line = {"id": f"answer-{asked}", "custom_id": task.id, "response": None, "error": None}
    if answer.error:
        return line | {"error": {"code": answer.code, "message": answer.error, "request_id": asked}}
    usage = {"prompt_tokens": len(task.prompt_ids), "completion_tokens": answer.completion_tokens}
    if answer.likelihoods:
        body = {
            "object": LIKELIHOODS, "model": model, "choices": _given_choices(answer),
            "right": task.question.right,
        }  # fmt: skip
        usage["weighed_tokens"] = sum(len(given.token_ids) for given in task.given)
    else:
        message = {"role": "assistant", "content": answer.text}
        choice = {
            "index": 0, "message": message, "finish_reason": answer.finish_reason, "token_ids": list(answer.token_ids)
        }  # fmt: skip
        if answer.logprob is not None:
            choice["logprob"] = round(answer.logprob, 6)
        body = {"object": "chat.completion", "model": model, "choices": [choice]}
    body["usage"] = usage | {"total_tokens": sum(usage.values())}
    return line | {"response": {"status_code": 200, "request_id": asked, "body": body}}


def _given_choices(answer: Answer) -> list[Line]:
    """A choice for each given text: log-probabilities, in nats, of the text and of the tokens that end the answer."""
    choices = []
    for index, (given, found) in enumerate(zip(answer.task.given, answer.likelihoods, strict=True)):
        border = len(given.token_ids) - given.end_tokens
        choices.append(
            {
                "index": index, "text": given.text, "tokens": border, "end_tokens": given.end_tokens,
                "logprob": round(sum(found.logprobs[:border]), 6),
                "end_logprob": round(sum(found.logprobs[border:]), 6), "is_greedy": found.is_greedy,
            }
        )  # fmt: skip
    return choices


def body_of(line: Line) -> Line:
    """The body of the response; empty where the row carries an error."""
    body: Line = line["response"]["body"] if line["response"] else {}
    return body


def likeliest(body: Line, size: Callable[[Any], float] = lambda choice: 1.0) -> int:
    """The place of the choice with the highest log-probability per ``size``; of equal ones the first."""
    scores = [choice["logprob"] / size(choice) for choice in body["choices"]]
    return scores.index(max(scores))


def answer_text(line: Line) -> str | None:
    """The model's answer: of several given texts the likeliest. None where the row carries an error, and where one
    text was given."""
    body = body_of(line)
    if not body:
        return None
    if body["object"] != LIKELIHOODS:
        text: str = body["choices"][0]["message"]["content"]
        return text
    return body["choices"][likeliest(body)]["text"] if len(body["choices"]) > 1 else None


def written_rows(path: Path, *fields: str, check: Callable[[Line], object]) -> Iterator[tuple[bytes, Line]]:
    """Each row of a finished scoring's file as it is written, and read; it has these fields, a text in the first, and
    ``check`` raises nothing for it. Raises RunDirectoryError."""
    try:
        with open_regular(path, follow_links=False) as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                missing = [field for field in fields if not isinstance(row, dict) or field not in row]
                if missing or not isinstance(row[fields[0]], str):
                    raise ValueError(f"line {number} has no {(*missing, fields[0])[0]}")
                try:
                    check(row)
                except (LookupError, TypeError, AttributeError):
                    raise ValueError(f"line {number} is not as it was written") from None
                yield line, row
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path.parent}: has no {path.stem} that can be read: {error}",
            hint="name the --out of a finished score",
        ) from None


MANIFEST = "manifest.json"
CHANGED = "changed.jsonl"
"""Rows whose grade differs from another scoring's."""
PAGES = ("score.html", "comparison.html")
OURS = (MANIFEST, CHANGED, *PAGES, "answers.jsonl", "answers.parquet", "grades.jsonl", "report.json", LOCK)
"""The files that scoring writes into its directory; shards stand in a folder beside them."""


def claim(directory: Path, wanted: dict[str, Any], *, has_shards: bool) -> None:
    """Write the manifest into a directory without answers, or agree with the one its answers were made under.

    Raises RunDirectoryError with the table of differences, or when the directory holds foreign files.
    """
    path = directory / MANIFEST
    if has_shards and path.exists():
        try:
            found = read_object(path, follow_links=False)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{path}: cannot be read: {error}", hint="score into a new directory"
            ) from None
        differences = [
            f"  {key}: {found.get(key)!r:.200} there, {wanted.get(key)!r:.200} now"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        ]
        if differences:
            raise RunDirectoryError(
                f"{directory} holds answers of other settings:\n" + "\n".join(differences),
                hint="name a new directory, or the settings that began this one",
            )
        return
    foreign = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.name not in (*OURS, "shards") and entry.name[0] != "."
    )
    if foreign or has_shards or (directory / "answers.jsonl").exists():
        held = ", ".join(foreign[:3]) or (
            "shards without a manifest" if has_shards else "answers without shards"
        )
        raise RunDirectoryError(
            f"{directory}: not a scoring directory, it holds {held}", hint="name a new one"
        )
    write_atomically(path, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")
