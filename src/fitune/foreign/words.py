"""A reading in words: what is printed above a plan, and the fitune recipe with a comment on each line."""

import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from fitune.foreign.reading import Line, Reading
from fitune.spec.recipe.recipe import Recipe
from fitune.units import wrapped

_WIDTH = 100


def explain_reading(reading: Reading) -> list[str]:
    """Lines for people: what was renamed, what differs and how, the trainer's defaults, what was passed over."""
    renamed = [line for line in reading.of("translated") if not line.said]
    different = [line for line in reading.of("translated") if line.said]
    noted = [line for line in reading.of("passed") if line.said]
    empty = [line.key for line in reading.of("passed") if not line.said]
    lines = [f"{reading.where} is a recipe of {reading.trainer}; fitune convert writes it as one of fitune's"]
    lines += _paragraph("means the same", [_renamed(line, reading) for line in renamed])
    lines += [text for line in different for text in _paragraph(_renamed(line, reading), [line.said])]
    assumed = [line.settings[0] for line in reading.of("assumed")]
    defaults = [_setting(name, reading) for name in assumed if not _is_usual(name, reading)]
    lines += _paragraph(f"defaults of {reading.trainer} that differ", defaults)
    for said in dict.fromkeys(line.said for line in noted):
        lines += _paragraph(", ".join(line.key for line in noted if line.said == said), [said])
    lines += _paragraph("passed over, being empty, off or bookkeeping", empty)
    return lines


_IN_PYTHON = {"Unsloth": "a notebook loads its rows in Python"}
"""Trainers whose settings name no data, and why."""


def without_data(reading: Reading) -> str:
    """Says that the recipe names no data, and how to; empty where keys of its own were about data."""
    if {"data", "datasets", "dataset"} & {*reading.settings, *reading.raw}:
        return ""
    why = f": {_IN_PYTHON[reading.trainer]}" if reading.trainer in _IN_PYTHON else ""
    return f"no data is named{why}; data: FILE in the recipe, or --data FILE, gives steps, time and cost"


def recipe_with_comments(reading: Reading, values: dict[str, Any]) -> str:
    """YAML of ``values``, fitune's settings, each with a comment that says where it comes from."""
    lines = [f"# {' '.join(reading.where.split())}, a recipe of {reading.trainer}, in fitune's words", ""]
    if without_data(reading):
        lines.append(f"# data: train.jsonl  # {_IN_PYTHON.get(reading.trainer, 'none is named')}")
    for name, value in values.items():
        written = yaml.safe_dump(
            {name: value}, sort_keys=False, allow_unicode=True, width=10_000
        ).splitlines()
        origins = [_origin(line, name, reading) for line in reading.lines if name in line.settings]
        comment = " ".join("; ".join(dict.fromkeys(origins)).split())
        if (
            isinstance(value, str) and len(written) > 1
        ):  # a comment behind its first line would be of the text
            lines += [f"# {name}: {comment}", *written]
        else:
            lines += [f"{written[0]}  # {comment}" if comment else written[0], *written[1:]]
    passed = reading.of("passed")
    groups = dict.fromkeys(line.said for line in passed)
    if passed:
        lines += ["", f"# Not taken over from {reading.trainer}:"]
    for said in groups:
        keys = ", ".join(line.key for line in passed if line.said == said)
        text = f"{keys}: {said or 'empty, off or bookkeeping'}"
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _origin(line: Line, name: str, reading: Reading) -> str:
    if not line.key:
        return line.said
    key = f"as in {reading.trainer}" if line.key == name else f"from {line.key}"
    return f"{key}: {line.said}" if line.said else key


def _renamed(line: Line, reading: Reading) -> str:
    values = ", ".join(_setting(name, reading) for name in line.settings)
    return values if line.key in line.settings else f"{line.key} → {values}"


def _setting(name: str, reading: Reading) -> str:
    value = reading.settings.get(name)
    if name in ("data", "eval_data") and isinstance(value, list):
        return f"{name} {', '.join(_source(each) for each in value)}"
    if isinstance(value, list):
        return f"{name} {', '.join(map(str, value))}"
    return f"{name} {str(value).lower() if isinstance(value, bool) else value}"


def _is_usual(name: str, reading: Reading) -> bool:
    """True if fitune would have taken the same value by itself."""
    return bool(Recipe.model_fields[name].default == reading.settings.get(name))


def _source(source: Any) -> str:
    if not isinstance(source, dict):
        return str(source)
    others = [f"{key} {value}" for key, value in source.items() if key != "path"]
    return f"{source['path']} ({', '.join(others)})" if others else str(source["path"])


def _paragraph(title: str, parts: Sequence[str]) -> list[str]:
    if not parts:
        return []
    return wrapped(f"{title}: {', '.join(parts)}", hanging=2).splitlines()
