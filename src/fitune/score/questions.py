"""Rows of a dataset to questions, one after another: messages, an id, and what the answer should be.

Rows are read as for training. Lines of OpenAI's batch input (``custom_id``, ``body.messages``) are prompts without a
reference, and may carry sampling of their own. Rows with choices have one of these layouts:

| layout         | fields                                                                                 |
|----------------|----------------------------------------------------------------------------------------|
| MMLU           | question, choices: [...], answer: 2, "C" or the text of a choice                       |
| ARC            | question, choices: {"label": [...], "text": [...]}, answerKey: "B" (CommonsenseQA too) |
| OpenBookQA     | question_stem in the place of question                                                 |
| HellaSwag      | ctx, endings: [...], label: 3                                                          |
| MedQA          | question, options: {"A": ..., "B": ...}, answer_idx: "B"; also options: [...]          |
| PIQA           | goal, sol1, sol2, label: 0                                                             |
| columns        | prompt, choices and completion (which one is right) named by the column mapping        |

A number counts from 0, a letter from A; labels that the row brings itself go before both.
"""

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitune.data.conversations.formats import Columns, to_example
from fitune.data.conversations.messages import Conversation, Message, ToolCall
from fitune.data.reading.rows import BadRow, Row, in_row, require_characters
from fitune.data.reading.sources import read_rows
from fitune.errors import DataError, RecipeError
from fitune.recipe.score_recipe import ScoreRecipe, checked_recipe
from fitune.values.plan import DataSource

ID_COLUMNS = ("custom_id", "id")
"""Taken as the id when the first row has it; otherwise rows are numbered from 1."""

_OF_BODIES = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "temperature": "temperature",
    "top_p": "top_p", "seed": "seed",
}  # fmt: skip
"""Field of a batch line's body -> field of Sampling."""
_IDLE_IN_BODIES = ("model", "messages", "user", "metadata", "store")
_ONLY = {"n": 1, "stream": False}
"""Field of a body -> its only value here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row before it is rendered. ``reference`` is None where the row has none; ``problem`` is empty, or why the row
    cannot be asked."""

    id: str
    where: str
    messages: tuple[Message, ...] = ()
    tools: str = ""
    reference: Message | None = None
    own: tuple[tuple[str, Any], ...] = ()
    """Sampling that the row brings itself."""
    choices: tuple[str, ...] = ()
    """Texts to choose from; ``reference`` is the one at ``right``."""
    right: int = 0
    problem: str = ""

    @property
    def text(self) -> str:
        """All messages as one text."""
        return "\n".join(message.text for message in self.messages)

    @property
    def expected(self) -> str | None:
        """The reference as text, its calls as JSON."""
        return self.reference.text if self.reference else None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Calls of tools in the reference."""
        return self.reference.calls if self.reference else ()

    def conversation(self, answer: Message | None = None) -> Conversation:
        """Return the conversation of the question, with ``answer`` as its last message."""
        messages = self.messages if answer is None else (*self.messages, answer)
        return Conversation(messages, self.where, self.tools)

    @property
    def content(self) -> str:
        """A hash of everything an answer and its grade depend on but the id."""
        said = [(str(message.role), message.text) for message in self.messages]
        said += [("tools", self.tools)] if self.tools else []
        said += [("calls", call.text) for call in self.calls]
        choices = [[self.choices, self.right]] if self.choices else []
        told = json.dumps([said, self.expected, self.own, self.problem, *choices])
        return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The data to be scored. ``by_loglikelihood``: of given texts; then rows with choices, and plain texts, are
    questions too."""

    sources: tuple[DataSource, ...]
    id_column: str = ""
    by_loglikelihood: bool = False

    def questions(self) -> Iterator[Question]:
        """Every row of the sources, one source after another.

        The id is from ``id_column``, from the first of ID_COLUMNS that the first row has, or the row's number over all
        sources; it is empty where that column holds neither a text nor a whole number.

        A row that is read but cannot be asked is a Question with a problem. Raises DataError when a line is no row,
        when a source has none, and when the first rows of two sources have different layouts.
        """
        number, column, first = 0, "", None
        for source in self.sources:
            before = number
            for row in read_rows(source):
                if number == before:
                    kind, column = _layout(row, source, self.id_column)
                    first = first or (source.path, kind, column)
                    _require_same(first, (source.path, kind, column))
                number += 1
                id_ = _id_text(row.fields.get(column)) if column else str(number)
                yield _question(row, id_, source, self.by_loglikelihood)
            if number == before:
                raise DataError(f"{source.path}: no rows to answer")

    def numbered(self, numbers: Iterator[int]) -> Iterator[Question]:
        """The rows of these numbers, counted from 1, which come in ascending order."""
        wanted = next(numbers, 0)
        for number, question in enumerate(self.questions(), 1):
            if not wanted:
                return
            if number == wanted:
                yield question
                wanted = next(numbers, 0)

    def column_of_ids(self) -> str:
        """The column that the ids come from; empty where rows are numbered."""
        first = next(iter(read_rows(self.sources[0])), None)
        return _layout(first, self.sources[0], self.id_column)[1] if first else self.id_column


