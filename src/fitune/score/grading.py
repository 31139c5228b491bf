"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever."""

import hashlib
from collections.abc import Iterator, Sequence

from fitune.score.answers import Line, answer_text
from fitune.score.graders import grade
from fitune.score.shards import Shards
from fitune.spec.serial import parse_json


def grade_shards(shards: Shards, graders: Sequence[str]) -> dict[str, str]:
    """Grade what is not graded yet; returns the key of each grader's grades."""
    keys = {name: hashlib.sha256(name.encode()).hexdigest()[:12] for name in graders}
    for number in shards.numbers():
        for name, key in keys.items():
            if not shards.has_grades(number, key):
                shards.write_grades(number, key, _grades(shards, number, name))
    return keys


def _grades(shards: Shards, number: int, name: str) -> Iterator[Line]:
    for answered, asked in zip(shards.lines(number), shards.lines(number, "tasks"), strict=True):
        text, task = answer_text(parse_json(answered)), parse_json(asked)
        yield {"grade": 0.0 if text is None else grade(name, text, task["expected"])}
