"""Given texts are weighed: how likely the model finds each of them as an answer.

A text stands where the answer stands in training, with training's ids: prompt and answer are encoded apart, so no token
lies across their border. The choices of a row are compared behind the ids that all of them begin with; where a
template writes something else in front of one of them, it counts as the choice's.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fitune.data.conversations.messages import Example, Message, Text
from fitune.data.conversations.templates import ChatTemplate, Encoded
from fitune.data.reading.rows import BadRow
from fitune.score.tasks import Given, Question, Task


def to_given_tasks(questions: Sequence[Question], *, template: ChatTemplate) -> list[Task]:
    """Tasks whose texts are weighed: the choices of a row, else its reference; a plain text behind its first token."""
    examples = {question.id: _examples(question) for question in questions if not question.problem}
    encoded = template.encode_each(list(chain.from_iterable(examples.values())))
    stop_ids = template.stop_ids
    tasks = []
    for question in questions:
        found = [next(encoded) for _ in examples.get(question.id, ())]
        task = _task(question, found, stop_ids)
        if question.calls and task.given:  # what is learned is what the template writes
            (given,) = task.given
            text = template.decode(given.token_ids)
            task = replace(task, expected=text, given=(replace(given, text=text),), calls=question.calls)
        tasks.append(task)
    return tasks


def _examples(question: Question) -> list[Example]:
    """The row once for each of its texts."""
    if not question.messages:
        return [Text(question.expected or "", question.where)]
    reference = question.reference or Message("assistant", "")
    answers = [Message("assistant", text) for text in question.choices] or [reference]
    return [question.conversation(answer) for answer in answers]


def _answer_start(supervised: Sequence[bool]) -> int:
    """Index of the last answer's first token; of a plain text, all of which is learned, the second token."""
    start = len(supervised)
    while start and supervised[start - 1]:
        start -= 1
    return max(start, 1)


def _task(question: Question, found: Sequence[BadRow | Encoded], stop_ids: frozenset[int]) -> Task:
    bad = next((str(row) for row in found if isinstance(row, BadRow)), "")
    rows = [(row.ids, _answer_start(row.supervised)) for row in found if not isinstance(row, BadRow)]
    problem = question.problem or bad
    given: tuple[Given, ...] = ()
    if not problem:
        border = min(min(start for _, start in rows), _shared([ids for ids, _ in rows]))
        texts = question.choices or (question.expected or "",)
        given = tuple(_given(text, ids, border, stop_ids) for text, (ids, _) in zip(texts, rows, strict=True))
        if not all(each.token_ids for each in given):
            problem = f"{question.where}: the answer has no tokens behind the first"
    return Task(
        id=question.id, prompt_ids=given[0].prompt_ids if given else (), where=question.where,
        prompt_text="\n".join(message.text for message in question.messages), expected=question.expected,
        content=question.content, problem=problem, given=given, right=question.right,
    )  # fmt: skip


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """Number of ids that all rows begin with; of one row all."""
    columns = zip(*rows, strict=False)
    return next((place for place, ids in enumerate(columns) if len(set(ids)) > 1), min(map(len, rows)))


def _given(text: str, ids: list[int], border: int, stop_ids: frozenset[int]) -> Given:
    answer = ids[border:]
    end = 0
    while end + 1 < len(answer) and answer[-end - 1] in stop_ids:
        end += 1
    return Given(text=text, prompt_ids=tuple(ids[:border]), token_ids=tuple(answer), end_tokens=end)
