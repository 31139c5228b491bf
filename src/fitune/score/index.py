"""The rows of the input and the answers on the disk, by id: a database in a temporary file, so memory stays constant
from a thousand rows to millions.
"""

import errno
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from fitune.errors import DataError
from fitune.files import cache_folder, remove, remove_stale_siblings, temporary_sibling
from fitune.score.grades.graders import References
from fitune.score.questions import Input
from fitune.units import counted

_SHOWN = 5
"""Most faulty rows that an error lists."""

_TABLES = """
CREATE TABLE rows (number INTEGER PRIMARY KEY, id TEXT NOT NULL, content TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE lines (
    id TEXT NOT NULL, content TEXT NOT NULL, state INTEGER NOT NULL,
    shard INTEGER NOT NULL, place INTEGER NOT NULL
);
CREATE TABLE texts (id TEXT PRIMARY KEY, line BLOB NOT NULL) WITHOUT ROWID;
"""
_BEST = """
CREATE INDEX lines_of_id ON lines (id, state DESC, shard DESC);
CREATE TABLE best AS SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY id ORDER BY state DESC, shard DESC) AS nth FROM lines
) WHERE nth = 1;
CREATE UNIQUE INDEX best_of_id ON best (id);
"""

_SETTINGS = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-4096")

RETRY, REFUSED, ANSWERED = 0, 1, 2
"""State of a line: an error that another try may mend, an error of the row itself, an answer. The highest counts."""
_PENDING = f"rows LEFT JOIN best USING (id) WHERE coalesce(state, {RETRY}) = {RETRY}"


@contextmanager
def open_index() -> Iterator["Index"]:
    """An empty index, in a file of the cache that is gone afterwards. Raises OSError when the disk is full."""
    directory = cache_folder() / "scoring"
    directory.mkdir(parents=True, exist_ok=True)
    remove_stale_siblings(directory)
    path = temporary_sibling(directory / "index.sqlite")
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
            connection.executescript(_TABLES)
            connection.execute("BEGIN")
            yield Index(connection)
    except sqlite3.OperationalError as error:
        is_full = "full" in str(error)
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error), str(directory)) from None
    finally:
        remove(path)


class Index:
    """Rows are numbered from 1 in the order of the input."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection

    def add_lines(self, lines: Iterable[tuple[str, str, int, int, int]]) -> None:
        """Id, content hash, state, shard and place in the shard of each line."""
        self.db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", lines)

    def choose_best(self) -> None:
        """Chooses one of several lines of an id: an answer before an error, then the later one."""
        self.db.executescript("DROP TABLE IF EXISTS best; DROP INDEX IF EXISTS lines_of_id;" + _BEST)

    def count_rows(self) -> int:
        """Rows of the input."""
        return self._count("rows")

    def lost(self) -> tuple[int, list[tuple[str]]]:
        """Number of ids that have a line but no row, and the first of them."""
        return self.first("id", "best LEFT JOIN rows USING (id) WHERE rows.id IS NULL", "shard, place")

    def changed(self) -> tuple[int, list[tuple[str]]]:
        """Number of ids that have a line for another content, and the first of them."""
        return self.first(
            "id", "best JOIN rows USING (id) WHERE best.content != rows.content", "shard, place"
        )

    def count_pending(self) -> int:
        """Rows to ask: without an answer, or with an error that is tried again."""
        return self._count(_PENDING)

    def pending(self) -> Iterator[int]:
        """Numbers of the rows to be asked: without a line, or with an error that another try may mend."""
        return (number for (number,) in self.db.execute(f"SELECT number FROM {_PENDING} ORDER BY number"))

    def places(self) -> Iterator[tuple[int, int]]:
        """Shard, and place in it, of the line that counts: one for each row, in the order of the input."""
        return iter(self.db.execute("SELECT shard, place FROM rows JOIN best USING (id) ORDER BY number"))

    def add_texts(self, lines: Iterable[tuple[str, bytes]]) -> None:
        """Keep each line of another scoring under its id; a later line of an id replaces the earlier one."""
        self.db.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?)", lines)

    def text(self, id_: str) -> bytes | None:
        """The line of ``add_texts``; None without one."""
        found = self.db.execute("SELECT line FROM texts WHERE id = ?", (id_,)).fetchone()
        return found[0] if found else None

    def _count(self, of: str) -> int:
        (count,) = self.db.execute(f"SELECT count(*) FROM {of}").fetchone()
        return int(count)

    def first(self, what: str, of: str, order: str) -> tuple[int, list[Any]]:
        """Number of rows of a query, and the first of them."""
        found = self.db.execute(f"SELECT {what} FROM {of} ORDER BY {order} LIMIT {_SHOWN}").fetchall()
        return self._count(of) if found else 0, found


def index_input(data: Input, index: Index) -> References:
    """Put every row of ``data`` into ``index``; returns facts of the references.

    Raises DataError when ids are missing or appear twice, listing the first ones, when no row can be asked, and what
    ``Input.questions`` raises.
    """
    references, problem = References(), ""

    def rows() -> Iterator[tuple[int, str, str, str]]:
        """Number, id, content hash and place of each row, whose reference is counted on the way."""
        nonlocal problem
        for number, question in enumerate(data.questions(), 1):
            problem = problem or question.problem
            if not question.problem:
                references.add(
                    question.expected, has_choices=bool(question.choices), has_calls=bool(question.calls)
                )
            yield number, question.id, question.content, question.where

    index.db.executemany("INSERT INTO rows VALUES (?, ?, ?, ?)", rows())
    again = "SELECT id, min(number) AS first, source AS early FROM rows GROUP BY id HAVING count(*) > 1"
    for what, of, fault, hint in (
        (
            "source", "rows WHERE id = ''", "have no id in",
            "give every row a text or a whole number there, or name another column",
        ),
        (
            "id, source, early", f"rows JOIN ({again}) USING (id) WHERE number > first", "repeat an id of",
            "make the ids unique, or name another column; each id is answered exactly once",
        ),
    ):  # fmt: skip
        count, found = index.first(what, of, "number")
        if count:
            shown = [
                "{!r} at {}, already at {}".format(*told) if len(told) > 1 else told[0] for told in found
            ]
            more = f"; and {count - len(shown)} more" if count > len(shown) else ""
            raise DataError(
                f"{count} of {index.count_rows()} rows {fault} column {data.column_of_ids()!r}: "
                f"{'; '.join(shown)}{more}",
                hint=hint,
            )
    if not references.rows:
        raise DataError(f"none of {counted(index.count_rows(), 'row')} can be asked; the first: {problem}")
    index.db.execute("CREATE UNIQUE INDEX rows_of_id ON rows (id)")
    return references
