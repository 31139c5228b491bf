"""Grades of answers: a number for an answer and its reference, most of them in 0..1."""

import hashlib
import json
import math
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fitune.errors import MissingExtra, RecipeError, did_you_mean
from fitune.files import read_text
from fitune.score.answers import Line, likeliest
from fitune.score.grades.judge_settings import judge_content, read_judge
from fitune.units import counted
from fitune.values.reports import Scale

Graded = dict[str, float]
"""``grade``, and beside it ``weight``, how much the row counts in the mean: its tokens or bytes; without it, one."""
_LARGEST_LOG = 700.0
"""exp of more is no float."""
SHORT_ANSWER_WORDS = 20
"""References up to this long are compared word for word; longer ones by what they have in common."""


@dataclass(frozen=True, slots=True)
class GraderKind:
    """One row of GRADERS. ``argument``: what stands after the colon of ``name:argument``; empty, nothing may."""

    measures: str
    """The mean over the rows, in words."""
    grade: Callable[[str, str], float] | None = None
    """The grade of an answer, beside its reference."""
    grade_likelihoods: Callable[[Line], Graded] | None = None
    """The grade of a row by the log-likelihoods of its given answers. Without both: what the argument names."""
    argument: str = ""
    of_calls: Callable[[Counter[str], Counter[str]], bool] | None = None
    """Right for the calls of tools in answer and reference, where there are such; else ``grade`` compares texts."""
    needs_reference: bool = True
    needs_choices: bool = False
    rules: str = ""
    """Changed with the rules of ``grade``: grades by earlier ones are made again."""
    judges: bool = False
    """A model that is asked (score/grades/grading.py); scale and words follow from its settings."""
    scale: Scale = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """A grader as it was asked for: ``regex:^[0-9]+$`` has kind regex, and the pattern as argument."""

    name: str
    kind: str
    argument: str
    key: str
    """A hash of all that its grades depend on, files included."""
    scale: Scale
    measures: str
    """Its mean in words."""

    @property
    def row(self) -> GraderKind:
        """The row of GRADERS."""
        return GRADERS[self.kind]


def require_one_way(graders: Sequence[Grader]) -> None:
    """Raises RecipeError where some graders need written answers and others log-likelihoods of given ones."""
    given = [grader.name for grader in graders if grader.row.grade_likelihoods]
    written = [grader.name for grader in graders if not grader.row.grade_likelihoods]
    if given and written:
        raise RecipeError(
            f"{', '.join(given)}: log-likelihoods of given answers; {', '.join(written)}: answers that the model "
            "writes",
            hint="score twice, into two folders",
        )


def open_graders(names: Sequence[str]) -> tuple[Grader, ...]:
    """The graders of these names. Raises RecipeError for an unknown one, and for a file that cannot be read."""
    return tuple(_open(name) for name in dict.fromkeys(names))


def _open(name: str) -> Grader:
    kind, colon, argument = name.partition(":")
    if kind not in GRADERS:
        known = tuple(GRADERS)
        hint = did_you_mean(kind, known) or f"graders: {', '.join(known)}"
        raise RecipeError(f"unknown grader {kind!r}", hint=hint)
    row = GRADERS[kind]
    wanted = row.argument
    path, _, function = argument.rpartition(":")
    is_function = kind == "python" and path and function.isidentifier()
    if bool(wanted) != bool(argument) or (colon and not wanted) or (kind == "python" and not is_function):
        raise RecipeError(
            f"grader {name!r}: " + (f"needs {wanted}" if wanted else f"{kind} takes nothing after a colon"),
            hint=f"{kind}:{wanted}" if wanted else kind,
        )
    content, scale, measures = row.rules, row.scale, row.measures
    if "FILE" in wanted:
        file = path if is_function else argument
        try:
            content = read_text(file)
        except (OSError, ValueError) as error:
            raise RecipeError(f"grader {name!r}: {file} cannot be read: {error}") from None
    if kind == "json_schema":
        argument = content
    if kind == "judge":
        judge = read_judge(argument)
        content += judge_content(judge)
        scale, measures = judge.scale, judge.measures
    key = hashlib.sha256(f"{name} {content}".encode()).hexdigest()[:12]
    return Grader(name=name, kind=kind, argument=argument, key=key, scale=scale, measures=measures)


