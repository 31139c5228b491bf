"""Shards: answers on the disk, each row exactly once, whatever is killed and whenever.

A shard is ``N.answers.jsonl`` (OpenAI batch output lines), ``N.tasks.jsonl`` (prompt and reference of each, for
graders) and ``N.json``, the manifest with ids, states and the hashes of all. Each file is written whole: under a
temporary name, synced, renamed, folder synced; the manifest comes last, and a shard without one does not exist. After
a kill the same rows are answered again in the same shard, so the bytes are those of a run that nothing stopped.
Grades stand beside them, one file for each shard and grader.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, write_atomically
from fitune.score.answers import MANIFEST, OURS, Line, answer_line
from fitune.score.index import ANSWERED, REFUSED, RETRY, Index
from fitune.score.tasks import Answer

T = TypeVar("T")

FOLDER = "shards"
_KINDS = ("answers", "tasks")
_OPEN = 8
"""Shards whose lines are kept in memory; rows that were retried stand in other shards than their neighbours."""
_MANIFEST = re.compile(r"(\d{5,})\.json")
_OURS = re.compile(r"\d{5,}(\.json|\.(answers|tasks|grades-[0-9a-f]+)\.jsonl)")

OF_THE_ROW = ("prompt_too_long", "empty_prompt", "bad_row")
"""Codes of errors that another try cannot mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The manifest of one shard."""

    ids: tuple[str, ...]
    contents: tuple[str, ...]
    states: tuple[Literal[0, 1, 2], ...]
    sha256: dict[str, str]


_SHARD = TypeAdapter(Shard)


class Shards:
    """The shards in a scoring's directory."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self.lines = lru_cache(_OPEN * (len(_KINDS) + 1))(self._read_lines)
        self._told: set[int] = set()
        self._grades = cache(self._name_of_grades)

    def free_numbers(self) -> Iterator[int]:
        """Numbers of the shards to be written: those of shards that were removed come first."""
        taken = set(self.numbers())
        return (number for number in count() if number not in taken)

    def numbers(self) -> list[int]:
        """Numbers of the shards that exist, in order."""
        if not self._folder.is_dir():
            return []
        found = (_MANIFEST.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def add_to(self, index: Index) -> None:
        """Check every shard that the index does not have yet, and tell it of the lines. Raises RunDirectoryError."""
        for number in [number for number in self.numbers() if number not in self._told]:
            self._told.add(number)
            shard = self.read(number)
            for kind in _KINDS:
                self._check(number, shard, kind)
            index.add_lines(
                (id_, content, state, number, place)
                for place, (id_, content, state) in enumerate(
                    zip(shard.ids, shard.contents, shard.states, strict=True)
                )
            )
        index.choose_best()

    def read(self, number: int) -> Shard:
        """The manifest of a shard. Raises RunDirectoryError."""
        path = self._path(number, ".json")
        try:
            with open_regular(path, follow_links=False) as file:
                shard = _SHARD.validate_json(file.read())
            if not len(shard.ids) == len(shard.contents) == len(shard.states):
                raise ValueError("its ids, contents and states are not equally many")
            written = _hash_of_rows(shard.ids, shard.contents, shard.states)
            if shard.sha256.get("rows", written) != written:  # earlier versions wrote none
                raise ValueError("its ids, contents and states are not those that were written")
            return shard
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise _damaged(path, ": ".join(filter(None, (place, first["msg"])))) from None
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from None

    def write(self, number: int, answers: Sequence[Answer], *, model: str) -> None:
        """Write a shard whole. Raises OSError, and leaves no shard then."""
        self._folder.mkdir(exist_ok=True)
        lines = {
            "answers": _text(answer_line(answer, model=model) for answer in answers),
            "tasks": _text(
                {"prompt": task.question.text, "expected": task.expected}
                | ({"calls": [call.text for call in calls]} if (calls := task.question.calls) else {})
                for task in (answer.task for answer in answers)
            ),
        }
        ids = [answer.task.id for answer in answers]
        contents = [answer.task.question.content for answer in answers]
        states = [
            REFUSED if answer.code in OF_THE_ROW else RETRY if answer.error else ANSWERED
            for answer in answers
        ]
        hashes = {kind: hashlib.sha256(content).hexdigest() for kind, content in lines.items()}
        hashes["rows"] = _hash_of_rows(ids, contents, states)
        for kind, content in lines.items():
            write_atomically(self._path(number, f".{kind}.jsonl"), content)
        manifest = {
            "rows": len(answers), "sha256": hashes, "ids": ids, "contents": contents, "states": states,
        }  # fmt: skip
        write_atomically(self._path(number, ".json"), to_json(manifest) + b"\n")

    def _read_lines(self, number: int, kind: str) -> list[bytes]:
        """All lines of a shard."""
        with open_regular(self._path(number, f".{kind}.jsonl"), follow_links=False) as file:
            return file.readlines()

    def rows(self, number: int, kind: str = "answers") -> list[Line]:
        """All lines of a shard as objects. Raises RunDirectoryError."""
        return [self._parsed(number, kind, line) for line in self.lines(number, kind)]

    def row(self, number: int, place: int, kind: str = "answers") -> Line:
        """One line of a shard as an object. Raises RunDirectoryError."""
        lines = self.lines(number, kind)
        return self._parsed(number, kind, lines[place] if place < len(lines) else b"")

    def has_grades(self, number: int, key: str) -> bool:
        """True if the shard was graded under ``key``, for these very answers."""
        return self._path(number, f".{self._grades(number, key)}.jsonl").is_file()

    def grades(self, number: int, key: str) -> list[Line]:
        """The shard's lines of grades, one for each answer. Raises RunDirectoryError."""
        return self.rows(number, self._grades(number, key))

    def write_grades(self, number: int, key: str, grades: Iterable[Line]) -> None:
        """One line for each line of the shard."""
        name = self._grades(number, key)
        write_atomically(self._path(number, f".{name}.jsonl"), _text(grades))
        self.lines.cache_clear()

    def grade(self, number: int, key: str, place: int) -> Line:
        """Raises RunDirectoryError."""
        name = self._grades(number, key)
        found = self.row(number, place, name)
        if "grade" not in found:
            raise _damaged(self._path(number, f".{name}.jsonl"), f"line {place + 1} holds no grade")
        return found

    def _name_of_grades(self, number: int, key: str) -> str:
        """The name of the file, tied to the answers by their hash."""
        tied = hashlib.sha256(f"{key} {sorted(self.read(number).sha256.items())}".encode())
        return f"grades-{tied.hexdigest()[:12]}"

    def _parsed(self, number: int, kind: str, line: bytes) -> Line:
        """Without the checks of ``parse_json``: the bytes were written here, and each row is read several times."""
        try:
            found: Line = from_json(line)
            if not isinstance(found, dict):
                raise ValueError("a line is no object")
        except ValueError as error:
            raise _damaged(self._path(number, f".{kind}.jsonl"), str(error)) from None
        return found

    def _check(self, number: int, shard: Shard, kind: str) -> None:
        """Raises RunDirectoryError where the file's bytes are not those that were written."""
        path = self._path(number, f".{kind}.jsonl")
        try:
            with open_regular(path, follow_links=False) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from None
        if found != shard.sha256.get(kind):
            raise _damaged(path, "its bytes are not those that were written")

    def _path(self, number: int, ending: str) -> Path:
        return self._folder / f"{number:05d}{ending}"


def remove_scores(directory: Path) -> None:
    """Remove what scoring wrote into ``directory``, and the folder when nothing else is in it."""
    if not (directory / MANIFEST).is_file():
        return
    folder = directory / FOLDER
    for path in list(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if _OURS.fullmatch(path.name):
            path.unlink()
    for name in OURS:
        (directory / name).unlink(missing_ok=True)
    for emptied in (folder, directory):
        if emptied.is_dir() and not emptied.is_symlink() and not any(emptied.iterdir()):
            emptied.rmdir()


def groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``; the last may be shorter."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _hash_of_rows(ids: Sequence[str], contents: Sequence[str], states: Sequence[int]) -> str:
    return hashlib.sha256(to_json([ids, contents, states])).hexdigest()


def _text(lines: Iterable[Line]) -> bytes:
    return b"".join(to_json(line) + b"\n" for line in lines)


def _damaged(path: Path, why: str) -> RunDirectoryError:
    number = path.name.partition(".")[0]
    if ".grades-" in path.name:
        return RunDirectoryError(
            f"{path}: damaged: {why}", hint="remove this file, and the rows of the shard are graded again"
        )
    return RunDirectoryError(
        f"{path}: the shard is damaged: {why}",
        hint=f"remove {path.parent / number}.json to answer its rows again, or score into a new directory",
    )
