"""Training as a program: signals stop it, several processes run it together, and each attempt after one that ran out
of memory has a process of its own.

An attempt is handed over in the run directory: to the ranks of a plan for several processes, and to the program begun
anew, where what a failed attempt left in the address space and the heap is gone.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.resume import last_saved
from fitune.engine.joining import joined_ranks, launched_ranks
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import PeerGone, RunDirectoryError, TrainingFailed
from fitune.files import write_atomically
from fitune.launch.command import command_of, require_one_machine
from fitune.launch.torchrun import Ended, run_ranks
from fitune.session.events import Event, Note, RanOutOfMemory, Tell
from fitune.session.signals import (
    EXIT_CODES,
    INTERRUPTED,
    end_with_launcher,
    ended_by_signals,
    stop_requests,
)
from fitune.session.training import Attempt, first_attempt, next_attempt, run_attempt, shortage_of_ranks
from fitune.spec.predictions import PlanReport
from fitune.spec.recipe import Recipe, canonical_keys, dump_recipe, parse_recipe
from fitune.spec.recipe_words import parse_value
from fitune.spec.reports import Retry
from fitune.spec.run_directory import LAUNCH_LOCK, RETRY, lock_directory, require_real_files
from fitune.spec.serial import from_data, read_json, to_json

StartAgain = Callable[[Path], int]
"""Goes on with the attempt that was handed over into a run directory; returns the exit code, if at all."""

COMMAND = "go-on"

_ONE_REQUEST_SECONDS = 1.0
"""A rank may get a signal twice, from its launcher and from whoever sent it to all processes of the job."""


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


def speaks_to_people() -> bool:
    """True unless a launcher started this process as one of several and it is not the first."""
    return launched_ranks().is_first


def train_program(
    recipe: Recipe, *, overwrite: bool, tell: Tell, start_again: StartAgain | None = None
) -> int:
    """Plan and train; returns the exit code. ``start_again`` is ``replace_process`` by default.

    A plan for several processes is trained by as many, which are started here unless torchrun started this one.
    """
    with joined_ranks() as ranks:
        tell = tell if ranks.is_first else _nobody
        attempt = first_attempt(recipe, overwrite=overwrite, tell=tell, ranks=ranks)
        if not isinstance(attempt, Attempt):
            return 0
        if ranks.is_alone and attempt.plan.hardware.num_gpus > 1:
            return _started_ranks(attempt, recipe, tell=tell)
        return attempt_program(attempt, recipe, tell=tell, start_again=start_again, ranks=ranks)


def go_on(directory: Path, *, tell: Tell) -> int:
    """Take over the attempt that waits in ``directory`` and run it, by every rank of its plan; returns the exit
    code."""
    if not launched_ranks().is_alone:
        end_with_launcher()
    with ended_by_signals() as joined, joined_ranks() as ranks:
        joined.close()
        if not ranks.is_first:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # one log a rank
        attempt, recipe = ranks.from_first(lambda: take_over(directory))
        tell = tell if ranks.is_first else _nobody
        if ranks.is_alone:
            return attempt_program(attempt, recipe, tell=tell)
        try:
            code = attempt_program(attempt, recipe, tell=tell, ranks=ranks)
        except PeerGone as error:  # the launcher says which rank it was, and why
            return error.exit_code
        # The agent takes any other code for a failure of this rank.
        return 0 if code in EXIT_CODES.values() else code


def _require_unused(directory: Path) -> None:
    """Raises RunDirectoryError while a rank still saves into it, one whose launcher was killed."""
    with lock_directory(directory):
        return


def _started_ranks(attempt: Attempt, recipe: Recipe, *, tell: Tell) -> int:
    """Own the run directory and train by the ranks of the attempt's plan; returns the exit code."""
    require_one_machine(attempt.plan)
    directory = Path(attempt.plan.run.output_dir)
    with lock_directory(directory, lock=LAUNCH_LOCK):
        _require_unused(directory)
        ended = _run_ranks(attempt, recipe, tell=tell)
    if ended.cause:
        raise _as_error(ended)
    return ended.exit_code


def _run_ranks(attempt: Attempt, recipe: Recipe, *, tell: Tell) -> Ended:
    """Run the ranks of the attempt's plan, and those of the next one when the memory of any of them ran out in a
    step."""
    had = last_saved(Path(attempt.plan.run.output_dir))
    directory = hand_over(attempt, recipe)
    sys.stdout.flush()
    ended = run_ranks(command_of(attempt.plan, _command(directory)), directory=directory)
    shortage = shortage_of_ranks(directory)
    if shortage is None or ended.exit_code in EXIT_CODES.values():
        return ended
    following = next_attempt(attempt, recipe, shortage, had=had)
    tell(RanOutOfMemory(retry=following.retries[-1]))
    return _run_ranks(following, recipe, tell=tell)


def _as_error(ended: Ended) -> TrainingFailed:
    error = TrainingFailed(ended.cause, hint=ended.hint)
    error.exit_code = ended.exit_code
    return error


def _nobody(event: Event) -> None:
    """The ranks after the first tell nobody what the first tells."""


def attempt_program(
    attempt: Attempt,
    recipe: Recipe,
    *,
    tell: Tell,
    start_again: StartAgain | None = None,
    ranks: Ranks = ALONE,
) -> int:
    """Run the attempt, and begin anew when memory runs out in a step; returns the exit code."""
    together_seconds = 0.0 if ranks.is_alone else _ONE_REQUEST_SECONDS
    with stop_requests(together_seconds=together_seconds) as request:
        ended = run_attempt(
            attempt, recipe, tell=tell, stop_asked=request.asked, sinks=[request], ranks=ranks
        )
    if isinstance(ended, Attempt):
        return (start_again or replace_process)(hand_over(ended, recipe))
    if ended.status == "interrupted":
        tell(Note("interrupted: the step was finished and saved; add --resume to go on"))
        ranks.summed([0.0])  # an outer launcher stops all when the first of them ends
        return request.exit_code if request.received else INTERRUPTED
    return 0


def hand_over(attempt: Attempt, recipe: Recipe) -> Path:
    """Write the attempt into its run directory and return that."""
    directory = Path(attempt.plan.run.output_dir)
    handover = _Handover(
        report=attempt.report,
        recipe=dump_recipe(recipe),
        resume=bool(attempt.resume),
        checkpoint=attempt.resume if isinstance(attempt.resume, str) else "",
        overwrite=attempt.overwrite,
        retries=attempt.retries,
    )
    directory.mkdir(parents=True, exist_ok=True)
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
        report=found.report,
        resume=found.checkpoint or found.resume,
        overwrite=found.overwrite,
        retries=found.retries,
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
