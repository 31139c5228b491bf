"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever.

Of a judge's shard the rows that it did not answer are asked again by the next run. Patterns, schemas and functions are
called here, without a limit of time: whoever names one that never ends, ends it with Ctrl-C, and graded shards stay.
"""

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

from fitune.data.conversations.tool_calls import calls_in_text
from fitune.data.reading.rows import BadRow, Row
from fitune.errors import FituneError, RecipeError
from fitune.score.answers import Line, answer_text
from fitune.score.grades.graders import Grader, json_schema, regex
from fitune.score.grades.judging import Judging
from fitune.score.shards import Shards
from fitune.spec.serial import require_shallow

_DECODER = json.JSONDecoder()
_canonical = partial(json.dumps, sort_keys=True)


def try_graders(graders: Sequence[Grader]) -> None:
    """Load each pattern, schema and function, and try each judge. Raises RecipeError for one that cannot be used."""
    for grader in graders:
        try:
            if grader.row.judges:
                with closing(Judging(grader.argument)) as judge:
                    judge.try_out()
            elif not (grader.row.grade or grader.row.weigh):
                _loaded(grader)
        except FituneError:
            raise
        except Exception as error:  # a file of Python may raise anything
            raise RecipeError(f"grader {grader.name!r}: {type(error).__name__}: {error}") from None


def grade_shards(shards: Shards, graders: Sequence[Grader]) -> None:
    """Grade what is not graded yet. A grader that raises leaves an error in its row, and the grade 0; a judge that does
    not answer, or says nothing that can be read, an error and no grade."""
    for number in shards.numbers():
        missing = [g for g in graders if not g.row.judges and not shards.has_grades(number, g.key)]
        read = _read(shards, number) if missing else []  # once for all of them
        for grader in missing:
            shards.write_grades(number, grader.key, (grade_line(grader, *both) for both in read))
    for grader in graders:
        if grader.row.judges:
            with closing(Judging(grader.argument)) as judge:
                for number in shards.numbers():
                    earlier = (
                        shards.grades(number, grader.key) if shards.has_grades(number, grader.key) else None
                    )
                    if earlier is None or any(line.get("retry") for line in earlier):
                        graded = judge.grades(_read(shards, number), earlier or [])
                        shards.write_grades(number, grader.key, graded)


def _read(shards: Shards, number: int) -> list[tuple[Line, Line]]:
    """Each answer of a shard, and what was asked."""
    return list(zip(shards.rows(number), shards.rows(number, "tasks"), strict=True))


def grade_line(grader: Grader, line: Line, task: Line) -> Line:
    """The line of the grade of one answer, beside the task that was asked."""
    kind = grader.row
    if kind.weigh:
        # a row that could not be weighed has not chosen the right one; of its likelihood nothing is known
        if not line["response"]:
            return {"grade": 0.0 if kind.needs_choices else None}
        found = kind.weigh(line["response"]["body"])
        return {"grade": found.grade, **({"weight": found.weight} if kind.scale == "perplexity" else {})}
    text = answer_text(line)
    if text is None:
        return {"grade": 0.0}
    if kind.of_calls and task.get("calls"):
        return {"grade": float(kind.of_calls(*compared_calls(text, task["expected"], task["calls"])))}
    if kind.grade:
        return {"grade": kind.grade(text, task["expected"])}
    try:
        value = _loaded(grader)(answer=text, expected=task["expected"], prompt=task["prompt"])
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(f"the function returned {value!r:.40}, not a finite number")
        return {"grade": float(value)}
    except Exception as error:  # whatever somebody's function raises is an error of the row
        return {"grade": 0.0, "error": f"{type(error).__name__}: {error}"[:500]}


@cache
def _loaded(grader: Grader) -> Callable[..., Any]:
    """The pattern, the schema or the function as a function of answer, expected and prompt."""
    if grader.kind == "python":
        path, _, name = grader.argument.rpartition(":")
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
        return function
    compare = regex if grader.kind == "regex" else json_schema
    compare("", grader.argument)  # a pattern that is none, a schema that is none, a library that is missing
    return lambda answer, **_: compare(answer, grader.argument)


def compared_calls(answer: str, expected: str, wanted: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of ``answer`` and of ``expected``, each as canonical JSON. ``wanted``: those of ``expected``
    as the data has them."""
    # Most templates write a call as JSON with the tool's name and its arguments, between tokens of their own: these are
    # compared in any order, whatever else is said. Where a template writes them in another way (a name in front of the
    # arguments, tags) the words are compared, and the JSON among them by value.
    calls = Counter(_canonical(json.loads(call)) for call in wanted)
    said, meant = _parts(answer), _parts(expected)
    if _calls(meant) == calls:
        return _calls(said), calls
    return Counter([_canonical(said)]), Counter([_canonical(meant)])


def _parts(text: str) -> list[Any]:
    """Words, and JSON's objects and lists, in their order."""
    parts: list[Any] = []
    at = begin = 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, end = _DECODER.raw_decode(text, at)
                require_shallow(value)
            except RecursionError:
                break  # brackets without end
            except ValueError:
                pass
            else:
                parts += [*text[begin:at].split(), value]
                at = begin = end
                continue
        at += 1
    return parts + text[begin:].split()


def _calls(parts: Sequence[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        if not isinstance(part, str):
            try:
                calls = calls_in_text(Row("", {}), "", part)
            except BadRow:
                continue
            found.update(
                _canonical({"name": call.name, "arguments": json.loads(call.arguments)}) for call in calls
            )
    return found
