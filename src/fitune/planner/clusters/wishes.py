"""Wishes for a job beside its recipe: what it should be best at, a deadline, a budget; and which offers keep them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fitune.errors import NothingFits, RecipeError
from fitune.planner.clusters.whole_job import Stay
from fitune.spec.recipe.fleet import Fleet, Objective
from fitune.units import format_dollars, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes for a job beside its recipe: what it should be best at, and its limits."""

    objective: Objective = "fastest"
    deadline_seconds: float | None = None
    budget: float | None = None
    """US dollars."""


S = TypeVar("S", bound=Stay)


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
        cost = "" if first.cost is None else f", for {format_dollars(first.cost)}"
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
    return f"costs {format_dollars(offer.cost)}, more than {format_dollars(wanted.budget)}"


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
