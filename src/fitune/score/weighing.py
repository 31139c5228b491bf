"""Given texts are weighed: how likely the model finds each of them as an answer.

A text stands where the answer stands in training, with training's ids: prompt and answer are encoded apart, so no token
lies across their border. The choices of a row are compared behind the ids that all of them begin with; where a
template writes something else in front of one of them, it counts as the choice's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fitune.data.conversations.messages import Example, Message, Text
from fitune.data.conversations.templates import ChatTemplate, Encoded
from fitune.data.reading.rows import BadRow
from fitune.errors import ScoringFailed
from fitune.score.asking import ENGINE_FAILED, Restarted
from fitune.score.engines.engine import Continuation, Engine, Likelihood
from fitune.score.tasks import Answer, Given, Question, Task


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


class Weigher:
    """Weighs the given texts of tasks by an engine, which is started again when it died."""

    def __init__(self, open_engine: Callable[[], Engine], *, wanted_by: str) -> None:
        """``wanted_by`` names the graders, for the error of an engine that cannot weigh."""
        self._wanted_by = wanted_by
        self._engine = Restarted(open_engine)
        self._has_weighed = False

    def ask(
        self, tasks: Sequence[Task], *, on_answer: Callable[[], None], ahead: Sequence[Task] = ()
    ) -> list[Answer]:
        """An Answer with likelihoods, or an error, for each task, in their order. ``on_answer`` is called after each.

        ``ahead``, the tasks of the next call, wait for it: a text is read in one pass.
        Raises ScoringFailed when the engine cannot weigh or died too often.
        """
        asked = [
            Continuation(id=f"{number} {task.id}", prompt_ids=given.prompt_ids, token_ids=given.token_ids)
            for task in tasks
            if not task.problem
            for number, given in enumerate(task.given)
        ]
        self._require_weights(asked)
        found: dict[str, dict[int, Likelihood]] = {task.id: {} for task in tasks}
        wanted = {task.id: len(task.given) for task in tasks}
        for task in tasks:
            if task.problem:
                on_answer()
        for likelihood in self._weigh(asked):
            number, _, id_ = likelihood.id.partition(" ")
            found[id_][int(number)] = likelihood
            if len(found[id_]) == wanted[id_]:
                on_answer()
        return [_answer(task, [found[task.id][n] for n in sorted(found[task.id])]) for task in tasks]

    def close(self) -> None:
        self._engine.close()

    def _weigh(self, asked: Sequence[Continuation]) -> Iterator[Likelihood]:
        return self._engine.each(
            asked,
            lambda engine, some: engine.weigh(some),
            lambda one, error: Likelihood(id=one.id, code=ENGINE_FAILED, error=error),
        )

    def _require_weights(self, asked: Sequence[Continuation]) -> None:
        """Two tokens are weighed before the first row: most servers tell no log-probabilities of a prompt."""
        ids = next(((*one.prompt_ids, *one.token_ids)[:2] for one in asked), ())
        if self._has_weighed or not ids:
            return
        self._has_weighed = True
        (tried,) = self._weigh([Continuation(id="0", prompt_ids=ids[:1], token_ids=ids[1:])])
        if tried.error:
            raise ScoringFailed(
                f"the engine cannot weigh given answers, which grader {self._wanted_by} needs: {tried.error}",
                hint="--engine transformers and --engine vllm can, and the server of vLLM",
            )


def _answer(task: Task, likelihoods: Sequence[Likelihood]) -> Answer:
    fault = next((found for found in likelihoods if found.error), None)
    error = task.problem or (fault.error if fault else "")
    return Answer(
        task=task, text="", finish_reason="error" if error else "stop", completion_tokens=0,
        code=("bad_row" if task.problem else fault.code if fault else ""), error=error,
        likelihoods=() if error else tuple(likelihoods),
    )  # fmt: skip
