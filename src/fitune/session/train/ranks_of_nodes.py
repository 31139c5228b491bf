"""Training by the ranks of one node or of several: each node starts its own, and node 0 decides."""

import json
import platform
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from fitune.checkpoint.commit import last_saved
from fitune.engine.ranks import Ranks
from fitune.errors import HardwareError, TrainingFailed
from fitune.estimate.predict import predict
from fitune.launch.nodes import OneNode, meeting
from fitune.launch.place import Place, place_of
from fitune.launch.torchrun import Ended, fresh_logs, run_ranks
from fitune.session.events import Note, Tell
from fitune.session.planning import wanted_hardware
from fitune.session.train.attempts import Attempt, hand_over, next_attempt, program_again, shortage_of_ranks
from fitune.session.train.beginning import first_attempt
from fitune.spec.plan import Plan
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.run_directory import LAUNCH_LOCK, LOGS
from fitune.spec.run_lock import lock_directory
from fitune.spec.serial import from_json, to_json
from fitune.spec.words import describe_plan
from fitune.units import format_bytes

LOST = "the ranks lost the connection between them, and none of them says why"


def place_in(recipe: Recipe, *, node: int | None, rendezvous: str, timeout_s: float) -> Place | None:
    """This machine's place among the recipe's nodes; None where neither ``node`` nor ``rendezvous`` is said."""
    if node is None and not rendezvous:
        return None
    return place_of(node=node, nodes=recipe.nodes, rendezvous=rendezvous, timeout_s=timeout_s)


def require_no_launcher(ranks: Ranks) -> None:
    """Raises HardwareError where torchrun, srun or mpirun started this process: it numbers the nodes itself."""
    if not ranks.is_alone:
        raise HardwareError(
            f"another launcher started this process as rank {ranks.rank} of {ranks.world}, and --node-rank or --on ray "
            "would start ranks once more",
            hint="leave --node-rank, --rendezvous and --on out, or start fitune without the other launcher",
        )


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


def train_on_nodes(recipe: Recipe, place: Place, *, overwrite: bool, tell: Tell) -> int:
    """Train with the other nodes of ``place``; returns the exit code, which is the same on every node.

    Node 0 plans for all, and its plan is what every rank runs.
    """
    with meeting(place) as nodes:
        _require_same_request(nodes, recipe, overwrite=overwrite)
        attempt = None if place.node else first_attempt(recipe, overwrite=overwrite, tell=tell)
        return train_by_ranks(attempt if isinstance(attempt, Attempt) else None, recipe, nodes, tell=tell)


def train_by_ranks(attempt: Attempt | None, recipe: Recipe, nodes: OneNode, *, tell: Tell) -> int:
    """Train by the ranks of the attempt's plan, and by those of the next one when the memory of any of them ran out in
    a step; returns the exit code.

    ``attempt`` is node 0's, None where nothing is left to do; the other nodes are told its plan.
    """
    with owned_directory(attempt):
        ended = Ended(exit_code=0)
        while (plan := _plan_of_all(attempt, nodes)) is not None:
            had = last_saved(Path(plan.run.output_dir))
            if attempt is None:
                _require_room_here(plan, recipe)
                tell(Note(_part_of(plan, nodes)))
            else:
                fresh_logs(hand_over(attempt))
            ended = _run(plan, nodes)
            if attempt is not None:
                shortage = None if ended.is_stop else shortage_of_ranks(attempt.directory)
                attempt = None if shortage is None else next_attempt(attempt, shortage, had=had, tell=tell)
    if not (ended.is_well or ended.is_said):
        raise failure(ended)
    return ended.exit_code


def failure(ended: Ended) -> TrainingFailed:
    """The error that a job ended with."""
    error = TrainingFailed(ended.cause or LOST, hint=ended.hint or "fitune train … --resume goes on")
    error.exit_code = ended.exit_code or TrainingFailed.exit_code
    return error


@contextmanager
def owned_directory(attempt: Attempt | None) -> Iterator[None]:
    """Inside, the run directory is this launcher's. Raises RunDirectoryError while a rank still saves into it, one
    whose launcher was killed."""
    if attempt is None:
        yield
        return
    with lock_directory(attempt.directory, lock=LAUNCH_LOCK):
        with lock_directory(attempt.directory):
            pass
        yield


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
    if not ended.is_well:
        nodes.call_off(ended.cause or "its ranks ended")
    everyone = [from_json(Ended, text) for text in nodes.gathered(to_json(ended))]
    return job_end(everyone, nodes)


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
    facts |= {"--overwrite": overwrite, "python": platform.python_version()}
    facts |= {name: version(name) for name in ("fitune", "torch", "transformers")}
    found = [json.loads(text) for text in nodes.gathered(json.dumps(facts))]
    for node, theirs in enumerate(found):
        for name in sorted(found[0].keys() | theirs.keys()):
            first, here = found[0].get(name), theirs.get(name)
            if first != here:
                raise HardwareError(
                    f"{name} differs: {first!r} on {nodes.name(0)}, {here!r} on {nodes.name(node)}",
                    hint="the same recipe, options and versions on every node",
                )


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


def _part_of(plan: Plan, nodes: OneNode) -> str:
    each = plan.hardware.gpus_per_node
    first = each * nodes.number
    ranks = f"rank {first}" if each == 1 else f"ranks {first}–{first + each - 1}"
    return (
        f"{ranks} of {plan.hardware.num_gpus} train here; {nodes.name(0)} tells how it goes, and what they say is in "
        f"{plan.run.output_dir}/{LOGS}"
    )
