"""The best cluster for a recipe: a plan on every cluster of a fleet, ranked by time and cost of the whole job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import cpu_count
from sys import modules
from threading import active_count

from fitune.errors import FituneError
from fitune.estimate.overhead import checkpoint_copy_bytes
from fitune.estimate.parameters import trained_parameters
from fitune.planner.candidates import Request
from fitune.planner.clusters.ranking import START_SECONDS, Wanted, in_order, nowhere, require_prices
from fitune.planner.clusters.training_ranking import TOKENS_PER_SECOND, TrainingOffer, TrainingRanking
from fitune.planner.defaults import with_host_memory
from fitune.planner.explain import memory_sum
from fitune.planner.job import STORAGE_BANDWIDTH, disk_bytes, memory_bytes, shm_bytes_of
from fitune.planner.methods import methods_for
from fitune.planner.search import first_choice, refuse_contradictions
from fitune.planner.whole_run import whole_run, with_timely_saves
from fitune.recipe.fleet import Cluster, Fleet
from fitune.recipe.recipe import Recipe
from fitune.units import GIB, counted, format_bytes, format_rate
from fitune.values.counts import count_parameters
from fitune.values.machines.gpus import (
    NODE_NETWORK,
    GpuFigures,
    find_gpu,
    hardware_for,
    shared_host_bytes,
    with_figures,
)
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Plan
from fitune.values.predictions import Epoch, Priced, WholeRun
from fitune.values.words import (
    describe_devices,
    describe_offload,
    describe_plan,
    describe_rates,
    describe_sharding,
    method_name,
)

EpochOf = Callable[[Plan], Epoch]
Known = Callable[[Hardware], Hardware]


def rank_fleet(
    recipe: Recipe,
    fleet: Fleet,
    wanted: Wanted,
    *,
    model: ModelSpec,
    epoch_of: EpochOf,
    fetches_model: bool = True,
    known: Known = lambda hardware: hardware,
) -> TrainingRanking:
    """Plans on each cluster over each number of nodes, and ranks them. ``known`` adds what was measured of a kind of
    hardware.

    Raises RecipeError where prices are missing that the objective asks for, NothingFits when no offer keeps what is
    wanted.
    """
    require_prices(fleet, wanted)
    found, without = offers_on(
        fleet, recipe, model=model, epoch_of=epoch_of, fetches_model=fetches_model, known=known
    )
    return ranked(recipe, model, found, without, wanted)


def offers_on(
    fleet: Fleet,
    recipe: Recipe,
    *,
    model: ModelSpec,
    epoch_of: EpochOf,
    fetches_model: bool,
    known: Known = lambda hardware: hardware,
) -> tuple[list[TrainingOffer], tuple[tuple[str, str], ...]]:
    """An offer for each number of nodes of each cluster, and why clusters have none.

    Raises NothingFits where there is none at all.

    ``fetches_model``: each node fetches the model from the Hub and needs disk for it.
    """
    recipe = recipe.model_copy(update={"objective": "fastest"})
    places = [
        (cluster, known(hardware_of(cluster, nodes)))
        for cluster in fleet.clusters
        for nodes in node_counts(cluster.most_nodes)
    ]
    hardware = list(dict.fromkeys(machines for _, machines in places))
    answers = dict(zip(hardware, _plans(recipe, model, hardware), strict=True))
    offers: list[TrainingOffer] = []
    without: dict[str, dict[str, str]] = {}
    """Name of a cluster -> why -> the first number of nodes that is refused for that."""
    for cluster, machines in places:
        answer = answers[machines]
        why = answer if isinstance(answer, str) else _why_not(answer, cluster, fetches_model=fetches_model)
        if why or isinstance(answer, str):
            without.setdefault(cluster.name, {}).setdefault(why, counted(machines.nodes, "node"))
            continue
        offers.append(_offer(recipe, answer, cluster, epoch_of))
    names = {offer.cluster.name for offer in offers}
    lost = tuple((name, _in_words(whys)) for name, whys in without.items() if name not in names)
    if not offers:
        raise nowhere(
            lost, hint="tuning: qlora, a shorter seq_len, or offload_parameters: cpu where the host has room"
        )
    return offers, lost


def _in_words(whys: Mapping[str, str]) -> str:
    """``1 node: does not fit …; 2 nodes: …``; one reason alone for all."""
    return "; ".join(f"{nodes}: {why}" if len(whys) > 1 else why for why, nodes in whys.items())


def _offer(recipe: Recipe, found: Priced, cluster: Cluster, epoch_of: EpochOf) -> TrainingOffer:
    """The offer of the plan that was ``found``, which saves as often as training does; in a cell (``lora fp16, ZeRO-3
    by FSDP2, parameters on the CPU``) and in lines."""
    estimate = found.estimate
    run = whole_run(found.plan, epoch_of(found.plan), price_per_gpu_hour=cluster.price or 0.0)
    plan = with_timely_saves(recipe, found.plan, run, step_seconds=estimate.step_seconds)
    priced = replace(found, plan=plan)
    method = f"{method_name(plan.tuning)} {plan.precision.value}"
    memory = f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)} a device"
    return TrainingOffer(
        cluster=cluster, nodes=plan.hardware.nodes, parts=job_seconds(priced, run, cluster), priced=priced, run=run,
        devices=describe_devices(plan.hardware),
        way=", ".join(filter(None, (method, describe_sharding(plan.sharding), describe_offload(plan.offload)))),
        details=(
            describe_plan(plan),
            f"{memory}, {format_rate(estimate.tokens_per_second)} ({describe_rates(plan)})",
        ),
    )  # fmt: skip


def node_counts(nodes: int) -> list[int]:
    """1, 2, 4, … and all of them."""
    return sorted({nodes, *(2**power for power in range(nodes.bit_length()) if 2**power <= nodes)})


def hardware_of(cluster: Cluster, nodes: int) -> Hardware:
    """``nodes`` of the cluster. Of a host whose memory is known the plan has whole GiB, as jobs ask for it, less
    /dev/shm. 0 would be unknown."""
    gpu = with_figures(find_gpu(cluster.gpu), GpuFigures(link_bandwidth=cluster.interconnect))
    host = cluster.host_memory or shared_host_bytes(cluster.gpu)
    known = hardware_for(
        gpu=gpu, gpus=cluster.gpus, nodes=nodes,
        host_memory_bytes=max(1, host // GIB * GIB - shm_bytes_of(cluster.gpus)) if host else 0,
        internode_bandwidth=cluster.node_network or NODE_NETWORK,
    )  # fmt: skip
    return with_host_memory(known)


def _plans(recipe: Recipe, model: ModelSpec, hardware: Sequence[Hardware]) -> list[Priced | str]:
    """The plan on each, or why there is none. By all cores where there are no threads that a fork would cut off: of
    torch, or of the planner's page."""
    from concurrent.futures import ProcessPoolExecutor  # 20 ms that only this needs
    from multiprocessing import get_all_start_methods, get_context

    plan = partial(_plan_on, recipe, model)
    cores = min(cpu_count() or 1, len(hardware))
    if (
        cores < 2
        or len(hardware) < _WORTH_PROCESSES
        or "torch" in modules
        or active_count() > 1
        or "fork" not in get_all_start_methods()
    ):
        return [plan(each) for each in hardware]
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        return list(pool.map(plan, hardware))