class References:
    """Facts of the references seen so far, one after another: enough to choose graders by."""

    def __init__(self) -> None:
        self.rows = self.missing = self.longest = self.without_choices = 0
        self._are_numbers = True

    def add(self, reference: str | None, *, has_choices: bool = False, has_calls: bool = False) -> None:
        """Counts one row; ``reference`` is None where it has none."""
        self.rows += 1
        self.without_choices += not has_choices
        if reference is None:
            self.missing += 1
            return
        if "####" in reference:
            is_number = last_number(reference.rpartition("####")[2]) is not None
        else:
            is_number = _NUMBER.fullmatch(reference.strip().strip("$€£%.")) is not None
        self._are_numbers = self._are_numbers and is_number
        self.longest = max(self.longest, 0 if has_calls else len(reference.split()))

    def graders(self) -> tuple[tuple[str, ...], str]:
        """Graders that suit the references, and why, in words to print.

        Every reference a number or ending in GSM8K's ``#### 18``: number. All of at most SHORT_ANSWER_WORDS words:
        exact_match and contains. Otherwise rouge. Rows without a reference are not graded.
        """
        if self.missing:
            return (), f"{counted(self.missing, 'row')} without a reference"
        if self._are_numbers:
            return ("number",), "every reference is a number or ends in #### and a number"
        if self.longest <= SHORT_ANSWER_WORDS:
            why = (
                f"no reference is longer than {counted(self.longest, 'word')}"
                if self.longest
                else "references are calls"
            )
            return ("exact_match", "contains"), why
        return ("rouge",), f"references have up to {self.longest} words, so wording may differ"


def exact_match(answer: str, expected: str) -> float:
    """1 when both are the same text; runs of white space count as one space."""
    return float(answer.split() == expected.split())


def contains(answer: str, expected: str) -> float:
    """1 when the reference stands somewhere in the answer; runs of white space count as one space."""
    return float(" ".join(expected.split()) in " ".join(answer.split()))


def number(answer: str, expected: str) -> float:
    """1 when the number of the answer (``last_number``) is that of the reference.

    GSM8K writes its result after ``####``: where a line ends in that mark and a number, the number counts. Signs,
    decimals, exponents and thousands separators are read (``$1,234.50`` is 1234.5), words for numbers are not.
    """
    found, wanted = last_number(answer), last_number(expected)
    return float(found is not None and found == wanted)