def _layout(row: Row, source: DataSource, id_column: str) -> tuple[str, str]:
    """The kind of a source's rows, and the column of their ids, empty where they are numbered, by its first row."""
    kind = "lines of OpenAI's batch input" if _is_batch_line(row, source) else "rows with references"
    kind = "rows with choices" if has_choices(row, source.columns) else kind
    found = id_column or next((name for name in ID_COLUMNS if name in row.fields), "")
    return kind, found


def _is_batch_line(row: Row, source: DataSource) -> bool:
    """A column ``body`` that holds no object is one of the data: the text of a mail, say."""
    return isinstance(row.fields.get("body"), dict) and not source.columns


def _require_same(first: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """Raises DataError where two sources (path, kind of rows, id column) cannot be one list of rows."""
    (path, kind, column), (other_path, other_kind, other_column) = first, other
    if kind != other_kind:
        raise DataError(
            f"{path} has {kind}, {other_path} {other_kind}: they are answered and graded in different ways",
            hint="score them one at a time, each into its own --out",
        )
    ours, theirs = (f"named by column {name!r}" if name else "without ids" for name in (column, other_column))
    if ours != theirs:
        raise DataError(
            f"the rows of {path} are {ours}, those of {other_path} {theirs}",
            hint="name a column that all have: --id-column; or score them one at a time",
        )


def _question(row: Row, id_: str, source: DataSource, by_loglikelihood: bool) -> Question:
    try:
        if by_loglikelihood and has_choices(row, source.columns):
            question, system, choices, right = read_choices(row, source.columns)
            told = (Message("system", system),) if system else ()
            return Question(
                id=id_, where=row.where, messages=(*told, Message("user", question)),
                reference=Message("assistant", choices[right]), choices=choices, right=right,
            )  # fmt: skip
        if _is_batch_line(row, source):
            return _of_batch_line(row, id_)
        example = to_example(row, format=source.format, columns=source.columns)
    except BadRow as bad:
        return Question(id=id_, where=row.where, problem=str(bad))
    if not isinstance(example, Conversation):
        if by_loglikelihood:
            return Question(id=id_, where=row.where, reference=Message("assistant", example.text))
        raise DataError(
            f"{example.where}: plain text has no question to answer and no answer to compare with",
            hint=f"name the columns of {source.path} that hold the prompt and the expected answer",
        )
    *prompt, answer = example.messages
    return Question(id=id_, where=row.where, messages=tuple(prompt), tools=example.tools, reference=answer)


def _of_batch_line(row: Row, id_: str) -> Question:
    """A request of OpenAI's batch API: chat messages, and sampling where the body names some."""
    body = {name: value for name, value in row.fields["body"].items() if value is not None}
    if not isinstance(body.get("messages"), list):
        raise BadRow(f"{row.where}: body has no list of messages", reason="no messages")
    if any(isinstance(last, dict) and last.get("role") == "assistant" for last in body["messages"][-1:]):
        raise BadRow(
            f"{row.where}: body.messages end with an answer, so nothing is asked", reason="no question"
        )
    if unknown := sorted(body.keys() - _OF_BODIES.keys() - {*_IDLE_IN_BODIES, *_ONLY}):
        raise BadRow(f"{row.where}: body.{unknown[0]} is not supported", reason="field not supported")
    for name, only in _ONLY.items():
        value = body.get(name, only)
        if type(value) is not type(only) or value != only:
            raise BadRow(
                f"{row.where}: body.{name} = {value!r}: each line gets one whole answer",
                reason="field not supported",
            )
    # with an answer, the checks of training's rows are these rows' too
    turns = [*body["messages"], {"role": "assistant", "content": "its answer"}]
    example = to_example(Row(row.where, {"messages": turns}), format="messages")
    messages = example.messages[:-1] if isinstance(example, Conversation) else ()
    own = {_OF_BODIES[name]: body[name] for name in _OF_BODIES if name in body}
    try:
        checked_recipe(ScoreRecipe, **own)
    except RecipeError as fault:
        raise BadRow(f"{row.where}: {fault.message}", reason="sampling") from None
    return Question(id=id_, where=row.where, messages=messages, own=tuple(sorted(own.items())))


def _id_text(value: Any) -> str:
    """Texts and whole numbers are ids; anything else counts as missing, half a character too."""
    if isinstance(value, str) and value.strip():
        return value if value.isascii() or value.encode("utf-8", "ignore").decode() == value else ""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


_QUESTIONS = ("question", "question_stem", "ctx", "goal", "prompt", "query")
_LISTS = ("choices", "endings", "options")
_PAIRS = (("sol1", "sol2"),)
_KEYS = ("answerKey", "answer_idx", "answer", "label", "gold")
_MOST = len(string.ascii_uppercase)


def has_choices(row: Row, columns: Columns) -> bool:
    """True for a row in one of the layouts above."""
    return _fields(row, columns) is not None


def first_row_has_choices(sources: Sequence[DataSource]) -> bool:
    """True where the first row of all sources has choices: then their log-likelihoods are computed, and no answers
    written."""
    first = next(iter(read_rows(sources[0])), None)
    return first is not None and has_choices(first, sources[0].columns)


def read_choices(row: Row, columns: Columns) -> tuple[str, str, tuple[str, ...], int]:
    """The row's question, its system message (empty without one), its choices, and the place of the right one, from 0.

    Raises BadRow naming field and value where it is unclear which is right.
    """
    fields = _fields(row, columns)
    if fields is None:
        raise BadRow(f"{row.where}: the row has no choices", reason="no choices")
    question, listed, key, system = fields
    with in_row(row.where):
        labels, choices = _choices(row, listed)
        asked, told = _text(row, question), _text(row, system) if system else ""
        return asked, told, choices, _right(row, key, labels, choices)


def _fields(row: Row, columns: Columns) -> tuple[str, tuple[str, ...], str, str] | None:
    """Names of the row's fields: of the question, the choices, the right one, and the system message or none."""
    mapping = dict(columns)
    if mapping:
        if not {"prompt", "choices", "completion"} <= mapping.keys():
            return None
        return mapping["prompt"], (mapping["choices"],), mapping["completion"], mapping.get("system", "")
    names = row.fields
    question = next((name for name in _QUESTIONS if name in names), "")
    key = next((name for name in _KEYS if names.get(name) is not None), "")
    listed = next((name for name in _LISTS if isinstance(names.get(name), list | dict)), "")
    pair = next((pair for pair in _PAIRS if all(name in names for name in pair)), ())
    if not question or not key or not (listed or pair):
        return None
    return question, (listed,) if listed else pair, key, ""


def _choices(row: Row, fields: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels, empty where the row brings none, and texts."""
    found = row.fields.get(fields[0]) if len(fields) == 1 else [row.fields[name] for name in fields]
    labels: Sequence[Any] = ()
    if isinstance(found, Mapping):
        if {"label", "text"} <= found.keys():
            labels, found = found["label"], found["text"]
        else:
            labels, found = list(found), list(found.values())
    where = " and ".join(fields)
    if not isinstance(found, list) or not all(isinstance(text, str) and text.strip() for text in found):
        raise BadRow(f"{where}: {found!r:.80} is not a list of texts", reason="wrong type")
    if not 2 <= len(found) <= _MOST:
        raise BadRow(
            f"{where}: {len(found)} choices, there must be 2 to {_MOST}", reason="wrong number of choices"
        )
    if labels and (
        not isinstance(labels, list) or len(labels) != len(found) or len(set(map(str, labels))) != len(found)
    ):
        raise BadRow(
            f"{where}: labels {labels!r:.80} do not name {len(found)} choices", reason="wrong labels"
        )
    for text in found:
        require_characters(fields[0], text, hint="write it as UTF-8")
    return tuple(str(label).strip() for label in labels), tuple(found)


def _right(row: Row, field: str, labels: Sequence[str], choices: Sequence[str]) -> int:
    """The place that ``field`` means. A text that is a choice and a number of another one is refused."""
    value = row.fields.get(field)

    def unclear(fault: str) -> BadRow:
        """The error for a value with this fault, which tells the values that are known."""
        last = len(choices) - 1
        known = ", ".join(labels) or f"0 to {last}, A to {string.ascii_uppercase[last]}"
        return BadRow(
            f"{field} = {value!r:.40} {fault}; known are {known} and the texts of the choices",
            reason="right choice unclear",
        )

    if isinstance(value, bool) or not isinstance(value, int | str):
        raise unclear("names no choice")
    said = str(value).strip()
    if said in labels:
        return list(labels).index(said)
    meant = set()
    if said.isascii() and said.isdecimal() and int(said) < len(choices) and not labels:
        meant.add(int(said))
    if isinstance(value, str):
        letter = string.ascii_uppercase.find(said.upper()) if len(said) == 1 else -1
        if 0 <= letter < len(choices) and not labels:
            meant.add(letter)
        meant |= {place for place, text in enumerate(choices) if text.strip() == said}
    if len(meant) != 1:
        raise unclear("may be one choice or another" if meant else "names no choice")
    return meant.pop()


def _text(row: Row, field: str) -> str:
    value = row.fields.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{field} = {value!r:.40} is not a text", reason="wrong type")
    require_characters(field, value, hint="write it as UTF-8")
    return value
