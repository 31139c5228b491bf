"""Lines of OpenAI's batch output, and the fingerprint of a scoring's directory.

The fingerprint is of engine, model, adapter, template, data and sampling: equal for two equal scorings.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically
from fitune.models.weight_files import identity
from fitune.score.engine import Sampling
from fitune.score.tasks import Answer
from fitune.spec.plan import DataSource
from fitune.spec.run_directory import LOCK
from fitune.spec.serial import read_object

Line = dict[str, Any]


def answer_line(answer: Answer, *, model: str) -> Line:
    """One line as OpenAI's batch API writes it; ``request_id`` is the hash of the prompt's token ids.

    ``token_ids`` and ``logprob`` (their sum in nats) stand beside the message, as far as the engine tells them.
    """
    task = answer.task
    line: Line = {"id": f"answer-{task.fingerprint}", "custom_id": task.id, "response": None, "error": None}
    if answer.error:
        return line | {
            "error": {"code": answer.code, "message": answer.error, "request_id": task.fingerprint}
        }
    prompt, completion = len(task.prompt_ids), answer.completion_tokens
    known = {} if answer.logprob is None else {"logprob": round(answer.logprob, 6)}
    body = {
        "object": "chat.completion",
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
                "token_ids": list(answer.token_ids),
                **known,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    return line | {"response": {"status_code": 200, "request_id": task.fingerprint, "body": body}}


def answer_text(line: Line) -> str | None:
    """The model's answer, or None where the row carries an error."""
    return line["response"]["body"]["choices"][0]["message"]["content"] if line["response"] else None


def completion_tokens(line: Line) -> int:
    return line["response"]["body"]["usage"]["completion_tokens"] if line["response"] else 0


def is_cut_off(line: Line) -> bool:
    """True if the answer ended because it had as many tokens as it may have."""
    return bool(line["response"]) and line["response"]["body"]["choices"][0]["finish_reason"] == "length"


MANIFEST = "manifest.json"
CHANGED = "changed.jsonl"
"""Rows whose grade differs from another scoring's."""
OURS = (MANIFEST, CHANGED, "answers.jsonl", "answers.parquet", "grades.jsonl", "report.json", LOCK)
"""The files that scoring writes into its directory; shards stand in a folder beside them."""


def manifest(
    *,
    engine: str,
    model: str,
    adapter: str,
    template: str,
    data: DataSource,
    sampling: Sampling,
    dtype: str,
) -> dict[str, Any]:
    """The settings that an answer depends on. Rows are hashed one by one, in the shards themselves: so a dataset may
    grow, and a changed prompt still shows. The tokenizer's files are among the model's.
    """
    return {
        "engine": engine,
        "model": identity(model),
        "adapter": identity(adapter),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "data": f"{Path(data.path).name}, split {data.split}, sample {data.sample}",
        "dtype": dtype,
        "sampling": dataclasses.asdict(sampling),
    }


def claim(directory: Path, wanted: dict[str, Any], *, has_shards: bool) -> None:
    """Write the manifest into a directory without answers, or agree with the one its answers were made under.

    Raises RunDirectoryError with the table of differences, or when the directory holds foreign files.
    """
    path = directory / MANIFEST
    if has_shards and path.exists():
        _refuse_differences(directory, _read(path), wanted)
        return
    foreign = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.name not in (*OURS, "shards") and entry.name[0] != "."
    )
    if foreign or has_shards or (directory / "answers.jsonl").exists():
        found = ", ".join(foreign[:3]) or (
            "shards without a manifest" if has_shards else "answers without shards"
        )
        raise RunDirectoryError(
            f"{directory}: not a scoring directory, it holds {found}", hint="name a new one"
        )
    write_atomically(path, json.dumps(wanted, indent=2, ensure_ascii=False) + "\n")


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
