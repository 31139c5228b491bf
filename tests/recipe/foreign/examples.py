"""Keys and values of the supervised examples that other trainers publish: facts about their recipes, not the files.

``examples.json`` holds each pair of key and value once; an example is a list of their numbers. Paths of outputs and
long texts are shortened. ``other_methods``: what is neither full fine-tuning nor LoRA, and the key that asks for it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fitune.session.recipes.reading import recipe_of_keys


@dataclass(frozen=True, slots=True)
class Example:
    """One recipe that a trainer publishes; ``other_method`` is empty for full fine-tuning, LoRA and QLoRA."""

    trainer: str
    name: str
    keys: dict[str, Any]
    other_method: str


def read_keys(keys, *, folder=Path("nowhere"), on_note=lambda line: None, **options):
    """The recipe of another trainer's keys, with options of the command line on top."""
    return recipe_of_keys(keys, where="theirs.yaml", folder=folder, options=options, on_note=on_note)


def typed(line):
    """The keys of a line of YAML, as people write them."""
    return yaml.safe_load(f"{{{line}}}")


def published_examples():
    data = json.loads((Path(__file__).parent / "examples.json").read_text(encoding="utf-8"))
    for trainer, content in data.items():
        for name, numbers in content["examples"].items():
            keys = dict(content["pairs"][number] for number in numbers)
            yield Example(trainer, name, keys, content["other_methods"].get(name, ""))
