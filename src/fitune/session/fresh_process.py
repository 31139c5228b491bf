"""Training as a program: signals stop it, several processes run it together, and each attempt after one that ran out
of memory has a process of its own, where what the failed one left in the address space and the heap is gone.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fitune.engine.ranks import ALONE, Ranks, joined_ranks, launched_ranks
from fitune.errors import FituneError, RecipeError, exit_code_of
from fitune.launch.nodes import ONE_NODE
from fitune.launch.place import Place
from fitune.launch.ray_cluster import RayPlace
from fitune.session.clusters.on_ray import train_on_ray
from fitune.session.events import Note, Tell, tell_nobody
from fitune.session.signals import EXIT_CODES, INTERRUPTED, end_with_launcher, ended_by_signals, stop_requests
from fitune.session.train.attempts import Attempt, hand_over, program_again, take_over
from fitune.session.train.beginning import first_attempt
from fitune.session.train.ranks_of_nodes import (
    require_no_launcher,
    require_one_machine,
    train_by_ranks,
    train_on_nodes,
)
from fitune.spec.rank_status import is_left_to_launcher
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.run_directory import LOGS

StartAgain = Callable[[Path], int]
"""Goes on with the attempt that was handed over into a run directory; returns the exit code, if at all."""

_ONE_REQUEST_SECONDS = 1.0
"""A rank may get a signal twice, from its launcher and from whoever sent it to all processes of the job."""


def speaks_to_people() -> bool:
    """True unless a launcher started this process as one of several and it is not the first."""
    return launched_ranks().is_first


def train_program(
    recipe: Recipe,
    *,
    overwrite: bool,
    tell: Tell,
    start_again: StartAgain | None = None,
    place: Place | None = None,
    on_ray: RayPlace | None = None,
) -> int:
    """Plan and train; returns the exit code. ``start_again`` is ``replace_process`` by default.

    A plan for several processes is trained by as many, which are started here unless torchrun started this one.
    ``place``: this machine among several nodes, each of which starts its own processes. ``on_ray``: a Ray cluster,
    which starts them.
    """
    with joined_ranks() as ranks:
        if place is not None or on_ray is not None:
            require_no_launcher(ranks)
        if place is not None and on_ray is not None:
            raise RecipeError(
                "--on ray has no --node-rank: Ray places the workers", hint="leave one of them out"
            )
        if on_ray is not None:
            return train_on_ray(recipe, on_ray, overwrite=overwrite, tell=tell)
        if place is not None:
            return train_on_nodes(recipe, place, overwrite=overwrite, tell=tell)
        tell = tell if ranks.is_first else tell_nobody
        attempt = first_attempt(recipe, overwrite=overwrite, tell=tell, ranks=ranks)
        if not isinstance(attempt, Attempt):
            return 0
        if ranks.is_alone and attempt.plan.hardware.num_gpus > 1:
            require_one_machine(attempt.plan)
            return train_by_ranks(attempt, recipe, ONE_NODE, tell=tell)
        return attempt_program(attempt, tell=tell, start_again=start_again, ranks=ranks)


def go_on(directory: Path, *, tell: Tell) -> int:
    """Take over the attempt that waits in ``directory`` and run it, by every rank of its plan; returns the exit
    code."""
    if not launched_ranks().is_alone:
        end_with_launcher()
    with ended_by_signals() as joined, joined_ranks() as ranks:
        joined.close()
        if not ranks.is_first:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # one log a rank
        attempt = ranks.from_first(lambda: take_over(directory))
        tell = tell if ranks.is_first else tell_nobody
        if ranks.is_alone:
            return attempt_program(attempt, tell=tell)
        try:
            code = attempt_program(attempt, tell=tell, ranks=ranks)
        except FituneError as error:
            if not is_left_to_launcher(directory / LOGS):
                raise
            return exit_code_of(error)
        # The agent takes any other code for a failure of this rank.
        return 0 if code in EXIT_CODES.values() else code


def attempt_program(
    attempt: Attempt, *, tell: Tell, start_again: StartAgain | None = None, ranks: Ranks = ALONE
) -> int:
    """Run the attempt, and begin anew when memory runs out in a step; returns the exit code."""
    from fitune.session.train.training import run_attempt

    with stop_requests(together_seconds=0.0 if ranks.is_alone else _ONE_REQUEST_SECONDS) as request:
        ended = run_attempt(attempt, tell=tell, stop_asked=request.asked, sinks=[request], ranks=ranks)
    if isinstance(ended, Attempt):
        return (start_again or replace_process)(hand_over(ended))
    if ended.status == "interrupted":
        tell(Note("interrupted: the step was finished and saved; add --resume to go on"))
        ranks.summed([0.0])  # an outer launcher stops all when the first of them ends
        return request.exit_code if request.received else INTERRUPTED
    return 0


def replace_process(directory: Path) -> int:
    """Begin the program anew in the place of this one: same process id, exit code, terminal and lock."""
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        if int(name) > 2:  # what a library left open, a GPU's device among it, would be held on to
            with suppress(OSError):  # closed since it was listed
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, program_again(directory))


def run_child(directory: Path) -> int:
    """Begin the program anew beside this one, which has more to do afterwards; returns the exit code."""
    sys.stdout.flush()
    with subprocess.Popen(program_again(directory)) as child:
        try:
            return child.wait()
        except BaseException:  # a signal to this process is meant for the child as well
            child.terminate()
            child.wait()
            raise
