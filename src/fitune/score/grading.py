"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever."""

from collections.abc import Iterator, Sequence

from fitune.errors import RecipeError
from fitune.score.answers import Line, answer_text
from fitune.score.grader_process import GradeFailed, GuardedGrader
from fitune.score.graders import Grader, Kind
from fitune.score.shards import Shards
from fitune.spec.serial import parse_json


def try_graders(graders: Sequence[Grader]) -> None:
    """Start each grader that runs in a process of its own. Raises RecipeError for one that cannot be loaded."""
    for grader in graders:
        guarded = _guarded(grader)
        try:
            if guarded is not None:
                guarded.start()
        except GradeFailed as failed:
            raise RecipeError(f"grader {grader.name!r}: {failed}") from None
        finally:
            if guarded is not None:
                guarded.close()


def grade_shards(shards: Shards, graders: Sequence[Grader]) -> None:
    """Grade what is not graded yet. A grader that raises or hangs leaves an error in its row, and the grade 0."""
    for grader in graders:
        guarded = _guarded(grader)
        try:
            for number in shards.numbers():
                if not shards.has_grades(number, grader.key):
                    shards.write_grades(number, grader.key, _grades(shards, number, grader, guarded))
        finally:
            if guarded is not None:
                guarded.close()


def _guarded(grader: Grader) -> GuardedGrader | None:
    row = grader.row
    return GuardedGrader(grader.kind, grader.argument) if row.grade is None and row.weigh is None else None


def _grades(shards: Shards, number: int, grader: Grader, guarded: GuardedGrader | None) -> Iterator[Line]:
    for answered, asked in zip(shards.lines(number), shards.lines(number, "tasks"), strict=True):
        line, task = parse_json(answered), parse_json(asked)
        text = answer_text(line)
        if grader.row.weigh:
            yield _weighed_grade(grader.row, line)
        elif text is None:
            yield {"grade": 0.0}
        elif guarded is not None:
            yield _guarded_grade(guarded, text, task)
        elif function := grader.row.grade:
            yield {"grade": function(text, task["expected"])}


def _weighed_grade(kind: Kind, line: Line) -> Line:
    """A row that could not be weighed has not chosen the right one; of its likelihood nothing is known."""
    assert kind.weigh is not None
    if not line["response"]:
        return {"grade": 0.0 if kind.needs_choices else None}
    found = kind.weigh(line["response"]["body"])
    weight = {"weight": found.weight} if kind.scale == "perplexity" else {}
    return {"grade": found.grade, **weight}


def _guarded_grade(guarded: GuardedGrader, text: str, task: Line) -> Line:
    try:
        return {"grade": guarded.grade(answer=text, expected=task["expected"], prompt=task["prompt"])}
    except GradeFailed as failed:
        return {"grade": 0.0, "error": str(failed)}
