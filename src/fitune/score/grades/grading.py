"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever.

Of a judge's shard the rows that it did not answer are asked again by the next run.
"""

from collections.abc import Sequence

from fitune.errors import RecipeError
from fitune.score.answers import Line, answer_text
from fitune.score.grades.calls import compared_calls
from fitune.score.grades.grader_process import GradeFailed, GuardedGrader
from fitune.score.grades.graders import Grader, Kind
from fitune.score.grades.judging import Judging
from fitune.score.shards import Shards

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
    alone = [grader for grader in graders if grader.row.grade or grader.row.weigh]
    for number in shards.numbers():
        if missing := [grader for grader in alone if not shards.has_grades(number, grader.key)]:
            read = _read(shards, number)  # once for all of them
            for grader in missing:
                shards.write_grades(number, grader.key, (_grade(grader.row, *both) for both in read))
    for grader in graders:
        helper = _helper(grader)
        if helper is not None:
            try:
                _grade_with(helper, shards, grader)
            finally:
                helper.close()


def _read(shards: Shards, number: int) -> list[tuple[Line, Line]]:
    """Each answer of a shard, and what was asked."""
    return list(zip(shards.rows(number), shards.rows(number, "tasks"), strict=True))


def _helper(grader: Grader) -> Helper:
    row = grader.row
    if row.judges:
        return Judging(grader.argument)
    return GuardedGrader(grader.kind, grader.argument) if row.grade is None and row.weigh is None else None


def _grade_with(helper: GuardedGrader | Judging, shards: Shards, grader: Grader) -> None:
    for number in shards.numbers():
        is_graded = shards.has_grades(number, grader.key)
        if isinstance(helper, GuardedGrader):
            if not is_graded:
                graded = (_guarded_grade(helper, *both) for both in _read(shards, number))
                shards.write_grades(number, grader.key, graded)
            continue
        earlier = shards.grades(number, grader.key) if is_graded else []
        if not is_graded or any(line.get("retry") for line in earlier):
            shards.write_grades(number, grader.key, helper.grades(_read(shards, number), earlier))


def _grade(kind: Kind, line: Line, task: Line) -> Line:
    if kind.weigh:
        return _weighed_grade(kind, line)
    text = answer_text(line)
    if text is None:
        return {"grade": 0.0}
    if kind.of_calls and task.get("calls"):
        return {"grade": float(kind.of_calls(*compared_calls(text, task["expected"], task["calls"])))}
    assert kind.grade is not None
    return {"grade": kind.grade(text, task["expected"])}


def _weighed_grade(kind: Kind, line: Line) -> Line:
    """A row that could not be weighed has not chosen the right one; of its likelihood nothing is known."""
    assert kind.weigh is not None
    if not line["response"]:
        return {"grade": 0.0 if kind.needs_choices else None}
    found = kind.weigh(line["response"]["body"])
    weight = {"weight": found.weight} if kind.scale == "perplexity" else {}
    return {"grade": found.grade, **weight}


def _guarded_grade(guarded: GuardedGrader, line: Line, task: Line) -> Line:
    text = answer_text(line)
    if text is None:
        return {"grade": 0.0}
    try:
        return {"grade": guarded.grade(answer=text, expected=task["expected"], prompt=task["prompt"])}
    except GradeFailed as failed:
        return {"grade": 0.0, "error": str(failed)}
