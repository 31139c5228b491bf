"""Training as a program: signals stop it, and several processes run it together, on one node or on several. Each
attempt after one that ran out of memory has a process of its own, where what the failed one left is gone.

Each node starts its own ranks, and node 0 decides.
"""

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from fitune.checkpoint.commit import last_saved
from fitune.engine.ranks import ALONE, Ranks, joined_ranks, launched_ranks
from fitune.errors import FituneError, HardwareError, exit_code_of
from fitune.estimate.predict import predict
from fitune.launch.nodes import ONE_NODE, OneNode, meeting
from fitune.launch.place import Place, place_of
from fitune.launch.ray_cluster import RayPlace
from fitune.launch.signals import EXIT_CODES
from fitune.launch.torchrun import Ended, fresh_logs, run_ranks
from fitune.recipe.recipe import Recipe
from fitune.session.clusters.on_ray import train_on_ray
from fitune.session.clusters.ray_nodes import require_same, versions_here
from fitune.session.events import Emit, Note, ignore_event
from fitune.session.planning import wanted_hardware
from fitune.session.signals import INTERRUPTED, end_with_launcher, ended_by_signals, stop_requests
from fitune.session.train.attempts import (
    Attempt,
    failure,
    hand_over,
    next_attempt,
    owned_directory,
    program_again,
    shortage_of_ranks,
    take_over,
)
from fitune.session.train.beginning import first_attempt
from fitune.units import format_bytes
from fitune.values.plan import Plan
from fitune.values.rank_status import is_left_to_launcher
from fitune.values.run_directory import LOGS
from fitune.values.serial import TABLE_BYTES, from_json, read_object, to_json
from fitune.values.words import describe_plan

_ONE_REQUEST_SECONDS = 1.0
"""A rank may get a signal twice, from its launcher and from whoever sent it to all processes of the job."""


def place_in(recipe: Recipe, *, node: int | None, rendezvous: str, timeout_s: float) -> Place | None:
    """This machine's place among the recipe's nodes; None where neither ``node`` nor ``rendezvous`` is said."""
    if node is None and not rendezvous:
        return None
    return place_of(node=node, nodes=recipe.nodes, rendezvous=rendezvous, timeout_s=timeout_s)


def train_program(
    recipe: Recipe, *, overwrite: bool, emit: Emit, in_child: bool = False, place: Place | None = None,
    on_ray: RayPlace | None = None,
) -> int:  # fmt: skip
    """Plan and train; returns the exit code.

    A plan for several processes is trained by as many, which are started here unless torchrun started this one.
    ``in_child``: an attempt after one that ran out of memory runs in a child, for this process has more to do.
    ``place``: this machine among several nodes, each of which starts its own processes. ``on_ray``: a Ray cluster,
    which starts them.
    """
    with joined_ranks() as ranks:
        if not ranks.is_alone and (place is not None or on_ray is not None):
            raise HardwareError(
                f"another launcher started this process as rank {ranks.rank} of {ranks.world}, and --node-rank or "
                "--on ray would start ranks once more",
                hint="leave --node-rank, --rendezvous and --on out, or start fitune without the other launcher",
            )
        if on_ray is not None:
            return train_on_ray(recipe, on_ray, overwrite=overwrite, emit=emit)
        if place is not None:
            with meeting(place) as nodes:
                _require_same_request(nodes, recipe, overwrite=overwrite)
                # node 0 plans for all, and its plan is what every rank runs
                first = None if place.node else first_attempt(recipe, overwrite=overwrite, emit=emit)
                return train_by_ranks(first if isinstance(first, Attempt) else None, recipe, nodes, emit=emit)
        emit = emit if ranks.is_first else ignore_event
        if not ranks.is_alone:
            recipe = _as_launched(recipe, ranks)
        attempt = first_attempt(recipe, overwrite=overwrite, emit=emit, ranks=ranks)
        if not isinstance(attempt, Attempt):
            return 0
        if ranks.is_alone and attempt.plan.hardware.num_gpus > 1:
            require_one_machine(attempt.plan)
            return train_by_ranks(attempt, recipe, ONE_NODE, emit=emit)
        return attempt_program(attempt, emit=emit, in_child=in_child, ranks=ranks)


