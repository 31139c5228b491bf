"""A first recipe: five questions, and a commented file that trains as it is."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fitune.errors import FituneError, RecipeError
from fitune.files import write_atomically
from fitune.planner.defaults import data_of
from fitune.session.planning import plan_on_data
from fitune.session.recipes.reading import split_words
from fitune.spec.machines.gpus import find_gpu
from fitune.spec.model.model_config import load_model_spec
from fitune.spec.predictions import PlanReport
from fitune.spec.recipe.keys import GROUPS, Key, keys_of
from fitune.spec.recipe.recipe import canonical_keys, parse_recipe
from fitune.spec.words import describe_plan
from fitune.units import format_bytes, format_rate, format_seconds, wrapped

AUTO = "auto"
"""The answer that leaves a key to the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: the key it sets, its text, and the answer of those who press Enter, if there is one."""

    key: str
    text: str
    usual: str = ""
    refuse: Callable[[str], object] = lambda answer: None
    """Raises FituneError for an answer that no recipe can have."""


def _refuse_missing_file(path: str) -> None:
    from fitune.data.reading.files import (
        locate,  # imports datasets' helpers for those who answer questions alone
    )

    for source in data_of(parse_recipe({"model": "m", "data": path})).sources:
        locate(source)


def _refuse_tuning(word: str) -> None:
    parse_recipe(canonical_keys({"model": "m", "tuning": None if word == AUTO else word}, where="tuning"))


_HARDWARE = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\S.*)")


def _refuse_hardware(words: str) -> None:
    name = _hardware(words).get("gpu")
    if name not in (None, "cpu"):
        find_gpu(str(name))


QUESTIONS = (
    Question(key="model", text="Model: a name on the Hub, or a folder", refuse=load_model_spec),
    Question(key="data", text="Data: a file, a folder or a name on the Hub", refuse=_refuse_missing_file),
    Question(
        key="tuning", usual=AUTO, refuse=_refuse_tuning,
        text=f"How to tune: full, lora, qlora, lomo, adalomo, or {AUTO} (the best that fits)",
    ),
    Question(
        key="gpu", usual=AUTO, refuse=_refuse_hardware,
        text=f"Hardware: a card (rtx-4090, 2 x rtx-3090), cpu, or {AUTO} (what is here)",
    ),
    Question(key="output_dir", usual=AUTO, text=f"Where to: a folder, or {AUTO} (runs/MODEL-TUNING)"),
)  # fmt: skip


def ask_and_write(
    words: Sequence[str], *, overwrite: bool, ask: Callable[[str], str] | None, say: Callable[[str], object]
) -> str:
    """Write the recipe that ``words`` and the answers make, and return what is said of it."""
    path, given = split_words(words)
    path = path or Path("recipe.yaml")
    refuse_existing(path, overwrite=overwrite)
    keys = asked_keys(given, ask=ask, say=say)
    return explain_new_recipe(path, write_recipe(path, keys, overwrite=overwrite))


def asked_keys(
    given: Mapping[str, Any], *, ask: Callable[[str], str] | None, say: Callable[[str], object]
) -> dict[str, Any]:
    """The keys of a recipe: ``given`` ones, and an answer to each question that they leave open.

    ``ask`` shows a text and returns a line; None where nobody can be asked: then the plan decides what has a usual
    answer, and RecipeError names what has none.
    """
    keys = canonical_keys(
        {name: None if value == AUTO else value for name, value in given.items()}, where="init"
    )
    missing = [question for question in QUESTIONS if question.key not in keys]
    if ask is None:
        flags = [f"--{each.key}" for each in missing if not each.usual]
        if flags:
            raise RecipeError(
                f"init: there is no terminal to ask at, so it needs {' and '.join(flags)}",
                hint=f"add {' '.join(f'{flag} NAME' for flag in flags)}",
            )
    for question in missing:
        keys[question.key] = _answer(question, ask, say) if ask else question.usual
    return _without_auto(keys)


def _answer(question: Question, ask: Callable[[str], str], say: Callable[[str], object]) -> str:
    """The first answer that is not refused; an empty one is the usual one."""
    while True:
        shown = f"{question.text} [{question.usual}]: " if question.usual else f"{question.text}: "
        answer = ask(shown).strip() or question.usual
        if not answer:
            continue
        try:
            question.refuse(answer)
        except FituneError as error:
            say(f"  {error}")
        else:
            return answer


def _without_auto(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in our words, the answer about hardware as gpu and gpus."""
    hardware = _hardware(keys["gpu"] or AUTO)
    named = {**{name: value for name, value in keys.items() if name != "gpu"}, **hardware}
    read = canonical_keys(
        {name: None if value == AUTO else value for name, value in named.items()}, where="init"
    )
    return {name: value for name, value in read.items() if value is not None}


