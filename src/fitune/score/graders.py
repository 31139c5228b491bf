"""Grades of answers: a number in 0..1 for an answer and its reference."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

from fitune.errors import MissingExtra, RecipeError, did_you_mean

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


class References:
    """Facts of the references seen so far, one after another: enough to choose graders by."""

    def __init__(self) -> None:
        self.missing = self.longest = 0
        self._are_numbers = True

    def add(self, reference: str | None) -> None:
        if reference is None:
            self.missing += 1
            return
        self._are_numbers = self._are_numbers and _is_number(reference)
        self.longest = max(self.longest, len(reference.split()))

    def graders(self) -> tuple[tuple[str, ...], str]:
        """Graders that suit the references, and why, in words to print.

        Every reference a number or ending in GSM8K's ``#### 18``: number. All of at most SHORT_ANSWER_WORDS words:
        exact_match and contains. Otherwise rouge. Rows without a reference are not graded.
        """
        if self.missing:
            return (), f"{self.missing} rows have no reference"
        if self._are_numbers:
            return ("number",), "every reference is a number or ends in #### and a number"
        if self.longest <= SHORT_ANSWER_WORDS:
            return ("exact_match", "contains"), f"no reference is longer than {self.longest} words"
        return ("rouge",), f"references have up to {self.longest} words, so wording may differ"


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
