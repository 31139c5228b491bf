"""Where a recipe trains best: a plan on every cluster of a fleet, ranked by the time and the cost of the whole job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import cpu_count
from sys import modules
from typing import TypeVar

from fitune.errors import FituneError, NothingFits, RecipeError
from fitune.planner.candidates import Request
from fitune.planner.clusters.job import disk_bytes, shm_bytes_of
from fitune.planner.clusters.whole_job import Offer, Stay, offer_of
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
from fitune.spec.recipe.fleet import Cluster, Fleet, Objective
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import method_name
from fitune.units import format_bytes, format_seconds

EpochOf = Callable[[Plan], Epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes for a job beside its recipe: what it should be best at, and its limits."""

    objective: Objective = "fastest"
    deadline_seconds: float | None = None
    budget: float | None = None
    """US dollars."""


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


S = TypeVar("S", bound=Stay)


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
    fleet: Fleet, recipe: Recipe, *, model: ModelSpec, epoch_of: EpochOf, fetches_model: bool = True
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


def kept_and_refused(
    found: Sequence[S], wanted: Wanted, *, preference: Callable[[S], int] = lambda offer: 0
) -> tuple[tuple[S, ...], tuple[tuple[S, str], ...]]:
    """The offers that keep deadline and budget, the best first; the others, each with the reason.

    A lower ``preference`` comes before the objective. Raises NothingFits when no offer keeps them.
    """
    broken = [(offer, breach(offer, wanted)) for offer in found]
    kept = [offer for offer, why in broken if not why]
    if not kept:
        raise none_kept(found, wanted)
    kept.sort(key=lambda offer: (preference(offer), *order_of(offer, wanted.objective)))
    return tuple(kept), tuple((offer, why) for offer, why in broken if why)


def nowhere(without: Sequence[tuple[str, str]], *, hint: str) -> NothingFits:
    """The error of a fleet on none of whose clusters anything fits; ``without`` has their names and reasons."""
    return NothingFits(
        "\n".join(["nothing fits on any cluster:", *(f"  {name}: {why}" for name, why in without)]), hint=hint
    )


def breach(offer: Stay, wanted: Wanted) -> str:
    """Reason why the offer breaks the deadline or the budget; empty when it keeps them."""
    return "; ".join(filter(None, (too_late(offer, wanted), too_dear(offer, wanted))))


def none_kept(offers: Sequence[Stay], wanted: Wanted) -> NothingFits:
    """The error of a deadline or a budget that no offer keeps: it names the offer that comes nearest to each."""
    in_time = [offer for offer in offers if not too_late(offer, wanted)]
    in_budget = [offer for offer in offers if not too_dear(offer, wanted)]
    lines = []
    if in_time and in_budget:
        cheapest, first = min(in_time, key=_by_cost), min(in_budget, key=_by_end)
        lines.append(f"the cheapest in time is {where(cheapest)}: {too_dear(cheapest, wanted)}")
        lines.append(f"the fastest within the budget is {where(first)}: {too_late(first, wanted)}")
    if not in_time:
        first = min(offers, key=_by_end)
        cost = "" if first.cost is None else f", for ${first.cost:,.2f}"
        lines.append(f"none is in time; the fastest is {where(first)}: {too_late(first, wanted)}{cost}")
    if not in_budget:
        cheapest = min(offers, key=_by_cost)
        lines.append(
            f"none is within the budget; the cheapest is {where(cheapest)}: {too_dear(cheapest, wanted)}, for "
            f"{format_seconds(cheapest.seconds)}"
        )
    ways = ["a later --deadline"] * bool(wanted.deadline_seconds) + ["a larger --budget"] * bool(
        wanted.budget
    )
    return NothingFits(
        "\n  ".join(["no cluster keeps what is wanted:", *lines]), hint=", ".join([*ways, "or fewer epochs"])
    )


def _by_cost(offer: Stay) -> tuple[float, float]:
    return float("inf") if offer.cost is None else offer.cost, offer.seconds


def _by_end(offer: Stay) -> tuple[float, float]:
    """Sort key: offers by their end in seconds, those without a known end last, the shortest of them first."""
    return float("inf") if offer.end_seconds is None else offer.end_seconds, offer.seconds


def _preference(offers: Offers) -> Callable[[Offer], int]:
    """Order of methods where the recipe leaves them open: speed is never bought with one that learns less."""
    order: dict[str, int] = {}
    for offer in offers.found:
        for method in methods_for(Request.of(offers.recipe, offers.model, offer.priced.plan.hardware)):
            order.setdefault(method_name(method.tuning), len(order))
    return lambda offer: order.get(method_name(offer.priced.plan.tuning), len(order))


def order_of(offer: Stay, objective: Objective) -> tuple[float, float]:
    """Sort key: the best offer for the objective first."""
    match objective:
        case "fastest":
            return offer.seconds, _by_cost(offer)[0]
        case "cheapest":
            return _by_cost(offer)
        case "soonest":
            return _by_end(offer)[0], _by_cost(offer)[0]


def too_late(offer: Stay, wanted: Wanted) -> str:
    """Reason why the offer breaks the deadline; empty when it keeps it."""
    end, deadline = offer.end_seconds, wanted.deadline_seconds
    if end is None and (wanted.objective == "soonest" or deadline is not None):
        free = f"{offer.cluster.free_nodes} of {offer.nodes} nodes are free"
        return f"{free}, and the fleet file does not say when the others are (wait)"
    if end is not None and deadline is not None and end > deadline:
        return f"ends in {format_seconds(end)}, after the deadline of {format_seconds(deadline)}"
    return ""


def too_dear(offer: Stay, wanted: Wanted) -> str:
    """Reason why the offer breaks the budget; empty when it keeps it."""
    if wanted.budget is None or offer.cost is None or offer.cost <= wanted.budget:
        return ""
    return f"costs ${offer.cost:,.2f}, more than ${wanted.budget:,.2f}"


def require_prices(fleet: Fleet, wanted: Wanted) -> None:
    """Raises RecipeError where a cluster has no price and costs are compared."""
    missing = [cluster.name for cluster in fleet.clusters if cluster.price is None]
    asks = (
        "--objective cheapest"
        if wanted.objective == "cheapest"
        else "--budget"
        if wanted.budget is not None
        else ""
    )
    if missing and asks:
        raise RecipeError(
            f"{asks} compares costs, and {fleet.source} has no price of {', '.join(missing)}",
            hint="price: US dollars for an hour of one GPU, in each cluster",
        )


def where(offer: Stay) -> str:
    """``hopper, 2 nodes``."""
    return f"{offer.cluster.name}, {offer.nodes} node{'s' * (offer.nodes > 1)}"