def _as_launched(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe for the machines and the processes on each that another launcher started, where it leaves them
    open."""
    machines = len(set(ranks.gathered(socket.gethostname())))
    nodes = recipe.nodes if "nodes" in recipe.model_fields_set else machines
    gpus = recipe.gpus or max(1, ranks.world // nodes)
    return recipe.model_copy(update={"nodes": nodes, "gpus": gpus})


def require_one_machine(plan: Plan) -> None:
    """Raises HardwareError for a plan of several machines that says neither which this one is nor where they meet."""
    hardware = plan.hardware
    if hardware.nodes > 1:
        raise HardwareError(
            f"the plan is for {hardware.nodes} machines, and this one was not told which of them it is",
            hint="on each of them: fitune train … --node-rank 0 (then 1, …) --rendezvous HOST:PORT, where HOST is the "
            f"first, with output_dir on a disk that all share; or torchrun --nnodes {hardware.nodes} --nproc-per-node "
            f"{hardware.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m fitune train …",
        )


def train_by_ranks(attempt: Attempt | None, recipe: Recipe, nodes: OneNode, *, emit: Emit) -> int:
    """Train by the ranks of the attempt's plan, and by those of the next one when the memory of any of them ran out in
    a step; returns the exit code.

    ``attempt`` is node 0's, None where nothing is left to do; the other nodes are told its plan.
    """
    with nullcontext() if attempt is None else owned_directory(attempt.directory):
        ended = Ended(exit_code=0)
        while (plan := _plan_of_all(attempt, nodes)) is not None:
            had = last_saved(Path(plan.run.output_dir))
            if attempt is None:
                _require_room_here(plan, recipe)
                each = plan.hardware.gpus_per_node
                first = each * nodes.number
                mine = f"rank {first}" if each == 1 else f"ranks {first}–{first + each - 1}"
                emit(
                    Note(
                        f"here: {mine} of {plan.hardware.num_gpus}; {nodes.name(0)} tells how it goes, and "
                        f"their output is in {plan.run.output_dir}/{LOGS}"
                    )
                )
            else:
                fresh_logs(hand_over(attempt))
            ended = _run(plan, nodes)
            if attempt is not None:
                shortage = None if ended.is_stop else shortage_of_ranks(attempt.directory)
                attempt = None if shortage is None else next_attempt(attempt, shortage, had=had, emit=emit)
    if not (ended.is_well or ended.is_said):
        raise failure(ended)
    return ended.exit_code


def _plan_of_all(attempt: Attempt | None, nodes: OneNode) -> Plan | None:
    """The plan that node 0 has next; None when it has no more."""
    text = nodes.from_first(lambda: "" if attempt is None else to_json(attempt.plan))
    if not text:
        return None
    plan = from_json(Plan, text)
    count = 1 if nodes.place is None else nodes.place.nodes
    if plan.hardware.nodes != count:
        raise HardwareError(
            f"the plan uses {plan.hardware.nodes} of the {count} nodes: {describe_plan(plan)}",
            hint=f"--nodes {plan.hardware.nodes}; or set zero, which divides over all nodes",
        )
    return plan


def _run(plan: Plan, nodes: OneNode) -> Ended:
    """The ranks of this node, and how those of all nodes ended: one exit code, and the cause."""
    directory = Path(plan.run.output_dir)
    run_id = nodes.from_first(lambda: uuid.uuid4().hex)
    nodes.gathered("ready")
    hardware = plan.hardware
    ended = run_ranks(
        program_again(directory), processes=hardware.gpus_per_node, threads=hardware.threads_per_process,
        directory=directory, nodes=nodes, run_id=run_id,
    )  # fmt: skip
    if not ended.exit_code and nodes.number == 0 and _is_interrupted(directory):
        ended = replace(ended, exit_code=INTERRUPTED)  # a rank was asked to stop, and its launcher was not
    if not ended.is_well:
        nodes.call_off(ended.cause or "its ranks ended")
    everyone = [from_json(Ended, text) for text in nodes.gathered(to_json(ended))]
    return job_end(everyone, nodes)


def _is_interrupted(directory: Path) -> bool:
    with suppress(OSError, ValueError):
        return (
            read_object(directory / "report.json", largest_bytes=TABLE_BYTES).get("status") == "interrupted"
        )
    return False


def job_end(everyone: Sequence[Ended], nodes: OneNode) -> Ended:
    """The end of the node that has the cause; else of one that was stopped by a signal; else the worst."""
    number, end = min(
        enumerate(everyone), key=lambda each: (not each[1].cause, not each[1].is_stop, -each[1].exit_code)
    )
    is_own = nodes.number == number
    cause = end.cause if is_own or not end.cause else f"{nodes.name(number)}: {end.cause}"
    return replace(
        end, cause=cause, is_said=end.is_said and nodes.number == 0
    )  # rank 0 speaks on node 0 alone


def _require_same_request(nodes: OneNode, recipe: Recipe, *, overwrite: bool) -> None:
    """Raises HardwareError, on every node, naming what differs between their recipes and versions."""
    given = recipe.model_dump(mode="json", exclude_defaults=True)
    facts = {f"{key} in the recipe": value for key, value in given.items()}
    facts |= {"--overwrite": overwrite, **versions_here()}
    found = [
        (nodes.name(node), json.loads(text)) for node, text in enumerate(nodes.gathered(json.dumps(facts)))
    ]
    require_same(found)


def _require_room_here(plan: Plan, recipe: Recipe) -> None:
    """Raises HardwareError where this node has less than node 0 planned for: other or fewer devices, less memory."""
    here = wanted_hardware(recipe)
    if (here.gpu.name, here.gpus_per_node) != (plan.hardware.gpu.name, plan.hardware.gpus_per_node):
        raise HardwareError(
            f"this node has {here.gpus_per_node} × {here.gpu.name}, and the plan is for "
            f"{plan.hardware.gpus_per_node} × {plan.hardware.gpu.name} in each",
            hint="nodes that are alike",
        )
    estimate = predict(replace(plan, hardware=here))
    if not estimate.fits:
        device, host = estimate.memory.peak_bytes, estimate.host_bytes
        raise HardwareError(
            f"the plan of node 0 does not fit on this node: {format_bytes(device)} of "
            f"{format_bytes(estimate.usable_bytes)} a device, {format_bytes(host)} of "
            f"{format_bytes(estimate.usable_host_bytes)} on the host",
            hint="host_memory: or a smaller gpu_memory in the recipe, as the smallest node has it",
        )


def go_on(directory: Path, *, emit: Emit) -> int:
    """Take over the attempt that waits in ``directory`` and run it, by every rank of its plan; returns the exit
    code."""
    if not launched_ranks().is_alone:
        end_with_launcher()
    with ended_by_signals() as joined, joined_ranks() as ranks:
        joined.close()
        if not ranks.is_first:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # one log a rank
        attempt = ranks.from_first(lambda: take_over(directory))
        emit = emit if ranks.is_first else ignore_event
        if ranks.is_alone:
            return attempt_program(attempt, emit=emit)
        try:
            code = attempt_program(attempt, emit=emit, ranks=ranks)
        except FituneError as error:
            if not is_left_to_launcher(directory / LOGS):
                raise
            return exit_code_of(error)
        # The agent takes any other code for a failure of this rank.
        return 0 if code in EXIT_CODES.values() else code


def attempt_program(attempt: Attempt, *, emit: Emit, in_child: bool = False, ranks: Ranks = ALONE) -> int:
    """Run the attempt, and begin anew when memory runs out in a step; returns the exit code."""
    from fitune.session.train.training import run_attempt

    with stop_requests(together_seconds=0.0 if ranks.is_alone else _ONE_REQUEST_SECONDS) as request:
        ended = run_attempt(attempt, emit=emit, stop_asked=request.asked, sinks=[request], ranks=ranks)
    if isinstance(ended, Attempt):
        return (run_child if in_child else replace_process)(hand_over(ended))
    if ended.status == "interrupted":
        emit(Note("interrupted: the step was finished and saved; add --resume to go on"))
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
