"""Given texts are weighed: how likely the model finds each of them as an answer.

A text stands where the answer stands in training, with training's ids: prompt and answer are encoded apart, so no token
lies across their border. The choices of a row are compared behind the ids that all of them begin with; where a
template writes something else in front of one of them, it counts as the choice's.
"""

from collections.abc import Sequence
from itertools import chain

from fitune.data.conversations.messages import Example, Message, Text
from fitune.data.conversations.templates import ChatTemplate, Encoded
from fitune.data.reading.rows import BadRow
from fitune.score.tasks import Given, Question, Task


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
