"""The best cluster for a recipe: a plan on every cluster of a fleet, ranked by time and cost of the whole job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import cpu_count
from sys import modules

from fitune.errors import FituneError
from fitune.planner.candidates import Request
from fitune.planner.clusters.job import disk_bytes, shm_bytes_of
from fitune.planner.clusters.whole_job import Offer, offer_of
from fitune.planner.clusters.wishes import Wanted, kept_and_refused, nowhere, require_prices
from fitune.planner.defaults import with_host_memory
from fitune.planner.methods import methods_for
from fitune.planner.reasons.explain import memory_sum
from fitune.planner.search import first_choice, refuse_contradictions
from fitune.planner.whole_run import whole_run
from fitune.spec.machines.gpus import NODE_NETWORK, find_gpu, hardware_for, shared_host_bytes
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.plan import Plan
from fitune.spec.predictions import Epoch, Priced
from fitune.spec.recipe.fleet import Cluster, Fleet
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import method_name
from fitune.units import format_bytes

EpochOf = Callable[[Plan], Epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The offers that keep what is wanted, the best first; and why every other cluster has none."""

    recipe: Recipe
    wanted: Wanted
    offers: tuple[Offer, ...]
    refused: tuple[tuple[Offer, str], ...]
    """Offers that take too long or cost too much, and why."""
    without: tuple[tuple[str, str], ...]
    """Names of clusters on which nothing can run, and why."""

    @property
    def best(self) -> Offer:
        return self.offers[0]

    @property
    def best_of_each(self) -> tuple[Offer, ...]:
        """The first offer of every cluster that has one."""
        return tuple({offer.cluster.name: offer for offer in reversed(self.offers)}.values())[::-1]

    @property
    def all_offers(self) -> tuple[Offer, ...]:
        return (*self.offers, *(offer for offer, _ in self.refused))

    @property
    def frontier(self) -> tuple[Offer, ...]:
        """Offers that no other one beats in both time and cost, the fastest first."""
        found: list[Offer] = []
        priced = [offer for offer in self.all_offers if offer.cost is not None]
        for offer in sorted(priced, key=lambda each: (each.seconds, each.cost or 0.0)):
            if not found or (offer.cost or 0.0) < (found[-1].cost or 0.0):
                found.append(offer)
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """A recipe planned on every cluster of a fleet, before wishes choose between them."""

    recipe: Recipe
    model: ModelSpec
    found: tuple[Offer, ...]
    without: tuple[tuple[str, str], ...]
    """Names of clusters that have none, and why."""


def rank_fleet(
    recipe: Recipe,
    fleet: Fleet,
    wanted: Wanted,
    *,
    model: ModelSpec,
    epoch_of: EpochOf,
    fetches_model: bool = True,
) -> Ranking:
    """Plans on each cluster over each number of nodes, and ranks them.

    Raises RecipeError where prices are missing that the objective asks for, NothingFits when no offer keeps what is
    wanted.
    """
    require_prices(fleet, wanted)
    return ranked(
        offers_on(fleet, recipe, model=model, epoch_of=epoch_of, fetches_model=fetches_model), wanted
    )


def offers_on(
    fleet: Fleet, recipe: Recipe, *, model: ModelSpec, epoch_of: EpochOf, fetches_model: bool
) -> Offers:
    """An offer for each number of nodes of each cluster. Raises NothingFits where there is none at all.

    ``fetches_model``: each node fetches the model from the Hub and needs disk for it.
    """
    recipe = recipe.model_copy(update={"objective": "fastest"})
    places = [(cluster, nodes) for cluster in fleet.clusters for nodes in node_counts(cluster.nodes)]
    hardware = list(dict.fromkeys(hardware_of(cluster, nodes) for cluster, nodes in places))
    answers = dict(zip(hardware, _plans(recipe, model, hardware), strict=True))
    offers: dict[tuple[str, int], Offer] = {}  # a plan of one device is the same for every number of nodes
    without: dict[str, str] = {}
    for cluster, nodes in places:
        answer = answers[hardware_of(cluster, nodes)]
        why = answer if isinstance(answer, str) else _why_not(answer, cluster, fetches_model=fetches_model)
        if why or isinstance(answer, str):
            without[cluster.name] = why
            continue
        run = whole_run(answer.plan, epoch_of(answer.plan), price_per_gpu_hour=0.0)
        offer = offer_of(cluster, answer, run)
        offers.setdefault((cluster.name, offer.nodes), offer)
    names = {name for name, _ in offers}
    lost = tuple((name, why) for name, why in without.items() if name not in names)
    if not offers:
        raise nowhere(
            lost, hint="tuning: qlora, a shorter seq_len, or offload_parameters: cpu where the host has room"
        )
    return Offers(recipe=recipe, model=model, found=tuple(offers.values()), without=lost)


def node_counts(nodes: int) -> list[int]:
    """1, 2, 4, … and all of them."""
    return sorted({nodes, *(2**power for power in range(nodes.bit_length()) if 2**power <= nodes)})


def hardware_of(cluster: Cluster, nodes: int) -> Hardware:
    """``nodes`` of the cluster. Of a host whose memory is known, /dev/shm is not the plan's."""
    gpu = find_gpu(cluster.gpu)
    if cluster.interconnect is not None:
        gpu = replace(gpu, link_bandwidth=cluster.interconnect)
    host = cluster.host_memory or shared_host_bytes(cluster.gpu)
    known = hardware_for(
        gpu=gpu, gpus=cluster.gpus, nodes=nodes,
        host_memory_bytes=max(0, host - shm_bytes_of(cluster.gpus)) if host else 0,
        internode_bandwidth=cluster.node_network or NODE_NETWORK,
    )  # fmt: skip
    return with_host_memory(known)


def _plans(recipe: Recipe, model: ModelSpec, hardware: Sequence[Hardware]) -> list[Priced | str]:
    """The plan on each, or why there is none. By all cores where that cannot disturb torch's threads."""
    from concurrent.futures import ProcessPoolExecutor  # 20 ms that only this needs
    from multiprocessing import get_all_start_methods, get_context

    plan = partial(_plan_on, recipe, model)
    cores = min(cpu_count() or 1, len(hardware))
    if (
        cores < 2
        or len(hardware) < _WORTH_PROCESSES
        or "torch" in modules
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
    return ""


def ranked(offers: Offers, wanted: Wanted) -> Ranking:
    """The offers in the order of what is wanted. Raises NothingFits when none keeps the deadline and the budget."""
    kept, refused = kept_and_refused(offers.found, wanted, preference=_preference(offers))
    return Ranking(recipe=offers.recipe, wanted=wanted, offers=kept, refused=refused, without=offers.without)


def _preference(offers: Offers) -> Callable[[Offer], int]:
    """Order of methods where the recipe leaves them open: speed is never bought with one that learns less."""
    order: dict[str, int] = {}
    for offer in offers.found:
        for method in methods_for(Request.of(offers.recipe, offers.model, offer.priced.plan.hardware)):
            order.setdefault(method_name(method.tuning), len(order))
    return lambda offer: order.get(method_name(offer.priced.plan.tuning), len(order))
