"""Rows of a dataset to tasks, and the grades of answers to them.

A task is a prompt, what the answer should be, and an id that no other row has.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

from fitune.data.formats import Conversation, to_example
from fitune.data.rows import Row
from fitune.data.sources import read_rows
from fitune.data.templates import ChatTemplate
from fitune.errors import DataError, MissingExtra, RecipeError, did_you_mean
from fitune.spec.plan import DataSource

ID_COLUMNS = ("custom_id", "id")
"""Taken as the id when the first row has it; otherwise rows are numbered from 1."""

_SHOWN = 5
"""How many faulty rows an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered."""

    id: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    expected: str
    where: str

    @property
    def fingerprint(self) -> str:
        """A hash of the prompt's token ids: an answer belongs to a prompt, not only to an id."""
        return hashlib.blake2b(repr(self.prompt_ids).encode(), digest_size=12).hexdigest()


def read_tasks(source: DataSource, *, template: ChatTemplate, id_column: str = "") -> list[Task]:
    """Every row of ``source`` as a task, in the order of the source.

    Raises DataError when ids are missing or appear twice, listing the first ones; when a row cannot be read;
    and when there is no row at all.
    """
    rows = list(read_rows(source))
    if not rows:
        raise DataError(f"{source.path}: no rows to answer")
    ids = row_ids(rows, id_column=id_column)
    conversations = (to_example(row, format=source.format, columns=source.columns) for row in rows)
    pairs = zip(ids, conversations, strict=True)
    return [to_task(_conversation(example, source), id=id_, template=template) for id_, example in pairs]


def to_task(conversation: Conversation, *, id: str, template: ChatTemplate) -> Task:
    """The last answer of the conversation is what is expected; everything before it is the prompt."""
    *prompt, answer = conversation.messages
    return Task(
        id=id,
        prompt_ids=tuple(template.encode_prompt(conversation)),
        prompt_text="\n".join(message.content for message in prompt),
        expected=answer.content,
        where=conversation.where,
    )


def row_ids(rows: list[Row], *, id_column: str = "") -> list[str]:
    """The id of each row as text: from ``id_column``, from the first of ID_COLUMNS, or the row's number.

    Raises DataError listing the first rows whose id is missing or was there before.
    """
    column = id_column or next((name for name in ID_COLUMNS if name in rows[0].fields), "")
    if not column:
        return [str(number) for number in range(1, len(rows) + 1)]
    ids = [_id_text(row.fields.get(column)) for row in rows]
    _refuse_missing(rows, ids, column)
    _refuse_duplicates(rows, ids, column)
    return [str(id_) for id_ in ids]


def _id_text(value: Any) -> str | None:
    """Texts and whole numbers are ids; anything else counts as missing."""
    if isinstance(value, str) and value.strip():
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _refuse_missing(rows: list[Row], ids: list[str | None], column: str) -> None:
    missing = [row.where for row, id_ in zip(rows, ids, strict=True) if id_ is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(rows)} rows have no id in column {column!r}: {_first(missing)}",
            hint="give every row a text or a whole number there, or name another column",
        )


def _refuse_duplicates(rows: list[Row], ids: list[str | None], column: str) -> None:
    first_with: dict[str | None, str] = {}
    again = []
    for row, id_ in zip(rows, ids, strict=True):
        if id_ in first_with:
            again.append(f"{id_!r} at {row.where}, already at {first_with[id_]}")
        first_with.setdefault(id_, row.where)
    if again:
        raise DataError(
            f"{len(again)} of {len(rows)} rows repeat an id of column {column!r}: {_first(again)}",
            hint="make the ids unique, or name another column; each id is answered exactly once",
        )


def _first(problems: Iterable[str]) -> str:
    problems = list(problems)
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _conversation(example: Any, source: DataSource) -> Conversation:
    if isinstance(example, Conversation):
        return example
    raise DataError(
        f"{example.where}: plain text has no question to answer and no answer to compare with",
        hint=f"name the columns of {source.path} that hold the prompt and the expected answer",
    )


SHORT_ANSWER_WORDS = 20
"""References up to this long are compared word for word; longer ones by what they have in common."""


def grade(name: str, answer: str, expected: str) -> float:
    """The grade of one answer in 0..1. Raises RecipeError for an unknown grader."""
    check_graders((name,))
    return _GRADERS[name](answer, expected)


def check_graders(names: Sequence[str]) -> None:
    """Raises RecipeError naming the graders there are."""
    for name in names:
        if name not in _GRADERS:
            known = tuple(_GRADERS)
            hint = did_you_mean(name, known) or f"graders: {', '.join(known)}"
            raise RecipeError(f"unknown grader {name!r}", hint=hint)


def choose_graders(references: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Graders that suit the references, and why, in words to print.

    Every reference a number or ending in GSM8K's ``#### 18``: number. All of at most SHORT_ANSWER_WORDS words:
    exact_match and contains. Otherwise rouge.
    """
    if all(_is_number(text) for text in references):
        return ("number",), "every reference is a number or ends in #### and a number"
    longest = max(len(text.split()) for text in references)
    if longest <= SHORT_ANSWER_WORDS:
        return ("exact_match", "contains"), f"no reference is longer than {longest} words"
    return ("rouge",), f"references have up to {longest} words, so wording may differ"


def exact_match(answer: str, expected: str) -> float:
    """1 when both are the same text; runs of white space count as one space."""
    return float(answer.split() == expected.split())


def contains(answer: str, expected: str) -> float:
    """1 when the reference stands somewhere in the answer; runs of white space count as one space."""
    return float(" ".join(expected.split()) in " ".join(answer.split()))


def number(answer: str, expected: str) -> float:
    """1 when the last number of the answer is the last number of the reference.

    GSM8K writes its result after ``####``: where an answer has that mark, only what follows counts. Signs,
    decimals and thousands separators are read (``$1,234.50`` is 1234.5), words for numbers are not.
    """
    found, wanted = last_number(answer), last_number(expected)
    return float(found is not None and found == wanted)


def rouge(answer: str, expected: str) -> float:
    """ROUGE-L F1 (Lin 2004) by Google's rouge-score, without stemming."""
    return float(_rouge_scorer().score(expected, answer)["rougeL"].fmeasure)


_GRADERS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "number": number,
    "rouge": rouge,
}

_NUMBER = re.compile(r"(?:(?<!\w)[-−]\$?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""A minus belongs to the number only when no word or digit stands before it: 10-5 ends in 5."""


def last_number(text: str) -> Decimal | None:
    """The last number of a text, or None. After ``####`` only what follows counts."""
    found = _NUMBER.findall(text.rpartition("####")[2])
    if not found:
        return None
    return Decimal(re.sub(r"[,$]", "", found[-1]).replace("−", "-"))


def _is_number(reference: str) -> bool:
    if "####" in reference:
        return last_number(reference) is not None
    return _NUMBER.fullmatch(reference.strip().strip("$€£%.")) is not None


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise MissingExtra("the rouge grader", extra="metrics") from None
    return rouge_scorer.RougeScorer(["rougeL"])
