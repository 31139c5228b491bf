"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever.

Of a judge's shard the rows that it did not answer are asked again by the next run.
"""

from collections.abc import Iterator, Sequence

from fitune.errors import RecipeError
from fitune.score.answers import Line, answer_text
from fitune.score.grades.grader_process import GradeFailed, GuardedGrader
from fitune.score.grades.graders import Grader, Kind
from fitune.score.grades.judging import Judging
from fitune.score.shards import Shards
from fitune.spec.serial import parse_json

Helper = GuardedGrader | Judging | None
"""Who grades where a function of two texts does not do: a process, or a judge."""


def try_graders(graders: Sequence[Grader]) -> None:
    """Start each grader that runs in a process of its own, and try each judge.

    Raises RecipeError for one that cannot be loaded or asked.
    """
    for grader in graders:
        helper = _helper(grader)
        try:
            if isinstance(helper, GuardedGrader):
                helper.start()
            elif helper is not None:
                helper.try_out()
        except GradeFailed as failed:
            raise RecipeError(f"grader {grader.name!r}: {failed}") from None
        finally:
            if helper is not None:
                helper.close()


def grade_shards(shards: Shards, graders: Sequence[Grader]) -> None:
    """Grade what is not graded yet. A grader that raises or hangs leaves an error in its row, and the grade 0; a judge
    that does not answer, or says nothing that can be read, an error and no grade."""
    for grader in graders:
        helper = _helper(grader)
        try:
            for number in shards.numbers():
                earlier = _earlier(shards, number, grader)
                if earlier is None or any(line.get("retry") for line in earlier):
                    shards.write_grades(
                        number, grader.key, _grades(shards, number, grader, helper, earlier or ())
                    )
        finally:
            if helper is not None:
                helper.close()


def _helper(grader: Grader) -> Helper:
    row = grader.row
    if row.judges:
        return Judging(grader.argument)
    return GuardedGrader(grader.kind, grader.argument) if row.grade is None and row.weigh is None else None


def _earlier(shards: Shards, number: int, grader: Grader) -> list[Line] | None:
    """The shard's grades by a judge; empty for another grader, which is not asked twice; None: not graded."""
    if not shards.has_grades(number, grader.key):
        return None
    return [parse_json(line) for line in shards.grades(number, grader.key)] if grader.row.judges else []


def _grades(
    shards: Shards, number: int, grader: Grader, helper: Helper, earlier: Sequence[Line]
) -> Iterator[Line]:
    rows = zip(shards.lines(number), shards.lines(number, "tasks"), strict=True)
    read = ((parse_json(answered), parse_json(asked)) for answered, asked in rows)
    if isinstance(helper, Judging):
        yield from helper.grades(list(read), earlier)
        return
    for line, task in read:
        text = answer_text(line)
        if grader.row.weigh:
            yield _weighed_grade(grader.row, line)
        elif text is None:
            yield {"grade": 0.0}
        elif helper is not None:
            yield _guarded_grade(helper, text, task)
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
