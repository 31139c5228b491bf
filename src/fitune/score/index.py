"""The rows of the input and the answers on the disk, by id: a database in a temporary file, so memory stays constant
from a thousand rows to millions.
"""

import errno
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fitune.errors import DataError
from fitune.files import remove, remove_stale_siblings, temporary_sibling
from fitune.score.grades.graders import References
from fitune.score.tasks import Question, id_column_of, read_questions
from fitune.spec.plan import DataSource

_SHOWN = 5
"""Most faulty rows that an error lists."""

_TABLES = """
CREATE TABLE rows (number INTEGER PRIMARY KEY, id TEXT NOT NULL, content TEXT NOT NULL);
CREATE TABLE lines (
    id TEXT NOT NULL, content TEXT NOT NULL, state INTEGER NOT NULL,
    shard INTEGER NOT NULL, place INTEGER NOT NULL
);
"""
_BEST = """
CREATE INDEX lines_of_id ON lines (id, state DESC, shard DESC);
CREATE TABLE best AS SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY id ORDER BY state DESC, shard DESC) AS nth FROM lines
) WHERE nth = 1;
CREATE UNIQUE INDEX best_of_id ON best (id);
"""

_LINES_BY_ID = "CREATE TABLE texts (id TEXT PRIMARY KEY, line BLOB NOT NULL) WITHOUT ROWID;"
_SETTINGS = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-4096")

RETRY, REFUSED, ANSWERED = 0, 1, 2
"""State of a line: an error that another try may mend, an error of the row itself, an answer. The highest counts."""


@contextmanager
def open_index(directory: Path) -> Iterator["Index"]:
    """An empty index, in a file of ``directory`` that is gone afterwards. Raises OSError when the disk is full."""
    with _database(directory, _TABLES) as connection:
        yield Index(connection)


@contextmanager
def open_pairing(directory: Path) -> Iterator["Pairing"]:
    """An empty table of lines, in a file of ``directory`` that is gone afterwards. Raises OSError as ``open_index``."""
    with _database(directory, _LINES_BY_ID) as connection:
        yield Pairing(connection)


@contextmanager
def _database(directory: Path, tables: str) -> Iterator[sqlite3.Connection]:
    directory.mkdir(parents=True, exist_ok=True)
    remove_stale_siblings(directory)
    path = temporary_sibling(directory / "index.sqlite")
    try:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
            connection.executescript(tables)
            connection.execute("BEGIN")
            yield connection
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        is_full = "full" in str(error)
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(directory)) from None
    finally:
        remove(path)


class Index:
    """Rows are numbered from 1 in the order of the input."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def add_rows(self, rows: Iterable[tuple[int, str, str]]) -> None:
        """Number, id and content hash of each row."""
        self._db.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)

    def index_rows(self) -> None:
        """Builds the index of the rows; called when all are in, and their ids are known to be unique."""
        self._db.execute("CREATE UNIQUE INDEX rows_of_id ON rows (id)")

    def add_lines(self, lines: Iterable[tuple[str, str, int, int, int]]) -> None:
        """Id, content hash, state, shard and place in the shard of each line."""
        self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", lines)

    def choose_best(self) -> None:
        """Chooses one of several lines of an id: an answer before an error, then the later one."""
        self._db.executescript("DROP TABLE IF EXISTS best; DROP INDEX IF EXISTS lines_of_id;" + _BEST)

    def count_rows(self) -> int:
        return self._count("rows")

    def count_missing(self) -> int:
        return self._count("rows WHERE id = ''")

    def count_repeated(self) -> int:
        """Rows whose id stood in an earlier row."""
        return self._count("(SELECT id, count(*) AS times FROM rows GROUP BY id)", "sum(times - 1)")

    def missing(self, limit: int) -> list[int]:
        """Numbers of the first rows without an id."""
        return [n for (n,) in self._db.execute("SELECT number FROM rows WHERE id = '' LIMIT ?", (limit,))]

    def repeated(self, limit: int) -> list[tuple[int, int]]:
        """Number of a row whose id was there before, and of the first row with that id."""
        text = (
            "SELECT number, first FROM rows JOIN (SELECT id, min(number) AS first FROM rows GROUP BY id"
            " HAVING count(*) > 1) USING (id) WHERE number > first ORDER BY number LIMIT ?"
        )
        return list(self._db.execute(text, (limit,)))

    def lost(self, limit: int) -> tuple[int, list[str]]:
        """Number of ids that have a line but no row, and the first of them."""
        return self._some("best LEFT JOIN rows USING (id) WHERE rows.id IS NULL", limit)

    def changed(self, limit: int) -> tuple[int, list[str]]:
        """Number of ids that have a line for another content, and the first of them."""
        return self._some("best JOIN rows USING (id) WHERE best.content != rows.content", limit)

    def count_pending(self) -> int:
        return self._count(f"rows LEFT JOIN best USING (id) WHERE coalesce(state, {RETRY}) = {RETRY}")

    def pending(self) -> Iterator[int]:
        """Numbers of the rows to be asked: without a line, or with an error that another try may mend."""
        text = (
            "SELECT number FROM rows LEFT JOIN best USING (id)"
            f" WHERE coalesce(state, {RETRY}) = {RETRY} ORDER BY number"
        )
        return (number for (number,) in self._db.execute(text))

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Id, shard, and place in it, of the line that counts: one for each row, in the order of the input."""
        return iter(
            self._db.execute("SELECT id, shard, place FROM rows JOIN best USING (id) ORDER BY number")
        )

    def _count(self, of: str, what: str = "count(*)") -> int:
        (count,) = self._db.execute(f"SELECT {what} FROM {of}").fetchone()
        return int(count or 0)

    def _some(self, of: str, limit: int) -> tuple[int, list[str]]:
        found = self._db.execute(f"SELECT id FROM {of} ORDER BY best.shard, best.place LIMIT ?", (limit,))
        return self._count(of), [id_ for (id_,) in found]


class Pairing:
    """A line for each id."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def add(self, lines: Iterable[tuple[str, bytes]]) -> None:
        """Keep each line under its id; a later line of an id replaces the earlier one."""
        self._db.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?)", lines)

    def line(self, id_: str) -> bytes | None:
        found = self._db.execute("SELECT line FROM texts WHERE id = ?", (id_,)).fetchone()
        return found[0] if found else None


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
    named = (
        f"column {id_column_of(sources, id_column)!r}"
        if index.count_missing() or index.count_repeated()
        else ""
    )
    if count := index.count_missing():
        places = _places(sources, index.missing(_SHOWN), id_column)
        raise DataError(
            f"{count} of {index.count_rows()} rows have no id in {named}: {_first(list(places.values()), count)}",
            hint="give every row a text or a whole number there, or name another column",
        )
    if count := index.count_repeated():
        pairs = index.repeated(_SHOWN)
        places = _places(sources, [number for pair in pairs for number in pair], id_column)
        shown = [
            f"{places[again]}, already at {places[first].partition(' at ')[2]}" for again, first in pairs
        ]
        raise DataError(
            f"{count} of {index.count_rows()} rows repeat an id of {named}: {_first(shown, count)}",
            hint="make the ids unique, or name another column; each id is answered exactly once",
        )
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