_WORTH_PROCESSES = 4


def _plan_on(recipe: Recipe, model: ModelSpec, hardware: Hardware) -> Priced | str:
    request = Request.of(recipe, model, hardware, ("plan", "train"))
    try:
        refuse_contradictions(request)
        found = first_choice(request)
    except FituneError as error:
        return error.message
    return found or "no plan keeps the settings of the recipe there"


def _why_not(priced: Priced, cluster: Cluster, *, fetches_model: bool) -> str:
    """Reason why the plan cannot run on the cluster; empty when it can."""
    if not priced.estimate.fits:
        return f"does not fit: {memory_sum(priced.estimate)}"
    needed = disk_bytes(priced.plan, fetches_model=fetches_model)
    if cluster.disk is not None and needed > cluster.disk:
        return f"needs {format_bytes(needed)} of disk on each node for caches, which have {format_bytes(cluster.disk)}"
    memory = memory_bytes(priced.plan, priced.estimate, shm_bytes=shm_bytes_of(cluster.gpus))
    if cluster.host_memory is not None and memory > cluster.host_memory:
        return (
            f"needs {format_bytes(memory)} of host memory, and a node has {format_bytes(cluster.host_memory)}"
        )
    return ""


def ranked(
    recipe: Recipe,
    model: ModelSpec,
    found: Sequence[TrainingOffer],
    without: tuple[tuple[str, str], ...],
    wanted: Wanted,
) -> TrainingRanking:
    """The offers in the order of what is wanted. Raises NothingFits when none keeps the deadline and the budget.

    Methods that the recipe leaves open keep their order: speed is never bought with one that learns less.
    """
    order: dict[str, int] = {}
    for offer in found:
        for method in methods_for(Request.of(recipe, model, offer.priced.plan.hardware)):
            order.setdefault(method_name(method.tuning), len(order))
    kept, refused = in_order(
        found, wanted, preference=lambda offer: order.get(method_name(offer.priced.plan.tuning), len(order))
    )
    unused = tuple(key for key in _OF_MACHINES if key in recipe.model_fields_set)
    return TrainingRanking(wanted=wanted, offers=kept, refused=refused, without=without, unused=unused)


_OF_MACHINES = ("gpu", "gpus", "nodes", "host_memory", "interconnect", "node_network", "price_per_gpu_hour")


def job_seconds(priced: Priced, run: WholeRun, cluster: Cluster) -> Mapping[str, float]:
    """Seconds by part: ``start``, ``weights``, ``tokenising``, ``training``, ``checkpoints``, ``export``.

    weights: 2 · P / storage, every node for itself. tokenising: the tokens of an epoch once, by one core. checkpoints:
    bytes / storage for each; of those written beside the steps the copy to the host, and the last one whole. export:
    2 · (P, or P trained of an adapter) / storage.
    """
    plan = priced.plan
    storage = cluster.storage or STORAGE_BANDWIDTH
    parameters = count_parameters(plan.model).total
    exported = trained_parameters(plan) if plan.run.export == "adapter" else parameters
    count, writing = number_of_saves(plan, run), priced.estimate.checkpoint_bytes / storage
    checkpoints = count * writing
    if count and plan.run.async_save:
        checkpoints = count * (checkpoint_copy_bytes(plan) / plan.hardware.gpu.host_bandwidth) + writing
    return {
        "start": float(cluster.start or START_SECONDS[cluster.kind]),
        "weights": 2 * parameters / storage,
        "tokenising": run.epoch.tokens / TOKENS_PER_SECOND,
        "training": run.seconds,
        "checkpoints": checkpoints,
        "export": 2 * exported / storage,
    }


def number_of_saves(plan: Plan, run: WholeRun) -> int:
    """Checkpoints of the whole run: every ``save_every`` steps or so many an epoch, and the last step's."""
    if plan.run.save_every:
        return -(-run.steps // plan.run.save_every)
    return max(1, round(plan.run.saves_per_epoch * run.epochs)) if plan.run.saves_per_epoch else 0
