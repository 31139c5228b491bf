"""Rows of a dataset to tasks, one after another: a task is a prompt, what the answer should be, and an id.

Rows are read as for training. Lines of OpenAI's batch input (``custom_id``, ``body.messages``) are prompts without a
reference, and may carry sampling of their own.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Conversation, Example, Message, Text, ToolCall
from fitune.data.conversations.templates import ChatTemplate, Encoded
from fitune.data.reading.rows import BadRow, Row
from fitune.data.reading.sources import read_rows
from fitune.errors import DataError, RecipeError
from fitune.score.choices import has_choices, read_choices
from fitune.score.engines.engine import Completion, Likelihood, Sampling
from fitune.spec.plan import DataSource
from fitune.spec.recipe.score_recipe import checked_recipe

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

    def task(self, prompt_ids: Sequence[int] = (), *, problem: str = "", **more: Any) -> "Task":
        """The task of this question; ``more`` are fields of it."""
        return Task(
            id=self.id, prompt_ids=tuple(prompt_ids), where=self.where, content=self.content,
            prompt_text="\n".join(message.text for message in self.messages), problem=self.problem or problem,
            right=self.right, calls=self.calls, **{"expected": self.expected, **more},
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A text that is weighed behind its prompt. The last ``end_tokens`` of ``token_ids`` end the answer."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    end_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered, or with ``given`` texts to be weighed: the one at ``right`` is the right one."""

    id: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    expected: str | None
    where: str
    sampling: Sampling | None = None
    """The row's own; None: that of the run."""
    content: str = ""
    problem: str = ""
    given: tuple[Given, ...] = ()
    right: int = 0
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools in the reference, of which ``expected`` is the text that training renders."""

    @property
    def fingerprint(self) -> str:
        """A hash of the prompt's token ids: an answer belongs to a prompt, not only to an id."""
        return hashlib.blake2b(repr(self.prompt_ids).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer to one task. ``error`` is empty, or why there is no answer."""

    task: Task
    text: str
    finish_reason: Literal["stop", "length", "error"]
    completion_tokens: int
    token_ids: tuple[int, ...] = ()
    logprob: float | None = field(default=None, compare=False)
    """Sum over the tokens, in nats; None where the engine does not say. Not compared: the last digits depend on the
    shape of the batch."""
    code: str = ""
    error: str = ""
    likelihoods: tuple[Likelihood, ...] = ()
    """Log-probabilities of the given texts, where they were weighed."""

    @property
    def tokens(self) -> int:
        """Tokens that were written or weighed."""
        return self.completion_tokens + sum(len(each.logprobs) for each in self.likelihoods)


def read_questions(sources: Sequence[DataSource], *, id_column: str, weighed: bool) -> Iterator[Question]:
    """Every row of the sources, one source after another. ``weighed``: rows with choices, and plain texts, are
    questions too.

    The id is from ``id_column``, from the first of ID_COLUMNS that the first row has, or the row's number over all
    sources; it is empty where that column holds neither a text nor a whole number.

    A row that is read but cannot be asked is a Question with a problem. Raises DataError when a line is no row, when a
    source has none, and when the first rows of two sources have different layouts.
    """
    number, column, first = 0, "", None
    for source in sources:
        before = number
        for row in read_rows(source):
            if number == before:
                kind, column = _layout(row, source, id_column)
                first = first or (source.path, kind, column)
                _require_same(first, (source.path, kind, column))
            number += 1
            id_ = _id_text(row.fields.get(column)) if column else str(number)
            yield _question(row, id_, source, weighed)
        if number == before:
            raise DataError(f"{source.path}: no rows to answer")


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


def id_column_of(sources: Sequence[DataSource], id_column: str) -> str:
    """The column that ``read_questions`` takes the ids from; empty where rows are numbered."""
    first = next(iter(read_rows(sources[0])), None)
    return _layout(first, sources[0], id_column)[1] if first else id_column


def to_tasks(questions: Sequence[Question], *, template: ChatTemplate, sampling: Sampling) -> list[Task]:
    """The prompts rendered by the template that training uses, with training's ids; references with calls of tools,
    too."""
    asked = [question for question in questions if not question.problem]
    prompts = template.encode_prompts([question.conversation() for question in asked])
    calling = template.encode_each(
        [question.conversation(question.reference) for question in asked if question.calls]
    )
    tasks = []
    for question in questions:
        if question.problem:
            tasks.append(question.task())
            continue
        prompt, row = next(prompts), next(calling) if question.calls else None
        bad = next((str(each) for each in (prompt, row) if isinstance(each, BadRow)), "")
        ids = [] if isinstance(prompt, BadRow) else prompt
        own: dict[str, Any] = {"sampling": replace(sampling, **dict(question.own))} if question.own else {}
        if row is not None and not isinstance(row, BadRow):
            own["expected"] = template.decode(row.ids[len(ids) :])
        tasks.append(question.task(ids, problem=bad, **own))
    return tasks


def to_task(conversation: Conversation, *, id: str, template: ChatTemplate) -> Task:
    """The last answer of the conversation is what is expected; everything before it is the prompt."""
    *prompt, answer = conversation.messages
    question = Question(id=id, where=conversation.where, messages=tuple(prompt), reference=answer)
    return question.task(template.encode_prompt(conversation))


def to_answer(
    task: Task,
    completion: Completion | None,
    decode: Callable[[Sequence[int]], str],
    stop_ids: frozenset[int],
) -> Answer:
    """The completion as text: without the token that ended it, and without special tokens. None: the task was not
    asked, for its problem."""
    completion = completion or Completion(id="", finish_reason="error", code="bad_row", error=task.problem)
    ids = completion.token_ids
    written = ids[:-1] if ids and ids[-1] in stop_ids else ids
    text = completion.text
    if text is None:
        text = decode(written)
    text = text.encode("utf-8", "replace").decode()  # a server may return half a character
    return Answer(
        task=task,
        text=text,
        finish_reason=completion.finish_reason,
        completion_tokens=completion.tokens,
        token_ids=ids,
        logprob=sum(completion.logprobs) if 0 < len(completion.logprobs) == completion.tokens else None,
        code=completion.code,
        error=completion.error,
    )


def _question(row: Row, id_: str, source: DataSource, weighed: bool) -> Question:
    try:
        if weighed and has_choices(row, source.columns):
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
        if weighed:
            return Question(id=id_, where=row.where, reference=Message("assistant", example.text))
        raise DataError(
            f"{example.where}: plain text has no question to answer and no answer to compare with",
            hint=f"name the columns of {source.path} that hold the prompt and the expected answer",
        )
    *prompt, answer = example.messages
    return Question(id=id_, where=row.where, messages=tuple(prompt), tools=example.tools, reference=answer)


def _of_batch_line(row: Row, id_: str) -> Question:
    """A request of OpenAI's batch API: chat messages, and sampling where the body names some."""
    body = row.fields["body"]
    if not isinstance(body.get("messages"), list):
        raise BadRow(f"{row.where}: body has no list of messages", reason="no messages")
    if unknown := sorted(body.keys() - _OF_BODIES.keys() - {*_IDLE_IN_BODIES, *_ONLY}):
        raise BadRow(f"{row.where}: body.{unknown[0]} is not supported", reason="field not supported")
    for name, only in _ONLY.items():
        value = body.get(name)
        if value is not None and (type(value) is not type(only) or value != only):
            raise BadRow(
                f"{row.where}: body.{name} = {value!r}: each line gets one whole answer",
                reason="field not supported",
            )
    # with an answer, the checks of training's rows are these rows' too
    turns = [*body["messages"], {"role": "assistant", "content": "its answer"}]
    example = to_example(Row(row.where, {"messages": turns}), format="messages")
    messages = example.messages[:-1] if isinstance(example, Conversation) else ()
    own = {_OF_BODIES[name]: body[name] for name in _OF_BODIES if body.get(name) is not None}
    try:
        checked_recipe(**own)
    except RecipeError as fault:
        raise BadRow(f"{row.where}: {fault.message}", reason="sampling") from None
    return Question(id=id_, where=row.where, messages=messages, own=tuple(sorted(own.items())))


def _id_text(value: Any) -> str:
    """Texts and whole numbers are ids; anything else counts as missing, half a character too."""
    if isinstance(value, str) and value.strip():
        return value if value.isascii() or value.encode("utf-8", "ignore").decode() == value else ""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def to_given_tasks(questions: Sequence[Question], *, template: ChatTemplate) -> list[Task]:
    """Tasks whose texts are weighed: the choices of a row, else its reference; a plain text behind its first token."""
    examples = [_examples(question) for question in questions]
    encoded = template.encode_each(list(chain.from_iterable(examples)))
    tasks = []
    for question, of_row in zip(questions, examples, strict=True):
        found = [next(encoded) for _ in of_row]
        bad = next((str(row) for row in found if isinstance(row, BadRow)), "")
        rows = [row for row in found if not isinstance(row, BadRow)]
        if bad or not rows:
            tasks.append(question.task(problem=bad))
        else:
            tasks.append(_given_task(question, rows, template))
    return tasks


def _examples(question: Question) -> list[Example]:
    """The row once for each of its texts; not at all where it cannot be asked."""
    if question.problem:
        return []
    if not question.messages:
        return [Text(question.expected or "", question.where)]
    reference = question.reference or Message("assistant", "")
    answers = [Message("assistant", text) for text in question.choices] or [reference]
    return [question.conversation(answer) for answer in answers]


def _given_task(question: Question, rows: Sequence[Encoded], template: ChatTemplate) -> Task:
    starts = []  # of the last answer; of a plain text, all of which is learned, the second token
    for row in rows:
        start = len(row.supervised)
        while start and row.supervised[start - 1]:
            start -= 1
        starts.append(max(start, 1))
    columns = zip(*(row.ids for row in rows), strict=False)
    shared = next((place for place, ids in enumerate(columns) if len(set(ids)) > 1), len(rows[0].ids))
    border = min(*starts, shared, *(len(row.ids) for row in rows))
    texts = question.choices or (question.expected or "",)
    if question.calls:  # what is learned is what the template writes
        texts = tuple(template.decode(row.ids[border:]) for row in rows)
    given = []
    for text, row in zip(texts, rows, strict=True):
        answer, end = row.ids[border:], 0
        while end + 1 < len(answer) and answer[-end - 1] in template.stop_ids:
            end += 1
        given.append(
            Given(text=text, prompt_ids=tuple(row.ids[:border]), token_ids=tuple(answer), end_tokens=end)
        )
    if not all(each.token_ids for each in given):
        return question.task(problem=f"{question.where}: the answer has no tokens behind the first")
    expected = texts[0] if question.calls else question.expected
    return question.task(given[0].prompt_ids, given=tuple(given), expected=expected)
