"""A judge as a YAML file describes it: the model, what it is asked, and how its verdict is read.

| verdict | the judge says                            | grade                                                     |
|---------|-------------------------------------------|-----------------------------------------------------------|
| points  | ``Verdict: 7``, from 1 to 10              | the points                                                |
| yes_no  | ``Verdict: yes``                          | 1 for yes                                                 |
| prefer  | ``Verdict: A``, B or tie, in both orders  | 1 for this scoring, 0 for the other, 0.5 where it is open |
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fitune.errors import RecipeError, did_you_mean
from fitune.files import is_there, open_regular, read_text
from fitune.recipe.score_recipe import ScoreRecipe, checked_recipe
from fitune.recipe.strict_yaml import load_yaml
from fitune.score.plan import ScorePlan, plan_from
from fitune.values.answering import ROWS_AT_ONCE
from fitune.values.reports import Scale

Verdict = Literal["points", "yes_no", "prefer"]

_TASK = "You judge {what} to a question. First say in one to three sentences what is right and what is wrong. Then end"
_ONE = """

Question:
{prompt}

A correct answer, to compare with:
{expected}

Answer:
{answer}
"""
TEMPLATES: dict[Verdict, str] = {
    "points": _TASK.replace("{what}", "an answer")
    + ' with one line "Verdict: N", where N is a whole number from 1 (wrong or useless) to 10 (correct, complete and'
    " clear)." + _ONE,
    "yes_no": _TASK.replace("{what}", "an answer")
    + ' with one line "Verdict: yes" if the answer is correct, or "Verdict: no" if it is not.'
    + _ONE,
    "prefer": _TASK.replace("{what}", "two answers")
    + ' with one line "Verdict: A" or "Verdict: B", whichever answer is better, or "Verdict: tie" if neither is. The'
    """ order of the answers means nothing.

Question:
{prompt}

A correct answer, to compare with:
{expected}

Answer A:
{answer_a}

Answer B:
{answer_b}
""",
}
"""The question of each verdict where the file names no template of its own."""

_NEEDED = {"points": ("answer",), "yes_no": ("answer",), "prefer": ("answer_a", "answer_b")}
_PLACES = re.compile(r"\{(\w+)\}")
_VERDICT = re.compile(r"verdict[\s*_]*[:=][\s*_\"'(\[]*(?:answer\s+)?(\d+(?:\.\d+)?|[a-z]+)", re.IGNORECASE)
_BARE = re.compile(r"[\s*_\"'(\[]*(\d+(?:\.\d+)?|[a-z]+)(?:\s*/\s*10)?[\s*_\"')\].]*", re.IGNORECASE)
_WORDS: dict[Verdict, dict[str, float]] = {
    "points": {},
    "yes_no": {"yes": 1.0, "no": 0.0},
    "prefer": {"a": 1.0, "b": 0.0, "tie": 0.5},
}


class JudgeRecipe(ScoreRecipe):
    """A judge's file: some keys of a scoring (_KEYS), and the judge's own."""

    verdict: Verdict = "points"
    template: str = ""
    against: str = ""


_KEYS = (
    "model", "adapter", "engine", "url", "served_model", "chat_template", "max_new_tokens", "temperature", "top_p",
    "seed", "batch_size", *JudgeRecipe.__annotations__,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A judge's model as the plan of a scoring, and how it judges. ``template`` is a text file with {prompt},
    {expected} and {answer}, or {answer_a} and {answer_b}; ``against`` the folder of the scoring that prefer
    compares with."""

    plan: ScorePlan
    verdict: Verdict
    template: str
    against: str

    @property
    def scale(self) -> Scale:
        """Kind of its mean: points as the judge gave them, or a share of 1."""
        return "points" if self.verdict == "points" else "share"

    @property
    def measures(self) -> str:
        """The mean over the rows, in words."""
        judge = Path(self.plan.served_model or self.plan.model).name
        return {
            "points": f"mean points of {judge}, 1 to 10",
            "yes_no": f"answers to which {judge} says yes",
            "prefer": f"answers that {judge} prefers to those in {self.against}, asked in both orders",
        }[self.verdict]


