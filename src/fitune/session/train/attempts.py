"""Attempts at a run: one that ran out of memory in a step is followed by one that takes less.

An attempt is handed over as JSON: in the run directory to the ranks of a plan for several processes and to the program
begun anew, and to the workers of a Ray cluster.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fitune.checkpoint.commit import Commit, last_saved
from fitune.engine.ranks import Ranks
from fitune.errors import OutOfMemory, RunDirectoryError, Shortage, TrainingFailed
from fitune.estimate.predict import predict
from fitune.files import write_atomically
from fitune.launch.torchrun import Ended
from fitune.planner.retry import describe_size, next_to_try, smaller_plan, why_no_smaller
from fitune.recipe.recipe import Recipe, canonical_keys, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.report.run_words import shortage_words
from fitune.session.events import Emit, RanOutOfMemory
from fitune.units import format_bytes
from fitune.values.plan import Plan
from fitune.values.predictions import Phase, PlanReport, Priced
from fitune.values.reports import Restart, Retry
from fitune.values.run_directory import LAUNCH_LOCK, RETRY, SHORTAGE, require_real_files
from fitune.values.run_lock import lock_directory
from fitune.values.serial import from_data, read_json, to_data, to_json

IN_A_STEP = (*(phase.value for phase in Phase), "evaluating")
"""Phases in which the micro-batch decides about memory; loading, answering and exporting know none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a run."""

    recipe: str
    """YAML, as ``dump_recipe`` writes it."""
    report: PlanReport
    resume: bool | str
    overwrite: bool
    retries: tuple[Retry, ...] = ()
    """Attempts before it that ran out of memory."""
    restarts: tuple[Restart, ...] = ()
    """Why its ranks are not the first ones."""

    @property
    def plan(self) -> Plan:
        """The plan that is executed."""
        return self.report.chosen.plan

    @property
    def directory(self) -> Path:
        """The run's."""
        return Path(self.plan.run.output_dir)

    @property
    def wanted(self) -> Recipe:
        """The recipe that was planned."""
        return parse_recipe(
            canonical_keys(parse_value(self.recipe, where="the attempt"), where="the attempt")
        )


def hand_over(attempt: Attempt) -> Path:
    """Write the attempt into its run directory and return that."""
    attempt.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(attempt.directory / RETRY, to_json(attempt))
    return attempt.directory


def take_over(directory: Path) -> Attempt:
    """The attempt that was handed over; it can be taken once. Raises RunDirectoryError."""
    require_real_files(directory)
    file = directory / RETRY
    try:
        found = from_data(Attempt, read_json(file))
        file.unlink()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be used: {error}", hint="fitune train … --resume") from None
    return found


def program_again(directory: Path) -> list[str]:
    """The words that start this program again, its script or with -m, to go on with the attempt in ``directory``."""
    begun = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return [sys.executable, *begun, "go-on", str(directory), *(["--json"] if "--json" in sys.argv else [])]


def next_attempt(failed: Attempt, error: OutOfMemory, *, had: Commit | None, emit: Emit) -> Attempt:
    """Tells of one that takes less, and returns it. It begins at the last checkpoint of this run, else where the failed
    one began; ``had`` is the last one before the attempt that failed.

    Raises OutOfMemory with what was predicted, what was measured and what to try when there is no such attempt.
    """
    shortage, recipe = error.shortage, failed.wanted
    if shortage is None or shortage.doing not in IN_A_STEP:
        raise error
    plan, saved = smaller_plan(failed.plan, recipe, shortage), last_saved(failed.directory)
    step = saved.step if saved else 0
    predicted = predict(failed.plan).memory.tensor_peak_bytes
    if plan is None:
        changes = next_to_try(failed.plan, recipe, shortage)
        hints = [f"{words} ({format_bytes(peak)} predicted)" for words, peak in changes.items()]
        lines = [
            error.message,
            f"  {shortage_words(shortage, predicted_bytes=predicted)}",
            f"  no smaller micro-batch: {why_no_smaller(failed.plan, shortage)}",
        ]
        going_on = f"; --resume goes on from step-{step}" if step else ""
        hint = ("; or ".join(hints) or "a device with more memory, or a smaller model") + going_on
        raise OutOfMemory("\n".join(lines), hint=hint, shortage=shortage)
    estimate = predict(plan)
    retry = Retry(
        attempt=len(failed.retries) + 1, reason=error.message.partition("\n")[0], shortage=shortage,
        before=describe_size(failed.plan), after=describe_size(plan), predicted_bytes=predicted,
        predicted_after_bytes=estimate.memory.tensor_peak_bytes, after_step=step,
    )  # fmt: skip
    words = f"{retry.after} instead of {retry.before}: attempt {retry.attempt} ran out of memory"
    report = replace(
        failed.report,
        chosen=Priced(plan=plan, estimate=estimate),
        decisions=(*failed.report.decisions, words),
    )
    emit(RanOutOfMemory(retry=retry))
    resume = resumed_from(failed, has_saved=saved is not None and saved != had)
    return replace(failed, report=report, resume=resume, overwrite=False, retries=(*failed.retries, retry))


def resumed_from(attempt: Attempt, *, has_saved: bool) -> bool | str:
    """Where the run goes on after ``attempt``: at its own last checkpoint, unless it began at another run's and has
    saved none."""
    elsewhere = isinstance(attempt.resume, str) and not attempt.overwrite
    return attempt.resume if elsewhere and not has_saved else True


def leave_shortage(plan: Plan, error: OutOfMemory, ranks: Ranks) -> None:
    """Write down for the launcher that memory ran out on this rank, and what was known then: the others wait in vain,
    so the job ends and its launcher decides."""
    left = {"message": f"rank {ranks.rank}: {error.message}", "shortage": to_data(error.shortage)}
    write_atomically(Path(plan.run.output_dir) / SHORTAGE, json.dumps(left))


def shortage_of_ranks(directory: Path) -> OutOfMemory | None:
    """The error of the rank whose memory ran out; None when none did."""
    file = directory / SHORTAGE
    if not file.is_file():
        return None
    left = read_json(file)
    shortage = left["shortage"] and from_data(Shortage, left["shortage"])
    return OutOfMemory(left["message"], shortage=shortage)


LOST = "the ranks lost the connection between them, and none of them says why"


def failure(ended: Ended) -> TrainingFailed:
    """The error that a job ended with."""
    error = TrainingFailed(ended.cause or LOST, hint=ended.hint or "fitune train … --resume goes on")
    error.exit_code = ended.exit_code or TrainingFailed.exit_code
    return error


@contextmanager
def owned_directory(directory: Path) -> Iterator[None]:
    """Inside, the run directory is this launcher's. Raises RunDirectoryError while a rank still saves into it, one
    whose launcher was killed."""
    with lock_directory(directory, lock=LAUNCH_LOCK):
        with lock_directory(directory):
            pass
        yield
