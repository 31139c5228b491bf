"""Training as a program: signals stop it, and each attempt after the first has a process of its own.

What a failed attempt leaves in the address space and the heap is gone there. The next attempt is written into the
run directory; the program, begun anew, takes it over from there.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import write_atomically
from fitune.session.events import Note, Tell
from fitune.session.signals import stop_requests
from fitune.session.training import Attempt, first_attempt, run_attempt
from fitune.spec.recipe import Recipe, canonical_keys, dump_recipe, parse_recipe
from fitune.spec.recipe_words import parse_value
from fitune.spec.reports import PlanReport, Retry
from fitune.spec.run_directory import RETRY, require_real_files
from fitune.spec.serial import from_data, read_json, to_json

StartAgain = Callable[[Path], int]
"""Goes on with the attempt that was handed over into a run directory; returns the exit code, if at all."""

COMMAND = "go-on"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handover:
    report: PlanReport
    recipe: str
    """YAML."""
    resume: str
    """A checkpoint; empty for the newest."""
    retries: tuple[Retry, ...]


def train_program(
    recipe: Recipe, *, overwrite: bool, tell: Tell, start_again: StartAgain | None = None
) -> int:
    """Plan and train; returns the exit code. ``start_again`` is ``replace_process`` by default."""
    attempt = first_attempt(recipe, overwrite=overwrite, tell=tell)
    if not isinstance(attempt, Attempt):
        return 0
    return attempt_program(attempt, recipe, tell=tell, start_again=start_again)


def attempt_program(
    attempt: Attempt, recipe: Recipe, *, tell: Tell, start_again: StartAgain | None = None
) -> int:
    """Run the attempt, and begin anew when memory runs out in a step; returns the exit code."""
    with stop_requests() as request:
        ended = run_attempt(attempt, recipe, tell=tell, stop_asked=request.asked, sinks=[request])
    if isinstance(ended, Attempt):
        return (start_again or replace_process)(hand_over(ended, recipe))
    if ended.status == "interrupted":
        tell(Note("interrupted: the step was finished and saved; add --resume to go on"))
        return request.exit_code
    return 0


def hand_over(attempt: Attempt, recipe: Recipe) -> Path:
    """Write the attempt into its run directory and return that."""
    directory = Path(attempt.plan.run.output_dir)
    handover = _Handover(
        report=attempt.report,
        recipe=dump_recipe(recipe),
        resume=attempt.resume if isinstance(attempt.resume, str) else "",
        retries=attempt.retries,
    )
    write_atomically(directory / RETRY, to_json(handover))
    return directory


def take_over(directory: Path) -> tuple[Attempt, Recipe]:
    """The attempt that was handed over, and its recipe; it can be taken once. Raises RunDirectoryError."""
    require_real_files(directory)
    file = directory / RETRY
    try:
        found = from_data(_Handover, read_json(file, follow_links=False))
        file.unlink()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be used: {error}", hint="fitune train … --resume") from None
    recipe = parse_recipe(canonical_keys(parse_value(found.recipe, where=str(file)), where=str(file)))
    attempt = Attempt(
        report=found.report, resume=found.resume or True, overwrite=False, retries=found.retries
    )
    return attempt, recipe


def replace_process(directory: Path) -> int:
    """Begin the program anew in the place of this one: same process id, exit code, terminal and lock."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        if int(name) > 2:
            _close_on_exec(
                int(name)
            )  # what a library left open, a GPU's device among it, would be held on to
    os.execv(sys.executable, _command(directory))


def run_child(directory: Path) -> int:
    """Begin the program anew beside this one, which has more to do afterwards; returns the exit code."""
    sys.stdout.flush()
    with subprocess.Popen(_command(directory)) as child:
        try:
            return child.wait()
        except BaseException:  # a signal to this process is meant for the child as well
            child.terminate()
            child.wait()
            raise


def _command(directory: Path) -> list[str]:
    """As this program was begun: from its script, or with -m."""
    begun = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return [sys.executable, *begun, COMMAND, str(directory)]


def _close_on_exec(handle: int) -> None:
    try:
        os.set_inheritable(handle, False)
    except OSError:
        return  # closed since it was listed
