"""Which published recipes of other trainers are read, translated and refused, and why.

python bench/foreign_recipes.py            the keys in tests/recipe/foreign/examples.json
python bench/foreign_recipes.py FOLDER     every YAML below FOLDER, such as axolotl/examples
... --models                               also: which of those models can be planned on 8 × H100
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import FituneError, RecipeError
from fitune.recipe.foreign import read_foreign
from fitune.recipe.foreign.reading import Reading, require_readable
from fitune.recipe.strict_yaml import load_yaml
from fitune.session.planning import plan_for
from fitune.session.recipes.reading import recipe_of_keys

FACTS = Path(__file__).parent.parent / "tests" / "recipe" / "foreign" / "examples.json"
MOST_REASONS = 40


@dataclass(slots=True)
class Table:
    """Counts for one trainer."""

    usual: int = 0
    read: int = 0
    other_methods: int = 0
    other_refused: int = 0
    planned: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def known_facts() -> Iterator[tuple[str, dict[str, Any], bool, Path]]:
    for content in json.loads(FACTS.read_text(encoding="utf-8")).values():
        for name, numbers in content["examples"].items():
            keys = dict(content["pairs"][number] for number in numbers)
            yield name, keys, name in content["other_methods"], Path("nowhere")


def files_below(folder: Path) -> Iterator[tuple[str, dict[str, Any], bool, Path]]:
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        try:
            yield str(path.relative_to(folder)), load_yaml(path), False, path.parent
        except RecipeError as error:
            print(error)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folder", type=Path, nargs="?")
    arguments.add_argument("--models", action="store_true")
    wanted = arguments.parse_args()
    tables: dict[str, Table] = {}
    for name, keys, is_other, folder in files_below(wanted.folder) if wanted.folder else known_facts():
        reading = read_foreign(keys, where=name, folder=folder)
        if reading is not None:
            count(tables.setdefault(reading.trainer, Table()), reading, keys, is_other, plan=wanted.models)
    show(tables, with_models=wanted.models)


def count(table: Table, reading: Reading, keys: dict[str, Any], is_other: bool, *, plan: bool) -> None:
    table.keys.update(line.fate for line in reading.lines)
    found = accepted(reading, keys)
    if is_other:
        table.other_methods += 1
        table.other_refused += not found
    else:
        table.usual += 1
        table.read += found
        table.planned += plan and found and planned(reading, keys)
    refused = [f"{line.key.split('[')[0]}: {line.said}" for line in reading.of("refused")]
    unknown = [f"unknown key {line.key}" for line in reading.of("unknown")]
    table.reasons.update(dict.fromkeys(refused + unknown, 1))


def accepted(reading: Reading, keys: dict[str, Any]) -> bool:
    try:
        require_readable(reading)
        recipe_of_keys(keys, where=reading.where, folder=reading.folder, options={"gpus": 8})
    except RecipeError:
        return False
    return True


def planned(reading: Reading, keys: dict[str, Any]) -> bool:
    """The model is known and something fits; only then the plan is a plan."""
    options = {"gpus": 8, "gpu": "h100"}
    try:
        plan_for(recipe_of_keys(keys, where=reading.where, folder=reading.folder, options=options))
    except FituneError as error:
        print(f"{reading.where}: {str(error).splitlines()[0]}")
        return False
    return True


def show(tables: dict[str, Table], *, with_models: bool) -> None:
    print(
        "| trainer | full, LoRA, QLoRA | read | other methods | refused by name |"
        + " planned |" * with_models
    )
    print("|---|---:|---:|---:|---:|" + "---:|" * with_models)
    together = Table(
        usual=sum(table.usual for table in tables.values()),
        read=sum(table.read for table in tables.values()),
        other_methods=sum(table.other_methods for table in tables.values()),
        other_refused=sum(table.other_refused for table in tables.values()),
        planned=sum(table.planned for table in tables.values()),
    )
    for name, table in {**tables, "together": together}.items():
        share = f"{table.read} ({100 * table.read / max(1, table.usual):.0f} %)"
        last = f" {table.planned} |" if with_models else ""
        print(f"| {name} | {table.usual} | {share} | {table.other_methods} | {table.other_refused} |{last}")
    for name, table in tables.items():
        print(f"\n{name}: keys " + ", ".join(f"{fate} {number}" for fate, number in table.keys.most_common()))
        for reason, number in table.reasons.most_common(MOST_REASONS):
            print(f"  {number:3} × {reason}")


if __name__ == "__main__":
    main()
