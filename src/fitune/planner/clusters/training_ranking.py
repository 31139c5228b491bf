"""Clusters ranked for a training, in words: why not the others, time against cost, what is assumed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fitune.estimate.division import num_ranks
from fitune.planner.clusters.ranking import START_SECONDS, Offer, Ranking
from fitune.planner.explain import run_data
from fitune.planner.job import STORAGE_BANDWIDTH
from fitune.units import counted, format_count, format_dollars, format_seconds
from fitune.values.predictions import Priced, WholeRun
from fitune.values.words import describe_offload, describe_plan, method_name

TOKENS_PER_SECOND = 300_000.0
"""Tokenised by one core: 2,000,000 rows of 54 tokens in 343 s of a core (``bench/tokenise_rows.py``)."""
_SIMILAR = 0.05
"""Speeds and costs that differ by less are called the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOffer(Offer):
    """A plan of training on some nodes of a cluster."""

    priced: Priced
    run: WholeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRanking(Ranking[TrainingOffer]):
    """Clusters for the training of a recipe."""

    way_heading: ClassVar[str] = "plan"
    unused: tuple[str, ...] = ()
    """Keys of the recipe about a machine, in whose place each cluster has its own."""

    @property
    def best_of_each(self) -> tuple[TrainingOffer, ...]:
        """The first offer of every cluster that has one."""
        return tuple({offer.cluster.name: offer for offer in reversed(self.offers)}.values())[::-1]

    @property
    def all_offers(self) -> tuple[TrainingOffer, ...]:
        """Returns every offer: first those that keep the deadline and the budget, then those that do not."""
        return (*self.offers, *(offer for offer, _ in self.refused))

    @property
    def frontier(self) -> tuple[TrainingOffer, ...]:
        """Offers that no other one beats in both time and cost, the fastest first."""
        found: list[TrainingOffer] = []
        priced = [offer for offer in self.all_offers if offer.cost is not None]
        for offer in sorted(priced, key=lambda each: (each.seconds, each.cost or 0.0)):
            if not found or (offer.cost or 0.0) < (found[-1].cost or 0.0):
                found.append(offer)
        return tuple(found)

    def title(self) -> str:
        """The model, the rows, what it should be best at, and within which limits."""
        run, wanted = self.best.run, self.wanted
        epochs = f"{run.epochs:.3g}".rstrip(".") + f" epoch{'s' * (run.epochs != 1)}"
        words = [
            self.best.priced.plan.model.name,
            f"{counted(run.epoch.rows, 'row')}, {format_count(run.epoch.tokens)} tokens × {epochs}",
            f"{wanted.objective} first",
        ]
        if wanted.deadline_seconds is not None:
            words.append(f"within {format_seconds(wanted.deadline_seconds)}")
        if wanted.budget is not None:
            words.append(f"for at most {format_dollars(wanted.budget)}")
        return " · ".join(words)

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yields why each other cluster loses by its best offer, the frontier, what is assumed."""
        best = self.best
        others = [(offer, _against(offer, best)) for offer in self.best_of_each]
        lost: dict[str, str] = {best.cluster.name: ""}
        for offer, why in (*others, *self.refused):
            lost.setdefault(offer.cluster.name, f"{offer.place}: {why}")
        lines = [*filter(None, lost.values()), *(f"{name}: {why}" for name, why in self.without)]
        yield "Why not the others", lines
        points = [
            f"{each.place}: {format_seconds(each.seconds)} for {each.cost_words}" for each in self.frontier
        ]
        said = f"nothing is both faster and cheaper than these, from fast to cheap: {'; '.join(points)}"
        yield "Time against cost", [said] if points else []
        yield "Assumed", list(self._assumed())

    def _assumed(self) -> Iterator[str]:
        """Yields what was assumed because the fleet file does not say it."""
        clusters = {offer.cluster.name: offer.cluster for offer in self.all_offers}.values()
        starts = [
            f"{one.name} {format_seconds(START_SECONDS[one.kind])}" for one in clusters if one.start is None
        ]
        missing = {
            "start (from a free node to the first line of fitune)": starts,
            f"storage (a node to the shared file system) {STORAGE_BANDWIDTH / 1e6:g} MB/s": [
                one.name for one in clusters if one.storage is None
            ],
            "all nodes are free": [one.name for one in clusters if one.free is None],
            "host_memory twice the node's device memory": [
                one.name for one in clusters if one.host_memory is None
            ],
            "node_network 100 Gbit/s": [
                one.name for one in clusters if one.node_network is None and one.most_nodes > 1
            ],
        }
        yield from (f"{what}: {', '.join(named)}" for what, named in missing.items() if named)
        if self.unused:
            yield f"not the recipe's {', '.join(self.unused)}: each cluster has its own"
        yield f"tokenising {TOKENS_PER_SECOND:,.0f} tokens/s, once, by one core"
        if any(offer.run.epoch.guess for offer in self.all_offers):
            yield f"the tokens of an epoch: guessed {self.best.run.epoch.guess}"

    def offer_data(self, offer: TrainingOffer) -> dict[str, Any]:
        """An offer with its plan and run, and whether it is on the frontier."""
        estimate = offer.priced.estimate
        return {
            **offer.data(),
            "is_on_frontier": offer in self.frontier,
            "tokens_per_second": estimate.tokens_per_second,
            "peak_bytes": estimate.peak_bytes,
            "usable_bytes": estimate.usable_bytes,
            "run": run_data(offer.run),
            "plan": describe_plan(offer.priced.plan),
        }


def _against(offer: TrainingOffer, best: TrainingOffer) -> str:
    """Reason why ``offer`` loses to the best one, in words: its time and cost as factors, and where they come from."""
    plan, taken = offer.priced.plan, best.priced.plan
    words = []
    if method_name(plan.tuning) != method_name(taken.tuning):
        words.append(
            f"{method_name(plan.tuning)} is what to train there, and {method_name(taken.tuning)} comes before it"
        )
    whole = _times(offer.seconds, best.seconds)
    training = _times(offer.parts["training"], best.parts["training"])
    words.append(f"the whole job takes {whole} as long, its training {training}: {_speed(offer, best)}")
    if offer.cost is not None and best.cost is not None:
        words.append(f"costs {_times(offer.cost, best.cost)} as much")
    if not offer.is_free:
        wait = offer.wait_seconds
        others = "" if wait is None else f", the others in {format_seconds(wait)}"
        words.append(f"{offer.cluster.free_nodes} of {offer.nodes} nodes are free{others}")
    return "; ".join(words)


def _times(one: float, other: float) -> str:
    share = one / other
    return "about" if abs(share - 1) < _SIMILAR else f"{share:,.3g} ×"


def _speed(offer: TrainingOffer, best: TrainingOffer) -> str:
    """``8 devices instead of 16, each with 46 % of the speed (no bf16; parameters on the CPU)``."""
    plan, taken = offer.priced.plan, best.priced.plan
    each, of_best = (
        one.priced.estimate.tokens_per_second / num_ranks(one.priced.plan) for one in (offer, best)
    )
    count, of_taken, blocks = num_ranks(plan), num_ranks(taken), plan.recompute.blocks
    devices = f"{count} device{'s' * (count > 1)}{f' instead of {of_taken}' * (count != of_taken)}"
    share = each / of_best
    why = [
        describe_offload(plan.offload) * (plan.offload.places != taken.offload.places),
        "no bf16" * (taken.hardware.gpu.has_bf16 and not plan.hardware.gpu.has_bf16),
        f"{blocks} of {plan.model.num_layers} blocks recomputed" * (blocks > taken.recompute.blocks),
    ]
    said = "; ".join(filter(None, why))
    speed = f"each with {share * 100:.0f} % of the tokens/s"
    speed = "about as fast each" if abs(share - 1) < _SIMILAR else speed
    return f"{devices}, {speed}{f' ({said})' * bool(said)}"
