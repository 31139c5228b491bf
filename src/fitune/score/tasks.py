"""Questions to tasks, and what an engine found to answers: a task is a prompt as token ids, or given texts
whose log-likelihoods are asked.

A given text stands where the answer stands in training, with training's ids: prompt and answer are encoded
apart, so no token lies across their border. The choices of a row are compared behind the ids that all of them begin
with; where a template writes something else in front of one of them, it counts as the choice's.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from fitune.data.conversations.messages import Conversation, Example, Message, Text
from fitune.data.conversations.templates import ChatTemplate, Encoded
from fitune.data.reading.rows import BadRow
from fitune.score.engines.engine import Completion, Likelihood, Sampling
from fitune.score.questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A text behind the prompt whose log-likelihood is asked. The last ``end_tokens`` of ``token_ids`` end the
    answer."""

    text: str
    token_ids: tuple[int, ...]
    end_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question as token ids, to be answered, or with ``given`` texts whose log-likelihoods are asked, one for each
    of its choices."""

    question: Question
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling | None = None
    """The row's own; None: that of the run."""
    given: tuple[Given, ...] = ()
    rendered: str = ""
    """The reference as training renders it, where it has calls of tools."""
    problem: str = ""
    """Empty, or why it cannot be asked."""

    @property
    def id(self) -> str:
        """The row's id."""
        return self.question.id

    @property
    def expected(self) -> str | None:
        """The reference as text; None without one."""
        return self.rendered or self.question.expected

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
    """Log-probabilities of the given texts, where there were some."""

    @property
    def tokens(self) -> int:
        """Tokens that were written or given."""
        return self.completion_tokens + sum(len(each.logprobs) for each in self.likelihoods)


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
            tasks.append(Task(question=question, problem=question.problem))
            continue
        prompt, row = next(prompts), next(calling) if question.calls else None
        bad = next((str(each) for each in (prompt, row) if isinstance(each, BadRow)), "")
        ids = () if isinstance(prompt, BadRow) else tuple(prompt)
        rendered = "" if row is None or isinstance(row, BadRow) else template.decode(row.ids[len(ids) :])
        own = replace(sampling, **dict(question.own)) if question.own else None
        tasks.append(Task(question=question, prompt_ids=ids, sampling=own, rendered=rendered, problem=bad))
    return tasks


def to_task(conversation: Conversation, *, id: str, template: ChatTemplate) -> Task:
    """The last answer of the conversation is what is expected; everything before it is the prompt."""
    *prompt, answer = conversation.messages
    question = Question(id=id, where=conversation.where, messages=tuple(prompt), reference=answer)
    return Task(question=question, prompt_ids=tuple(template.encode_prompt(conversation)))


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


def to_given_tasks(questions: Sequence[Question], *, template: ChatTemplate) -> list[Task]:
    """Tasks with given texts: the choices of a row, else its reference; a plain text behind its first token."""
    examples = [_examples(question) for question in questions]
    encoded = template.encode_each(list(chain.from_iterable(examples)))
    tasks = []
    for question, of_row in zip(questions, examples, strict=True):
        found = [next(encoded) for _ in of_row]
        bad = next((str(row) for row in found if isinstance(row, BadRow)), question.problem)
        rows = [row for row in found if not isinstance(row, BadRow)]
        if bad:
            tasks.append(Task(question=question, problem=bad))
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
        given.append(Given(text=text, token_ids=tuple(answer), end_tokens=end))
    if not all(each.token_ids for each in given):
        return Task(question=question, problem=f"{question.where}: the answer has no tokens behind the first")
    return Task(
        question=question, prompt_ids=tuple(rows[0].ids[:border]), given=tuple(given),
        rendered=texts[0] if question.calls else "",
    )  # fmt: skip
