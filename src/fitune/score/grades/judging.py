"""A judge grades shards: a model, or a server, is asked about each answer, and its words are kept beside the grade."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from fitune.data.conversations.messages import Message
from fitune.data.conversations.templates import ChatTemplate
from fitune.errors import RecipeError
from fitune.files import open_regular
from fitune.score.answers import Line, answer_text
from fitune.score.asking import Asker
from fitune.score.engines.opening import check_engine, open_texts
from fitune.score.grades.judge_settings import fill, question_of, read_judge, read_verdict
from fitune.score.index import Index, open_index
from fitune.score.shards import OF_THE_ROW
from fitune.score.tasks import Answer, Question, to_tasks
from fitune.score.worker import open_asker
from fitune.spec.model.model_config import load_model_spec

_NO_REFERENCE = "(none is known)"


class Judging:
    """Asks one judge; its model is loaded when the first row is to be judged."""

    def __init__(self, path: str) -> None:
        self._judge = read_judge(path)
        self._question = question_of(self._judge)
        self._plan = self._judge.plan
        self._opened: tuple[Asker, ChatTemplate] | None = None
        self._others: Index | None = None
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
            place: list(self._questions(*row))
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
        """Free the judge's model and the other scoring's answers; a later row opens them again."""
        self._closing.close()
        self._opened = self._others = None

    def _questions(self, answered: Line, task: Line) -> Iterator[Question]:
        """One question, or two that differ in the order of the answers; none where there is no other answer."""
        id_, mine = answered["custom_id"], str(answer_text(answered))
        expected = task["expected"] if task["expected"] is not None else _NO_REFERENCE
        texts = {"prompt": task["prompt"], "expected": expected, "answer": mine}
        if not self._judge.against:
            yield self._asked(id_, texts)
        elif (other := self._other_answer(id_)) is not None:
            yield self._asked(f"{id_} first", texts | {"answer_a": mine, "answer_b": other})
            yield self._asked(f"{id_} second", texts | {"answer_a": other, "answer_b": mine})

    def _other_answer(self, id_: str) -> str | None:
        """The other scoring's answer to a row; None where it has no such row, or no answer to it."""
        if self._others is None:
            self._others = self._closing.enter_context(open_index())
            with open_regular(Path(self._judge.against) / "answers.jsonl", follow_links=False) as file:
                self._others.add_texts((json.loads(line)["custom_id"], line) for line in file)
        line = self._others.text(id_)
        return None if line is None else answer_text(json.loads(line))

    def _asked(self, id_: str, texts: dict[str, str]) -> Question:
        return Question(id=id_, where=id_, messages=(Message("user", fill(self._question, texts)),))

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
        if self._opened is None:
            tokenizer, template = open_texts(self._plan)
            asker = open_asker(self._plan, tokenizer, template)
            self._closing.callback(asker.close)
            self._opened = asker, template
        asker, template = self._opened
        tasks = to_tasks(questions, template=template, sampling=self._plan.sampling)
        return asker.ask(tasks)
