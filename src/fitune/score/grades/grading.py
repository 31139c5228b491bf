"""Grades of whole shards: each shard is graded once by each grader, whatever is killed and whenever.

Of a judge's shard the rows that it did not answer are asked again by the next run. Patterns, schemas and functions are
called here, without a limit of time: whoever names one that never ends, ends it with Ctrl-C, and graded shards stay.
"""

import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache, cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any

from fitune.data.conversations.messages import Message
from fitune.data.conversations.templates import ChatTemplate
from fitune.data.conversations.tool_calls import calls_in_text
from fitune.data.reading.rows import BadRow
from fitune.errors import FituneError, RecipeError, first_line
from fitune.score.answers import Line, answer_text, written_rows
from fitune.score.asking import Asker
from fitune.score.engines.opening import check_engine, open_texts
from fitune.score.grades.graders import Grader, json_schema, regex
from fitune.score.grades.judge_settings import fill, question_of, read_judge, read_verdict
from fitune.score.index import Index, open_index
from fitune.score.questions import Question
from fitune.score.shards import OF_THE_ROW, Shards
from fitune.score.tasks import Answer, to_tasks
from fitune.values.model.model_config import load_model_spec
from fitune.values.serial import require_shallow

_DECODER = json.JSONDecoder()
_canonical = partial(json.dumps, sort_keys=True)


def try_graders(graders: Sequence[Grader]) -> None:
    """Load each pattern, schema and function, and try each judge. Raises RecipeError for one that cannot be used."""
    for grader in graders:
        try:
            if grader.row.judges:
                with closing(Judging(grader.argument)) as judge:
                    judge.try_out()
            elif not (grader.row.grade or grader.row.grade_likelihoods):
                _loaded(grader)
        except FituneError as error:
            error.message = f"grader {grader.name!r}: {error.message}"  # a model, a server of its own
            raise
        except Exception as error:  # a file of Python may raise anything
            # jsonschema's has ten lines
            raise RecipeError(
                f"grader {grader.name!r}: {type(error).__name__}: {first_line(error)}"
            ) from None


def grade_shards(shards: Shards, graders: Sequence[Grader]) -> None:
    """Grade what is not graded yet. A grader that raises leaves an error in its row, and the grade 0; a judge that does
    not answer, or says nothing that can be read, an error and no grade."""
    for number in shards.numbers():
        missing = [g for g in graders if not g.row.judges and not shards.has_grades(number, g.key)]
        read = _read(shards, number) if missing else []  # once for all of them
        for grader in missing:
            shards.write_grades(number, grader.key, (grade_line(grader, *both) for both in read))
    for grader in graders:
        if grader.row.judges:
            with closing(Judging(grader.argument)) as judge:
                for number in shards.numbers():
                    earlier = (
                        shards.grades(number, grader.key) if shards.has_grades(number, grader.key) else None
                    )
                    if earlier is None or any(line.get("retry") for line in earlier):
                        graded = judge.grades(_read(shards, number), earlier or [])
                        shards.write_grades(number, grader.key, graded)


def _read(shards: Shards, number: int) -> list[tuple[Line, Line]]:
    """Each answer of a shard, and what was asked."""
    return list(zip(shards.rows(number), shards.rows(number, "tasks"), strict=True))


def grade_line(grader: Grader, line: Line, task: Line) -> Line:
    """The line of the grade of one answer, beside the task that was asked."""
    kind = grader.row
    if kind.grade_likelihoods:
        # a row without log-likelihoods has not chosen the right one; of its likelihood nothing is known
        if not line["response"]:
            return {"grade": 0.0 if kind.needs_choices else None}
        return dict(kind.grade_likelihoods(line["response"]["body"]))
    text = answer_text(line)
    if text is None:
        return {"grade": 0.0}
    if kind.of_calls and task.get("calls"):
        return {"grade": float(kind.of_calls(*compared_calls(text, task["expected"], task["calls"])))}
    if kind.grade:
        return {"grade": kind.grade(text, task["expected"])}
    try:
        value = _loaded(grader)(answer=text, expected=task["expected"], prompt=task["prompt"])
        if not isinstance(value, Real) or not math.isfinite(value):  # numpy's numbers, too
            raise TypeError(f"the function returned {value!r:.40}, not a finite number")
        return {"grade": float(value)}
    except Exception as error:  # whatever somebody's function raises is an error of the row
        return {"grade": 0.0, "error": f"{type(error).__name__}: {error}"[:500]}


@cache
def _loaded(grader: Grader) -> Callable[..., Any]:
    """The pattern, the schema or the function as a function of answer, expected and prompt."""
    if grader.kind == "python":
        path, _, name = grader.argument.rpartition(":")
        spec = importlib.util.spec_from_file_location(f"grader {path}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no python file")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
        return function
    compare = regex if grader.kind == "regex" else json_schema
    compare("", grader.argument)  # a pattern that is none, a schema that is none, a library that is missing
    return lambda answer, **_: compare(answer, grader.argument)


