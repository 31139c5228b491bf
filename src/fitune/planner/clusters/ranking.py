"""Offers of clusters for a whole job, in the order of what is wanted: time, cost, the text and the data of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

from fitune.errors import NothingFits, RecipeError
from fitune.recipe.fleet import Cluster, Fleet, Objective
from fitune.units import format_dollars, format_seconds, text_table, wrapped

START_SECONDS = {"kuberay": 180, "kubernetes": 90, "slurm": 60}
"""From a free node to the first line of fitune, where nobody says: our assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wishes for a job beside its recipe: what it should be best at, and its limits."""

    objective: Objective = "fastest"
    deadline_seconds: float | None = None
    budget: float | None = None
    """US dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A job on some nodes of a cluster: how long all of it takes there, and what it costs."""

    work: ClassVar[str] = "training"
    """The part of the time in which the job itself is done."""
    cluster: Cluster
    nodes: int
    parts: Mapping[str, float]
    devices: str
    """``16 × h100``."""
    way: str
    """How the job is done there, in a cell of the table."""
    details: tuple[str, ...]
    """Lines about the offer where it is taken, after its place and time."""

    @property
    def seconds(self) -> float:
        """Seconds from free nodes to the end."""
        return sum(self.parts.values())

    @property
    def cost(self) -> float | None:
        """US dollars for all GPUs of its nodes; None where no price is known."""
        price = self.cluster.price
        return None if price is None else self.seconds / 3600 * self.nodes * self.cluster.gpus * price

    @property
    def is_free(self) -> bool:
        """True if its nodes are free now."""
        return self.nodes <= self.cluster.free_nodes

    @property
    def wait_seconds(self) -> float | None:
        """Until its nodes are free; None where that is not known."""
        if self.is_free:
            return 0.0
        return None if self.cluster.wait is None else float(self.cluster.wait)

    @property
    def end_seconds(self) -> float | None:
        """Seconds from now to the end of the job; None where it is not known when nodes are free."""
        return None if self.wait_seconds is None else self.wait_seconds + self.seconds

    @property
    def place(self) -> str:
        """``hopper, 2 nodes``."""
        return f"{self.cluster.name}, {self.nodes} node{'s' * (self.nodes > 1)}"

    @property
    def cost_words(self) -> str:
        """``$12.30``, or a dash where no price is known."""
        return "–" if self.cost is None else format_dollars(self.cost)

    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        wait = self.wait_seconds
        free = "now" if self.is_free else "full" if wait is None else f"in {format_seconds(wait)}"
        return (
            self.cluster.name, self.devices, free, format_seconds(self.seconds),
            format_seconds(self.parts[self.work]), self.cost_words, self.way,
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        """Place, time and cost, as ``--json`` prints them."""
        return {
            "cluster": self.cluster.name, "nodes": self.nodes, "gpus_per_node": self.cluster.gpus,
            "gpu": self.cluster.gpu, "seconds": self.seconds, "parts": dict(self.parts), "cost": self.cost,
            "wait_seconds": self.wait_seconds, "is_free": self.is_free,
        }  # fmt: skip


AnyOffer = TypeVar("AnyOffer", bound=Offer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(ABC, Generic[AnyOffer]):
    """The offers that keep what is wanted, the best first; and why every other cluster has none."""

    way_heading: ClassVar[str]
    wanted: Wanted
    offers: tuple[AnyOffer, ...]
    refused: tuple[tuple[AnyOffer, str], ...]
    """Offers that take too long or cost too much, and why."""
    without: tuple[tuple[str, str], ...]
    """Names of clusters on which nothing can run, and why."""

    @property
    def best(self) -> AnyOffer:
        """The offer that is taken."""
        return self.offers[0]

    @abstractmethod
    def title(self) -> str:
        """The job and what it should be best at."""

    @abstractmethod
    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yields what follows the offer that is taken: headings and lines."""

    def text(self) -> str:
        """The table, the offer that is taken with the parts of its time, and the sections."""
        best = self.best
        heading = ("", "cluster", "devices", "free", "whole job", best.work, "cost", self.way_heading)
        rows = [heading, *((str(number), *offer.row()) for number, offer in enumerate(self.offers, start=1))]
        rows += [("–", *offer.row()) for offer, _ in self.refused]
        text = [wrapped(self.title(), indent=0, hanging=2), "", text_table(rows, left=(1, 2, 3, 7), indent=2)]
        parts = " + ".join(f"{name} {format_seconds(s)}" for name, s in best.parts.items() if s >= 0.5)
        taken = [f"{best.place}: {parts} = {format_seconds(best.seconds)}", *best.details]
        for title, lines in (("Taken", taken), *self.sections()):
            if lines:
                text += ["", title, *(wrapped(line, hanging=2) for line in lines)]
        return "\n".join(text)

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "objective": self.wanted.objective,
            "offers": [{**self.offer_data(offer), "refused": ""} for offer in self.offers],
            "refused": [{**self.offer_data(offer), "refused": why} for offer, why in self.refused],
            "without": dict(self.without),
        }

    def offer_data(self, offer: AnyOffer) -> dict[str, Any]:
        """An offer beside the others."""
        return offer.data()