def _hardware(words: str) -> dict[str, str | int]:
    """``2 x rtx-3090`` -> gpus 2, gpu rtx-3090."""
    if words.strip() == AUTO:
        return {}
    found = _HARDWARE.fullmatch(words.strip())
    count, name = found.groups() if found else (None, words)
    many: dict[str, str | int] = {} if count is None else {"gpus": int(count)}
    return many if name == AUTO else {"gpu": name, **many}


def write_recipe(path: Path, keys: Mapping[str, Any], *, overwrite: bool) -> PlanReport:
    """Write the recipe of ``keys`` and plan it; the file stays when no plan fits. Raises FituneError for that, too."""
    refuse_existing(path, overwrite=overwrite)
    recipe = parse_recipe(keys, where="init")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, recipe_text(path, keys))
    return plan_on_data(recipe)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raises RecipeError for a file that is there, unless it may be replaced."""
    if path.exists() and not overwrite:
        raise RecipeError(f"{path} is there already", hint="--overwrite replaces it, or name another file")


OFTEN_SET = {
    "lora_r", "quantization", "host_memory", "price_per_gpu_hour", "val_fraction", "packing", "train_on_prompt",
    "seq_len", "global_batch_size", "optimizer", "learning_rate", "num_epochs", "max_steps", "max_grad_norm", "seed",
    "gradient_checkpointing", "resume", "evals_per_epoch", "save_steps", "report_to",
}  # fmt: skip
"""Keys that stand in a new recipe although nobody asked for them, behind a #."""


def recipe_text(path: Path, keys: Mapping[str, Any]) -> str:
    """YAML with the keys that were given, and often set ones behind a #, each with what it is."""
    asked = {question.key for question in QUESTIONS}
    lines = [
        f"# See what it needs and how long it takes: fitune plan {path}",
        f"# Train it: fitune train {path}",
        "# A line behind a # is off: the plan chooses, or takes the value there. All keys: fitune train --help",
    ]
    for group in GROUPS:
        shown = [key for key in keys_of(group) if key.name in asked | OFTEN_SET | keys.keys()]
        lines += ["", f"# {group}"] if shown else []
        lines += [_line(key, keys) for key in shown]
    return "\n".join(lines) + "\n"


def _line(key: Key, keys: Mapping[str, Any]) -> str:
    about = f"{key.about}: {', '.join(key.values)}" if len(key.values) > 2 else key.about
    if key.name not in keys:
        return f"{f'# {key.name}: {key.default}':<32}  # {about}"
    value = yaml.safe_dump(keys[key.name], allow_unicode=True, default_flow_style=True, width=10_000)
    return f"{f'{key.name}: {value.splitlines()[0]}':<32}  # {about}"


def explain_new_recipe(path: Path, report: PlanReport) -> str:
    """The plan that training takes in a few lines, and what to do next."""
    taken, run = report.taken, report.run
    estimate = taken.estimate
    lines = [
        f"{path} is written; the plan of it:",
        wrapped(describe_plan(taken.plan)),
        f"  {format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)}, "
        f"{format_rate(estimate.tokens_per_second)}"
        + (f", {run.steps:,} steps in {format_seconds(run.seconds)}" if run else ""),
        f"next: fitune plan {path} (all of it), fitune train {path}",
    ]
    return "\n".join(lines)
