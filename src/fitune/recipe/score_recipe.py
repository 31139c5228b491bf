"""ScoreRecipe: what a person may ask of a scoring.

Each key stands here once. The options of ``fitune score`` and their help are made from it, the keywords of
``fitune.score`` and ``fitune.score_tasks``, and the limits of numbers in rows, in a judge's file and in a chat.
"""

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from fitune.errors import RecipeError
from fitune.recipe.types import as_columns, described
from fitune.values.answering import EngineName

_ROLES = ("system", "prompt", "completion", "choices")


def key(default: Any, about: str, least: float | None = None, most: float | None = None, **facts: Any) -> Any:
    """A key: its default, its line of --help, least and most of a number, and what not every key has: ``options`` that
    are not its name, and a ``metavar``."""
    return Field(
        default,
        description=about,
        ge=least,
        le=most,
        strict=least is not None or None,
        json_schema_extra=facts,
    )


def _several(value: Any) -> list[str]:
    return [str(one) for one in ([value] if isinstance(value, str | os.PathLike) else value)]


def _paths(value: Any) -> list[str]:
    paths = _several(value)
    if not all(paths) or not paths:
        raise RecipeError("fitune score: --data is missing", hint="--data FILE, or --lm-eval TASKS")
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        raise RecipeError(
            f"--data {twice} is given twice", hint="each row is answered once: keep one of them"
        )
    return paths


def _tasks(value: Any) -> list[str]:
    """Each task once, of a list or of a text with commas."""
    names = [name.strip() for text in _several(value) for name in text.split(",")]
    if not names or not all(names):
        raise RecipeError(f"--lm-eval {','.join(names)!r} names no task", hint="--lm-eval gsm8k,arc_easy")
    return list(dict.fromkeys(names))


def _columns(value: Any) -> Any:
    """``prompt=question`` -> {"prompt": "question"}."""
    try:
        columns = as_columns(list(value) if isinstance(value, tuple) else value)
    except ValueError as error:
        raise RecipeError(f"--columns {error}", hint="--columns prompt=question") from None
    for role, column in columns.items() if isinstance(columns, dict) else ():
        if role not in _ROLES or not column:
            fault = f"{role!r} is not a role" if role not in _ROLES else f"{role} names no column"
            raise RecipeError(f"columns: {fault}", hint=f"roles are {', '.join(_ROLES)}")
    return columns


def as_name(value: Any) -> Any:
    """A path as text; any other value as it is."""
    return str(value) if isinstance(value, os.PathLike) else value


Name = Annotated[str, BeforeValidator(as_name)]
"""A path, or a Hub id."""


class ScoreRecipe(BaseModel):
    """Everything that a scoring may be asked for. Only ``model`` has no default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Name = key(..., "A folder or Hub id of a model, an adapter, or the directory of a run.")
    data: Annotated[tuple[str, ...], BeforeValidator(_paths)] = key(
        (), "Questions with references: a file, folder or Hub id; repeatable."
    )
    lm_eval: Annotated[tuple[str, ...], BeforeValidator(_tasks)] = key(
        (), "Tasks of lm-evaluation-harness, not --data.", metavar="TASKS"
    )
    lm_eval_tasks: Path | None = key(None, "Such tasks of your own.", metavar="FOLDER")
    shots: int | None = key(None, "With --lm-eval: solved examples in a prompt.", 0)
    limit: int | None = key(None, "With --lm-eval: the first rows of each task.", 1)
    out: Path = key(
        Path("scores"), "Folder for answers, grades and report.json.", options=("--out", "--output-dir")
    )
    adapter: Name = key("", "Adapter folder to put on the model.")
    columns: Annotated[dict[str, str], BeforeValidator(_columns)] = key(
        {}, "role=column: prompt=question; repeatable."
    )
    graders: Annotated[tuple[str, ...], BeforeValidator(_several)] = key(
        (),
        "exact_match, number, f1, rouge, regex:…; repeatable; a wrong name lists all.",
        options=("--grader",),
    )
    max_new_tokens: int = key(256, "Tokens of one answer at most.", 1, 1_000_000)
    batch_size: int | None = key(None, "Rows answered together; default: what fits, to 32.", 1, 65_536)
    temperature: float = key(0.0, "0 is greedy.", 0.0, 1_000.0)
    top_p: float = key(1.0, "Draw from the likeliest tokens of this share.", 0.0, 1.0)
    seed: int = key(0, "Seed of the draws; no effect at temperature 0.", 0, 2**63 - 1)
    chat_template: Name = key("", "Jinja file; default: the tokenizer's own.")
    id_column: str = key("", "Column of the rows' names; default: custom_id or id.")
    engine: EngineName | None = key(None, "transformers, server (at --url), vllm; default: the fastest.")
    url: str = key("", "OpenAI-compatible server: http://localhost:8000/v1.")
    served_model: str = key("", "The model's name there; default: --model.")
    allow_https: bool = key(False, "Fetch --data from https://.")
    allow_private_addresses: bool = key(False, "Also from http:// addresses.")


R = TypeVar("R", bound=ScoreRecipe)

FOR_TASKS = {
    "model", "out", "adapter", "lm_eval", "lm_eval_tasks", "shots", "limit", "batch_size", "seed", "chat_template",
    "engine", "url", "served_model",
}  # fmt: skip
"""Keys that count for tasks of lm-eval."""


def facts_of(name: str) -> dict[str, Any]:
    """The facts that ``key`` was given beside default, help and limits."""
    facts = ScoreRecipe.model_fields[name].json_schema_extra
    return facts if isinstance(facts, dict) else {}


def options_of(name: str) -> tuple[str, ...]:
    """The key as options of ``fitune score``."""
    return facts_of(name).get("options") or (f"--{name.replace('_', '-')}",)


def score_recipe(**wanted: Any) -> ScoreRecipe:
    """The recipe of options, or of keywords; None leaves a key as it is by itself.

    Raises RecipeError for a key that is unknown or has no effect, a value out of its limits, and for missing data.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    of_tasks, names = "lm_eval" in given, given.keys() & ScoreRecipe.model_fields.keys()
    for name in sorted(names - FOR_TASKS if of_tasks else names & {"lm_eval_tasks", "limit", "shots"}):
        option = options_of(name)[0]
        raise RecipeError(
            f"{option} has no effect {'with' if of_tasks else 'without'} --lm-eval",
            hint=f"{'' if of_tasks else 'add --lm-eval, or '}leave {option} out",
        )
    return checked_recipe(ScoreRecipe, **given if of_tasks else {"data": ()} | given)


def checked_recipe(kind: type[R], **given: Any) -> R:
    """The recipe of keys, of which some may be missing. Raises RecipeError for a value that a key does not take."""
    try:
        return kind.model_validate({"model": "", **given})
    except ValidationError as error:
        raise RecipeError(described(error, known=kind)) from None