def in_order(
    found: Sequence[AnyOffer],
    wanted: Wanted,
    *,
    preference: Callable[[AnyOffer], int] = lambda offer: 0,
    less_work: str = "fewer epochs",
) -> tuple[tuple[AnyOffer, ...], tuple[tuple[AnyOffer, str], ...]]:
    """The offers that keep deadline and budget, the best first; the others, each with the reason.

    A lower ``preference`` comes before the objective. Raises NothingFits when no offer keeps them: it names the offer
    that comes nearest to each, and ``less_work`` as the last way out.
    """
    broken = [(offer, _too_late(offer, wanted), _too_dear(offer, wanted)) for offer in found]
    if kept := [offer for offer, late, dear in broken if not (late or dear)]:
        kept.sort(key=lambda offer: (preference(offer), *_order(offer, wanted.objective)))
        return tuple(kept), tuple((o, "; ".join(filter(None, why))) for o, *why in broken if any(why))
    in_time = [offer for offer, late, _ in broken if not late]
    in_budget = [offer for offer, _, dear in broken if not dear]
    lines = []
    if in_time and in_budget:
        cheapest, first = min(in_time, key=_by_cost), min(in_budget, key=_by_end)
        lines.append(f"the cheapest in time is {cheapest.place}: {_too_dear(cheapest, wanted)}")
        lines.append(f"the fastest within the budget is {first.place}: {_too_late(first, wanted)}")
    if not in_time:
        first = min(found, key=_by_end)
        cost = "" if first.cost is None else f", for {format_dollars(first.cost)}"
        lines.append(f"none is in time; the fastest is {first.place}: {_too_late(first, wanted)}{cost}")
    if not in_budget:
        cheapest = min(found, key=_by_cost)
        lines.append(
            f"none is within the budget; the cheapest is {cheapest.place}: {_too_dear(cheapest, wanted)}, for "
            f"{format_seconds(cheapest.seconds)}"
        )
    ways = ["a later --deadline"] if wanted.deadline_seconds else []
    ways += ["a larger --budget"] if wanted.budget else []
    hint = (
        ", ".join([*ways, f"or {less_work}"]) if ways else "wait: in the fleet file, or --objective fastest"
    )
    raise NothingFits("\n  ".join(["no cluster keeps what is wanted:", *lines]), hint=hint)


def _by_cost(offer: Offer) -> tuple[float, float]:
    return inf if offer.cost is None else offer.cost, offer.seconds


def _by_end(offer: Offer) -> tuple[float, float]:
    """Sort key: offers by their end in seconds, those without a known end last, the shortest of them first."""
    return inf if offer.end_seconds is None else offer.end_seconds, offer.seconds


def _order(offer: Offer, objective: Objective) -> tuple[float, float]:
    """Sort key: the best offer for the objective first."""
    cost, seconds = _by_cost(offer)
    orders = {"fastest": (seconds, cost), "cheapest": (cost, seconds), "soonest": (_by_end(offer)[0], cost)}
    return orders[objective]


def _too_late(offer: Offer, wanted: Wanted) -> str:
    """Reason why the offer breaks the deadline; empty when it keeps it."""
    end, deadline = offer.end_seconds, wanted.deadline_seconds
    if end is None and (wanted.objective == "soonest" or deadline is not None):
        free = f"{offer.cluster.free_nodes} of {offer.nodes} nodes are free"
        return f"{free}, and the fleet file does not say when the others are (wait)"
    if end is not None and deadline is not None and end > deadline:
        return f"ends in {format_seconds(end)}, after the deadline of {format_seconds(deadline)}"
    return ""


def _too_dear(offer: Offer, wanted: Wanted) -> str:
    """Reason why the offer breaks the budget; empty when it keeps it."""
    if wanted.budget is None or offer.cost is None or offer.cost <= wanted.budget:
        return ""
    return f"costs {format_dollars(offer.cost)}, more than {format_dollars(wanted.budget)}"


def nowhere(without: Sequence[tuple[str, str]], *, hint: str) -> NothingFits:
    """The error of a fleet on none of whose clusters anything fits; ``without`` has their names and reasons."""
    return NothingFits(
        "\n".join(["nothing fits on any cluster:", *(f"  {name}: {why}" for name, why in without)]), hint=hint
    )


def require_prices(fleet: Fleet, wanted: Wanted) -> None:
    """Raises RecipeError where a cluster has no price and costs are compared."""
    missing = [cluster.name for cluster in fleet.clusters if cluster.price is None]
    asks = "--budget" if wanted.budget is not None else ""
    asks = "--objective cheapest" if wanted.objective == "cheapest" else asks
    if missing and asks:
        raise RecipeError(
            f"{asks} compares costs, and {fleet.source} has no price of {', '.join(missing)}",
            hint="price: US dollars for an hour of one GPU, in each cluster",
        )