def compared_calls(answer: str, expected: str, wanted: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of ``answer`` and of ``expected``, each as canonical JSON. ``wanted``: those of ``expected``
    as the data has them."""
    # Most templates write a call as JSON with the tool's name and its arguments, between tokens of their own: these are
    # compared in any order, whatever else is said. Where a template writes them in another way (a name in front of the
    # arguments, tags) the words are compared, and the JSON among them by value.
    calls = Counter(_canonical(json.loads(call)) for call in wanted)
    said, meant = _parts(answer), _parts(expected)
    if _calls(meant) == calls:
        return _calls(said), calls
    return Counter([_canonical(said)]), Counter([_canonical(meant)])


def _parts(text: str) -> list[Any]:
    """Words, and JSON's objects and lists, in their order."""
    parts: list[Any] = []
    at = begin = 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, end = _DECODER.raw_decode(text, at)
                require_shallow(value)
            except RecursionError:
                break  # brackets without end
            except ValueError:
                pass
            else:
                parts += [*text[begin:at].split(), value]
                at = begin = end
                continue
        at += 1
    return parts + text[begin:].split()


def _calls(parts: Sequence[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        if not isinstance(part, str):
            try:
                calls = calls_in_text("", part)
            except BadRow:
                continue
            found.update(
                _canonical({"name": call.name, "arguments": json.loads(call.arguments)}) for call in calls
            )
    return found


_NO_REFERENCE = "(none is known)"


class Judging:
    """Asks one judge; its model is loaded when the first row is to be judged."""

    def __init__(self, path: str) -> None:
        self._judge = read_judge(path)
        self._question, self._plan = question_of(self._judge), self._judge.plan
        self._closing = ExitStack()

    def try_out(self) -> None:
        """Raises FituneError for what would stop the judge: settings, a folder without a model, a silent server."""
        check_engine(self._plan)
        load_model_spec(self._plan.model)
        if self._plan.engine == "server":
            (answer,) = self._ask([Question(id="try", where="", messages=(Message("user", "Say yes."),))])
            if answer.error:
                raise RecipeError(f"the judge at {self._plan.url} does not answer: {answer.error}")

    def grades(self, rows: Sequence[tuple[Line, Line]], earlier: Sequence[Line]) -> Iterator[Line]:
        """A grade for each answer and its task; ``earlier`` grades are kept unless they ask for another try."""
        kept = {place: line for place, line in enumerate(earlier) if not line.get("retry")}
        asked = {
            place: self._questions(*row)
            for place, row in enumerate(rows)
            if place not in kept and answer_text(row[0]) is not None
        }
        said = iter(self._ask([question for some in asked.values() for question in some]))
        for place in range(len(rows)):
            if place in kept:
                yield kept[place]
            elif place not in asked:
                yield {"grade": 0.0}
            elif not asked[place]:
                yield {"grade": None, "error": "the other scoring has no answer to this row"}
            else:
                yield self._graded([next(said) for _ in asked[place]])

    def close(self) -> None:
        """Free the judge's model and the other scoring's answers."""
        self._closing.close()

    def _questions(self, answered: Line, task: Line) -> list[Question]:
        """One question, or two that differ in the order of the answers; none where there is no other answer."""
        id_, mine = answered["custom_id"], str(answer_text(answered))
        expected = task["expected"] if task["expected"] is not None else _NO_REFERENCE
        texts = {"prompt": task["prompt"], "expected": expected, "answer": mine}
        asked = {id_: texts}
        if self._judge.against:
            line = self._others.text(id_)
            other = None if line is None else answer_text(json.loads(line))
            if other is None:
                return []
            asked = {
                f"{id_} first": texts | {"answer_a": mine, "answer_b": other},
                f"{id_} second": texts | {"answer_a": other, "answer_b": mine},
            }
        return [
            Question(id=name, where=name, messages=(Message("user", fill(self._question, each)),))
            for name, each in asked.items()
        ]

    @cached_property
    def _others(self) -> Index:
        others = self._closing.enter_context(open_index())
        path = Path(self._judge.against) / "answers.jsonl"
        answers = written_rows(path, "custom_id", "response", check=answer_text)
        others.add_texts((row["custom_id"], line) for line, row in answers)
        return others

    def _graded(self, answers: Sequence[Answer]) -> Line:
        said = [answer.text for answer in answers]
        words: Line = {"said": said[0] if len(said) == 1 else said}
        if fault := next((answer for answer in answers if answer.error), None):
            again = {} if fault.code in OF_THE_ROW else {"retry": True}
            return {"grade": None, "error": f"the judge does not answer: {fault.error}", **again, **words}
        verdicts = [read_verdict(text, self._judge.verdict) for text in said]
        if any(verdict is None for verdict in verdicts):
            cut = any(answer.finish_reason == "length" for answer in answers)
            why = f", cut off at {self._plan.sampling.max_new_tokens} tokens" if cut else ""
            return {"grade": None, "error": f"the judge's verdict cannot be read{why}", **words}
        if len(verdicts) == 1:
            return {"grade": verdicts[0], **words}
        # A is this scoring's answer first, the other's then: preferred in both orders, or in neither
        grade = 1.0 if verdicts == [1.0, 0.0] else 0.0 if verdicts == [0.0, 1.0] else 0.5
        return {"grade": grade, **words}

    def _ask(self, questions: Sequence[Question]) -> list[Answer]:
        if not questions:
            return []
        asker, template = self._opened
        return asker.ask(to_tasks(questions, template=template, sampling=self._plan.sampling))

    @cached_property
    def _opened(self) -> tuple[Asker, ChatTemplate]:
        tokenizer, template = open_texts(self._plan)
        return self._closing.enter_context(closing(Asker(self._plan, tokenizer, template))), template
