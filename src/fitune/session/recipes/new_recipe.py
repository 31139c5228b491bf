"""A first recipe: five questions, and a commented file that trains as it is."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from fitune.errors import FituneError, RecipeError
from fitune.files import path_fault, write_atomically
from fitune.planner.defaults import data_of
from fitune.planner.explain import plan_data
from fitune.planner.first_screen import short_plan
from fitune.recipe.keys import keys_by_group, option_of
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.session.planning import plan_on_data
from fitune.session.recipes.reading import split_words
from fitune.values.machines.gpus import find_gpu
from fitune.values.model.model_config import load_model_spec
from fitune.values.predictions import PlanReport

AUTO = "auto"
"""The answer that leaves a key to the plan."""


HELD_OUT = 0.05
"""Share of the rows that a new recipe holds out: else nothing says whether the model learned more than its rows."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question: the key it sets, its text, and the answer of those who press Enter, if there is one."""

    key: str
    text: str
    usual: str = ""


QUESTIONS = (
    Question("model", "Model: a name on the Hub, or a folder"),
    Question("data", "Data: a file, a folder or a name on the Hub"),
    Question(
        "tuning", f"How to tune: full, lora, qlora, lomo, adalomo, or {AUTO} (the best that fits)", AUTO
    ),
    Question("gpu", f"Hardware: a card (rtx-4090, 2 x rtx-3090), cpu, or {AUTO} (what is here)", AUTO),
    Question("output_dir", f"Where to: a folder, or {AUTO} (runs/MODEL-TUNING)", AUTO),
)


def ask_and_write(
    words: Sequence[str], *, overwrite: bool, ask: Callable[[str], str] | None, say: Callable[[str], object]
) -> tuple[str, dict[str, Any]]:
    """Write the recipe that ``words`` and the answers make, and return what is said of it, to people and programs.

    Raises RecipeError for a file that is there, unless it may be replaced, and FituneError when no plan fits: the file
    stays then.
    """
    path, given = split_words(words)
    path = path or Path("recipe.yaml")
    if fault := path_fault(str(path)):  # the file names itself, in comments of one line
        raise RecipeError(fault, hint="another name for the recipe")
    if path.exists() and not overwrite:
        raise RecipeError(f"{path} is there already", hint="--overwrite replaces it, or name another file")
    keys = asked_keys(given, ask=ask, say=say)
    held_out = {} if "eval_data" in keys else {"val_fraction": HELD_OUT}
    report = write_recipe(path, held_out | keys)
    return explain_new_recipe(path, report), {"recipe": path, **plan_data(report)}


def asked_keys(
    given: Mapping[str, Any], *, ask: Callable[[str], str] | None, say: Callable[[str], object]
) -> dict[str, Any]:
    """The keys of a recipe: ``given`` ones, and an answer to each question that they leave open.

    ``ask`` shows a text and returns a line; None where nobody can be asked: then the plan decides what has a usual
    answer, and RecipeError names what has none.
    """
    keys = canonical_keys(given, where="init")
    missing = [question for question in QUESTIONS if question.key not in keys]
    flags = [option_of(each.key) for each in missing if not each.usual]
    if ask is None and flags:
        raise RecipeError(
            f"init: there is no terminal to ask at, so it needs {' and '.join(flags)}",
            hint=f"add {' '.join(f'{flag} NAME' for flag in flags)}",
        )
    for question in missing:
        keys[question.key] = _answer(question, ask, say) if ask else question.usual
    keys |= _hardware(keys["gpu"] or AUTO)
    return {name: value for name, value in canonical_keys(keys, where="init").items() if value is not None}


def _answer(question: Question, ask: Callable[[str], str], say: Callable[[str], object]) -> str:
    """The first answer that a recipe can have; an empty one is the usual one."""
    shown = f"{question.text} [{question.usual}]: " if question.usual else f"{question.text}: "
    while True:
        answer = ask(shown).strip() or question.usual
        if not answer:
            continue
        try:
            _require_possible(question.key, answer)
        except FituneError as error:
            say(f"  {error}")
        else:
            return answer


def _require_possible(key: str, answer: str) -> None:
    """Raises FituneError for an answer that no recipe can have."""
    match key:
        case "model":
            load_model_spec(answer)
        case "data":
            from fitune.data.reading.files import locate  # datasets' helpers, for those who answer questions

            for source in data_of(parse_recipe({"model": "m", "data": answer})).sources:
                locate(source)
        case "tuning":
            parse_recipe(canonical_keys({"model": "m", "tuning": answer}, where="tuning"))
        case "gpu" if (name := _hardware(answer)["gpu"]) not in (AUTO, "cpu"):
            find_gpu(name)


_HARDWARE = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\S.*)")


def _hardware(words: str) -> dict[str, Any]:
    """``2 x rtx-3090`` -> gpus 2, gpu rtx-3090."""
    found = _HARDWARE.fullmatch(words.strip())
    count, name = found.groups() if found else (None, words)
    return {"gpu": name} if count is None else {"gpu": name, "gpus": int(count)}


def write_recipe(path: Path, keys: Mapping[str, Any]) -> PlanReport:
    """Write the recipe of ``keys`` and plan it. Raises FituneError when no plan fits."""
    recipe = parse_recipe(keys, where="init")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, recipe_text(path, keys))
    return plan_on_data(recipe)


OFTEN_SET = {
    "lora_r", "quantization", "host_memory", "price_per_gpu_hour", "val_fraction", "packing", "train_on_prompt",
    "seq_len", "global_batch_size", "optimizer", "learning_rate", "num_epochs", "max_steps", "max_grad_norm", "seed",
    "gradient_checkpointing", "resume", "evals_per_epoch", "save_steps", "report_to",
}  # fmt: skip
"""Keys that stand in a new recipe although nobody asked for them, behind a #."""


def recipe_text(path: Path, keys: Mapping[str, Any]) -> str:
    """YAML with the keys that were given, and often set ones behind a #, each with what it is."""
    asked = {question.key for question in QUESTIONS}
    typed = quote(str(path))
    lines = [
        f"# See what it needs and how long it takes: fitune plan {typed}",
        f"# Train it: fitune train {typed}",
        "# A line behind a # is off: the plan chooses, or takes the value there. All keys: fitune train --help",
    ]
    for group, listed in keys_by_group().items():
        shown = [key for key in listed if key.name in asked | OFTEN_SET | keys.keys()]
        lines += ["", f"# {group}"] if shown else []
        for key in shown:
            about = f"{key.about}: {', '.join(key.values)}" if len(key.values) > 2 else key.about
            line = f"# {key.name}: {key.default}"
            if key.name in keys:
                value = yaml.safe_dump(
                    keys[key.name], allow_unicode=True, default_flow_style=True, width=10_000
                )
                line = f"{key.name}: {value.splitlines()[0]}"
            lines.append(f"{line:<32}  # {about}")
    return "\n".join(lines) + "\n"


def explain_new_recipe(path: Path, report: PlanReport) -> str:
    """The plan that training takes, in short, and what to do next."""
    typed = quote(str(path))
    said = f"{path} is written; the plan of it:\n{short_plan(report)}"
    return f"{said}\nnext: fitune plan {typed} (other ways, too), fitune train {typed}"