def rouge(answer: str, expected: str) -> float:
    """ROUGE-L F1 (Lin 2004) by Google's rouge-score, without stemming; words of other scripts than Latin count, too."""
    library = _library("rouge_score.rouge_scorer", "rouge grader")
    scorer = library.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=_rouge_words))
    return float(scorer.score(expected, answer)["rougeL"].fmeasure)


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of words, without case, punctuation and articles.

    SQuAD's (arXiv 1606.05250) for ASCII; punctuation beyond it is taken out, too, as MLQA does (arXiv 1910.07475).
    """
    found, wanted = Counter(_bare_words(answer)), Counter(_bare_words(expected))
    shared = (found & wanted).total()
    if not shared:
        return float(not found and not wanted)
    return 2 * shared / (found.total() + wanted.total())


_SACREBLEU = ("sacrebleu", "bleu and chrf graders")


def bleu(answer: str, expected: str) -> float:
    """BLEU of one sentence by sacrebleu, in 0..1, with its effective order: the mean is not the corpus BLEU."""
    return float(_library(*_SACREBLEU).sentence_bleu(answer, [expected]).score) / 100


def chrf(answer: str, expected: str) -> float:
    """chrF2 of one sentence by sacrebleu, in 0..1."""
    return float(_library(*_SACREBLEU).sentence_chrf(answer, [expected]).score) / 100


def regex(answer: str, pattern: str) -> float:
    """1 when the pattern is found in the answer."""
    return float(re.search(pattern, answer) is not None)


def json_schema(answer: str, schema: str) -> float:
    """1 when the answer is JSON that the schema allows; a fence of three backticks around it is dropped."""
    validator = _validator(schema)
    try:
        value = json.loads(_FENCE.sub("", answer.strip()))
    except ValueError:
        return 0.0
    return float(validator.is_valid(value))


def choice(body: Line, size: Callable[[Any], float] = lambda choice: 1.0) -> Graded:
    """1 when the choice that is likeliest per ``size`` is the right one (lm-evaluation-harness: acc; per character:
    acc_norm). Choices are compared by their texts alone."""
    return {"grade": float(likeliest(body, size) == body["right"])}


def loglikelihood(body: Line) -> Graded:
    """Log-probability of the reference and of the end of the answer, in nats; the prompt counts nowhere."""
    right = body["choices"][body["right"]]
    return {"grade": float(right["logprob"] + right["end_logprob"])}


def perplexity(body: Line, *, per_byte: bool = False) -> Graded:
    """exp of the nats per token of the reference and the end of the answer, as the loss of training counts; or per
    UTF-8 byte of the reference, which is comparable between tokenizers."""
    right = body["choices"][body["right"]]
    pieces = len(right["text"].encode()) if per_byte else right["tokens"] + right["end_tokens"]
    nats = -loglikelihood(body)["grade"] / pieces
    return {"grade": math.exp(min(nats, _LARGEST_LOG)), "weight": float(pieces)}


GRADERS: dict[str, GraderKind] = {
    "exact_match": GraderKind("answers that are the reference, white space aside", exact_match, of_calls=operator.eq),
    "contains": GraderKind("answers that hold the reference", contains, of_calls=operator.ge),
    "number": GraderKind("answers whose number is that of the reference", number, rules="2"),
    "f1": GraderKind("mean F1 of the words", f1, rules="2"),
    "rouge": GraderKind("mean ROUGE-L F-measure", rouge, rules="2"),
    "bleu": GraderKind("mean BLEU of single answers", bleu),
    "chrf": GraderKind("mean chrF2 of single answers", chrf),
    "regex": GraderKind("answers in which the pattern is found", argument="PATTERN", needs_reference=False),
    "json_schema": GraderKind(
        "answers that are JSON of the schema", argument="FILE.json", needs_reference=False
    ),
    "python": GraderKind(
        "mean of what the function returns", argument="FILE.py:FUNCTION", needs_reference=False, scale="value"
    ),
    "judge": GraderKind("", argument="FILE.yaml", needs_reference=False, judges=True),
    "choice": GraderKind(
        "rows whose likeliest choice is the right one", grade_likelihoods=choice, needs_choices=True
    ),
    "choice_norm": GraderKind(
        "rows whose likeliest choice per character is the right one", needs_choices=True,
        grade_likelihoods=lambda body: choice(body, lambda c: len(c["text"])),
    ),
    "choice_norm_tokens": GraderKind(
        "rows whose likeliest choice per token is the right one", needs_choices=True,
        grade_likelihoods=lambda body: choice(body, lambda c: c["tokens"]),
    ),
    "loglikelihood": GraderKind(
        "mean log-probability of the reference", grade_likelihoods=loglikelihood, scale="nats"
    ),
    "perplexity": GraderKind(
        "perplexity per token of the references, their ends included", grade_likelihoods=perplexity,
        scale="perplexity",
    ),
    "byte_perplexity": GraderKind(
        "perplexity per byte of the references", grade_likelihoods=partial(perplexity, per_byte=True),
        scale="perplexity",
    ),
}  # fmt: skip
CHOICE_GRADERS = ("choice", "choice_norm")

_NUMBER = re.compile(
    r"(?:(?<!\w)[-−]\$?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
)
"""A minus belongs to the number only when no word or digit stands before it: 10-5 ends in 5."""
_RESULT = re.compile(rf"####[ \t]*[$€£]?({_NUMBER.pattern})[ \t.%€£]*$", re.MULTILINE)


def last_number(text: str) -> Decimal | None:
    """The number behind the last ``####`` that ends a line, else the last number of the text; None without one."""
    found = _RESULT.findall(text) or _NUMBER.findall(text)
    if not found:
        return None
    return Decimal(re.sub(r"[,$]", "", found[-1]).replace("−", "-"))


@cache
def _library(name: str, needed_by: str) -> Any:
    """A module of the extra ``metrics``. Raises MissingExtra."""
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtra(f"the {needed_by}", extra="metrics") from None


_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana and Han: no spaces stand between words, so each character counts as one."""
_ROUGE_WORD = re.compile(rf"[a-z0-9]+|[{_UNSPACED}]|[^\0-\x7f{_UNSPACED}]+")


def _rouge_words(text: str) -> list[str]:
    """rouge-score's own words, which are of a-z and 0-9, and those of other scripts than Latin."""
    kept = "".join(c if c.isascii() or _is_of_another_script(c) else " " for c in text.lower())
    return [word for word in _ROUGE_WORD.findall(kept) if word.isascii() or any(map(str.isalnum, word))]


@cache
def _is_of_another_script(c: str) -> bool:
    """True for letters, marks and digits beyond U+0370 that are no forms of Latin letters and digits (é, ﬁ, ½)."""
    base = unicodedata.normalize("NFKD", c)[0]
    is_latin = c < "\u0370" or base.isascii() or "LATIN" in unicodedata.name(base, "")
    return not is_latin and unicodedata.category(c)[0] in "LMN"


_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


def _bare_words(text: str) -> list[str]:
    bare = "".join(
        c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P"
    )
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


@cache
def _validator(schema: str) -> Any:
    jsonschema = _library("jsonschema", "json_schema grader")
    wanted = json.loads(schema)
    if not isinstance(wanted, dict | bool):
        raise ValueError("a schema is an object, true or false")
    kind = jsonschema.validators.validator_for(wanted)
    kind.check_schema(wanted)
    return kind(wanted)
