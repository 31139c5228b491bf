"""Every key of a recipe by group, with one line for people: what ``--help`` prints and ``fitune init`` writes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import getsource
from itertools import chain, pairwise
from types import NoneType
from typing import Any

from fitune.recipe.aliases import ALIASES
from fitune.recipe.recipe import Recipe
from fitune.recipe.strict_yaml import kinds_of
from fitune.values.quantisers import QUANTISERS

GROUPS = {
    "model": "Model and method", "gpu": "Hardware", "data": "Data", "seq_len": "Batches",
    "optimizer": "Optimizer and schedule", "zero": "Several devices and offload", "gradient_checkpointing": "Memory",
    "kernels": "Speed on request", "output_dir": "Output", "report_to": "Trackers",
}  # fmt: skip
"""First key of a group, in the order of Recipe -> name of the group."""

SWITCH = ("true", "false")


@dataclass(frozen=True, slots=True)
class Key:
    """One key: values it takes, if few, and its default as text, if it has one."""

    name: str
    about: str
    values: tuple[str, ...]
    default: str

    @property
    def option(self) -> str:
        """As the command line spells it."""
        return option_of(self.name)


def option_of(key: str) -> str:
    """``--seq-len`` for ``seq_len``."""
    return f"--{key.replace('_', '-')}"


@cache
def keys_by_group() -> dict[str, list[Key]]:
    """Group -> its keys, in the order of Recipe."""
    groups: dict[str, list[Key]] = {}
    about = _docstrings()
    for name, field in Recipe.model_fields.items():
        if name in GROUPS:
            keys = groups[GROUPS[name]] = []
        kinds = [kind for kind in kinds_of(field.annotation) if kind is not NoneType]
        # Values are named where a key takes few: none for a number or a text.
        values = () if any(isinstance(kind, type) for kind in kinds) else tuple(map(str, kinds))
        keys.append(Key(name, about[name], SWITCH if kinds == [bool] else values, _default(field)))
    return groups


def _docstrings() -> dict[str, str]:
    """The line under each field of Recipe. pydantic can read them, too, but would at every start of the program."""
    [recipe] = ast.parse(getsource(Recipe)).body
    found = {}
    for pair in pairwise(recipe.body) if isinstance(recipe, ast.ClassDef) else ():
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text.format(quantisers=", ".join(QUANTISERS))
    return found


def all_keys() -> Iterator[Key]:
    """The keys of all groups, in the order of ``--help``."""
    return chain.from_iterable(keys_by_group().values())


def _default(field: Any) -> str:
    default = field.default
    if field.is_required():
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return ", ".join(default)
    return f"{default:g}" if isinstance(default, float) else "" if default in (None, {}) else str(default)


def values_of(option: str) -> tuple[str, ...]:
    """Values of the key that is typed as ``--gpu``: known models, cards, or the few that it takes; else none."""
    name = option.lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name == "model":
        from fitune.values.model.known_models import known_model_names

        return known_model_names()
    if name == "gpu":
        from fitune.values.machines.gpus import gpu_names

        return gpu_names()
    return {key.name: key.values for key in all_keys()}.get(name, ())
