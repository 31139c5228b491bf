"""The first pass over the input: every row is numbered and hashed, ids are checked, before anything is computed."""

from collections.abc import Iterator, Sequence

from fitune.errors import DataError
from fitune.score.grades.graders import References
from fitune.score.index import Index
from fitune.score.tasks import Question, id_column_of, read_questions
from fitune.spec.plan import DataSource

_SHOWN = 5
"""Most faulty rows that an error lists."""


def index_input(
    sources: Sequence[DataSource], index: Index, *, id_column: str = "", weighed: bool = False
) -> References:
    """Put every row of the sources into ``index``; returns facts of the references.

    Raises DataError when ids are missing or appear twice, listing the first ones, and what ``read_questions`` raises.
    """
    references = References()

    def rows() -> Iterator[tuple[int, str, str]]:
        for number, question in enumerate(read_questions(sources, id_column=id_column, weighed=weighed), 1):
            if not question.problem:
                references.add(
                    question.expected, has_choices=bool(question.choices), has_calls=bool(question.calls)
                )
            yield number, question.id, question.content

    index.add_rows(rows())
    _refuse_missing(sources, index, id_column)
    _refuse_repeated(sources, index, id_column)
    index.index_rows()
    return references


def read_numbered(
    sources: Sequence[DataSource], numbers: Iterator[int], *, id_column: str = "", weighed: bool = False
) -> Iterator[Question]:
    """The rows of these numbers, which come in ascending order."""
    wanted = next(numbers, 0)
    for number, question in enumerate(read_questions(sources, id_column=id_column, weighed=weighed), 1):
        if not wanted:
            return
        if number == wanted:
            yield question
            wanted = next(numbers, 0)


def _refuse_missing(sources: Sequence[DataSource], index: Index, id_column: str) -> None:
    if count := index.count_missing():
        places = _places(sources, index.missing(_SHOWN), id_column)
        raise DataError(
            f"{count} of {index.count_rows()} rows have no id in column {id_column_of(sources, id_column)!r}: "
            f"{_first(list(places.values()), count)}",
            hint="give every row a text or a whole number there, or name another column",
        )


def _refuse_repeated(sources: Sequence[DataSource], index: Index, id_column: str) -> None:
    if count := index.count_repeated():
        pairs = index.repeated(_SHOWN)
        places = _places(sources, [number for pair in pairs for number in pair], id_column)
        shown = [
            f"{places[again]}, already at {places[first].partition(' at ')[2]}" for again, first in pairs
        ]
        raise DataError(
            f"{count} of {index.count_rows()} rows repeat an id of column {id_column_of(sources, id_column)!r}: "
            f"{_first(shown, count)}",
            hint="make the ids unique, or name another column; each id is answered exactly once",
        )


def _places(sources: Sequence[DataSource], numbers: list[int], id_column: str) -> dict[int, str]:
    """Number of a row -> its id and where it stands."""
    wanted = sorted(set(numbers))
    found = read_numbered(sources, iter(wanted), id_column=id_column, weighed=True)
    return {
        number: f"{question.id!r} at {question.where}" if question.id else question.where
        for number, question in zip(wanted, found, strict=True)
    }


def _first(shown: list[str], count: int) -> str:
    more = f"; and {count - len(shown)} more" if count > len(shown) else ""
    return "; ".join(shown) + more
