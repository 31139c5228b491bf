"""Fingerprint of model, adapter, data and sampling beside the answers: equal for two equal scorings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically
from fitune.models.identity import identity
from fitune.score.generate_hf import Sampling
from fitune.score.lines import Line, prompt_fingerprint
from fitune.score.tasks import Task
from fitune.spec.plan import DataSource
from fitune.spec.run_directory import LOCK
from fitune.spec.serial import read_object

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