def read_judge(path: str) -> Judge:
    """The judge of a file. Raises RecipeError naming the key."""
    found = load_yaml(Path(path), kind="judge")
    for name in found:
        if name not in _KEYS:
            hint = did_you_mean(name, _KEYS) or f"keys: {', '.join(_KEYS)}"
            raise RecipeError(f"{path}: unknown key {name!r}", hint=hint)
    try:
        recipe = checked_recipe(JudgeRecipe, **{"max_new_tokens": 512, "batch_size": ROWS_AT_ONCE} | found)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.message}") from None
    if not recipe.model:
        raise RecipeError(
            f"{path}: model is missing",
            hint="model: FOLDER; a judge behind a url needs its folder too, for tokenizer and chat template",
        )
    engine = recipe.engine or ("server" if recipe.url else "transformers")
    plan = plan_from(recipe, engine=engine, output_dir="")
    judge = Judge(plan=plan, verdict=recipe.verdict, template=recipe.template, against=recipe.against)
    if (judge.verdict == "prefer") != bool(judge.against):
        raise RecipeError(
            f"{path}: verdict {judge.verdict} with against {judge.against!r}",
            hint="verdict: prefer and against: OUT, the folder of another scoring, go together",
        )
    question_of(judge)
    return judge


def question_of(judge: Judge) -> str:
    """The judge's template. Raises RecipeError for one that shows no answer, or names a place that is none."""
    if not judge.template:
        return TEMPLATES[judge.verdict]
    try:
        text = read_text(judge.template)
    except (OSError, ValueError) as error:
        raise RecipeError(f"template {judge.template} cannot be read: {error}") from None
    named, needed = set(_PLACES.findall(text)), _NEEDED[judge.verdict]
    if unknown := sorted(named - {"prompt", "expected", *needed}):
        raise RecipeError(
            f"{judge.template}: {{{unknown[0]}}} is not known",
            hint=f"verdict {judge.verdict} knows {{prompt}}, {{expected}}, {{{'}, {'.join(needed)}}}",
        )
    if missing := [name for name in needed if name not in named]:
        raise RecipeError(
            f"{judge.template}: {{{missing[0]}}} is missing, so the judge would not see the answer"
        )
    return text


def fill(question: str, texts: Mapping[str, str]) -> str:
    """The template with its places filled in one pass: an answer that holds {expected} stays as it is."""
    return _PLACES.sub(lambda place: texts[place[1]], question)


def judge_content(judge: Judge) -> str:
    """All that its grades depend on: template, files of model and adapter, and the answers it compares with."""
    # Not above: it imports PEFT, which takes seconds.
    from fitune.models.weight_files import identity

    plan = judge.plan
    parts = [question_of(judge), identity(plan.model), identity(plan.adapter)]
    if plan.chat_template:
        template = os.path.expanduser(plan.chat_template)
        parts.append(read_text(template) if is_there(template) else template)
    if judge.against:
        path = Path(judge.against) / "answers.jsonl"
        try:
            with open_regular(path, follow_links=False) as file:
                parts.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise RecipeError(
                f"against {judge.against}: {path.name} cannot be read: {error.strerror or error}",
                hint="name the --out of a finished score",
            ) from None
    return "\n".join(parts)


def read_verdict(said: str, verdict: Verdict) -> float | None:
    """The grade that the judge's last ``Verdict: …`` means, or its one word where it says nothing else; else None."""
    found = _VERDICT.findall(said)
    bare = None if found else _BARE.fullmatch(said)
    word = found[-1] if found else bare[1] if bare else ""
    if verdict != "points":
        return _WORDS[verdict].get(word.lower())
    points = float(word) if word[:1].isdecimal() else 0.0
    return points if 1 <= points <= 10 else None
