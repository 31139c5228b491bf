"""An attempt is handed over in the run directory: to the ranks of a plan for several processes, and to the program
begun anew."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically
from fitune.session.train.attempts import Attempt
from fitune.spec.predictions import PlanReport
from fitune.spec.recipe.recipe import Recipe, canonical_keys, dump_recipe, parse_recipe
from fitune.spec.recipe.strict_yaml import parse_value
from fitune.spec.reports import Restart, Retry
from fitune.spec.run_directory import RETRY, require_real_files
from fitune.spec.serial import from_data, from_json, read_json, to_json

COMMAND = "go-on"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handover:
    report: PlanReport
    recipe: str
    """YAML."""
    resume: bool
    checkpoint: str
    """Empty for the newest."""
    overwrite: bool
    retries: tuple[Retry, ...]
    restarts: tuple[Restart, ...]


def hand_over(attempt: Attempt, recipe: Recipe) -> Path:
    """Write the attempt into its run directory and return that."""
    directory = Path(attempt.plan.run.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / RETRY, packed(attempt, recipe))
    return directory


def packed(attempt: Attempt, recipe: Recipe) -> str:
    """The attempt and its recipe as a text that ``unpacked`` reads in another process."""
    handover = _Handover(
        report=attempt.report,
        recipe=dump_recipe(recipe),
        resume=bool(attempt.resume),
        checkpoint=attempt.resume if isinstance(attempt.resume, str) else "",
        overwrite=attempt.overwrite,
        retries=attempt.retries,
        restarts=attempt.restarts,
    )
    text: str = to_json(handover)
    return text


def take_over(directory: Path) -> tuple[Attempt, Recipe]:
    """The attempt that was handed over, and its recipe; it can be taken once. Raises RunDirectoryError."""
    require_real_files(directory)
    file = directory / RETRY
    try:
        found = from_data(_Handover, read_json(file))
        file.unlink()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be used: {error}", hint="fitune train … --resume") from None
    return _read(found, where=str(file))


def unpacked(text: str) -> tuple[Attempt, Recipe]:
    """The attempt that was packed, and its recipe."""
    return _read(from_json(_Handover, text), where="the attempt")


def _read(found: _Handover, *, where: str) -> tuple[Attempt, Recipe]:
    recipe = parse_recipe(canonical_keys(parse_value(found.recipe, where=where), where=where))
    attempt = Attempt(
        report=found.report,
        resume=found.checkpoint or found.resume,
        overwrite=found.overwrite,
        retries=found.retries,
        restarts=found.restarts,
    )
    return attempt, recipe


def program_again(directory: Path) -> list[str]:
    """The words that start this program again: its script, or with -m."""
    begun = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return [sys.executable, *begun, COMMAND, str(directory)]
