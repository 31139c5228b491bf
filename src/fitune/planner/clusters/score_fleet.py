"""The best cluster for a scoring: every cluster of a fleet, ranked by the time and the cost of the whole job."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fitune.errors import FituneError, NothingFits
from fitune.planner.answering import AnsweringReport, name_of, rows_line
from fitune.planner.clusters.fleet import hardware_of, node_counts
from fitune.planner.clusters.ranking import (
    START_SECONDS,
    Offer,
    Ranking,
    Wanted,
    in_order,
    nowhere,
    require_prices,
)
from fitune.planner.job import STORAGE_BANDWIDTH
from fitune.recipe.fleet import Cluster, Fleet
from fitune.units import format_bytes, format_rate, format_seconds
from fitune.values.answering import Questions
from fitune.values.counts import count_parameters
from fitune.values.machines.hardware import Hardware
from fitune.values.words import describe_devices

PlanOn = Callable[[Hardware, Questions], AnsweringReport]
"""The fastest way to answer those questions on one node. Raises NothingFits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOffer(Offer):
    """A scoring on some nodes of a cluster: so many engines answer a share of the rows each."""

    work: ClassVar[str] = "scoring"
    report: AnsweringReport
    engines: int

    def data(self) -> dict[str, Any]:
        """Place, time, cost and engines, as ``--json`` prints them."""
        answering = self.report.chosen.answering
        engines = {"engines": self.engines, "engine": answering.engine, "devices": answering.devices}
        return Offer.data(self) | engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRanking(Ranking[ScoreOffer]):
    """Clusters for a scoring."""

    way_heading: ClassVar[str] = "engines"
    questions: Questions

    def title(self) -> str:
        """The model, the rows, what it should be best at."""
        model = self.best.report.chosen.answering.model.name
        return f"{model} · {rows_line(self.questions)} · {self.wanted.objective} first"

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yields clusters without an offer, what is assumed."""
        lost = [f"{offer.place}: {why}" for offer, why in self.refused]
        yield "Why not the others", lost + [f"{name}: {why}" for name, why in self.without]
        starts = sorted(f"{kind} {format_seconds(seconds)}" for kind, seconds in START_SECONDS.items())
        storage = f"storage {STORAGE_BANDWIDTH / 1e6:g} MB/s"
        assumed = [
            f"start {', '.join(starts)} and {storage} where the fleet file does not say",
            "every answer is as long as --max-new-tokens: time and cost are upper bounds",
        ]
        yield "Assumed", assumed


def rank_scoring(fleet: Fleet, wanted: Wanted, questions: Questions, plan_on: PlanOn) -> ScoreRanking:
    """Plans on each cluster over each number of nodes. Raises NothingFits where none is left, RecipeError for prices
    that are missing."""
    require_prices(fleet, wanted)
    found: list[ScoreOffer] = []
    without: list[tuple[str, str]] = []
    for cluster in fleet.clusters:
        found += _offers_of(cluster, questions, plan_on, without)
    if not found:
        raise nowhere(without, hint="a smaller --max-new-tokens or --batch-size")
    kept, refused = in_order(found, wanted, less_work="a smaller --max-new-tokens")
    return ScoreRanking(
        questions=questions, wanted=wanted, offers=kept, refused=refused, without=tuple(without)
    )


def _offers_of(
    cluster: Cluster, questions: Questions, plan_on: PlanOn, without: list[tuple[str, str]]
) -> Iterator[ScoreOffer]:
    """One for each number of nodes: an engine on each device, by Ray; on one node also one engine over several."""
    node = hardware_of(cluster, 1)
    try:
        whole = plan_on(node, questions)
    except FituneError as error:
        first, *others = (line.strip() for line in error.message.splitlines())
        without.append((cluster.name, f"{first} {'; '.join(others)}".strip()))
        return
    for nodes in node_counts(cluster.most_nodes):
        options = [(whole, 1)] if nodes == 1 else []
        engines = nodes * cluster.gpus
        share = -(-questions.rows // engines)
        part = replace(questions, rows=share, prompt_tokens=round(questions.mean_prompt * share))
        with suppress(NothingFits):  # no device holds the model alone
            options.append((plan_on(replace(node, gpus_per_node=1), part), engines))
        if options:
            report, count = min(options, key=lambda each: each[0].chosen.time.seconds)
            yield _offer(cluster, nodes, report, count)


def _offer(cluster: Cluster, nodes: int, report: AnsweringReport, engines: int) -> ScoreOffer:
    """The offer: weights take 2 · P / storage; its words say how many engines, and the options that run them."""
    answering, memory, time = report.chosen.answering, report.chosen.memory, report.chosen.time
    name, workers = name_of(answering), ""
    if engines > 1:
        name, workers = f"{engines} × {name} by Ray", f" --on ray --workers {engines}"
    if nodes > 1:
        workers += f", in a Ray cluster of these {nodes} nodes, which has to run already"
    return ScoreOffer(
        cluster=cluster, nodes=nodes, report=report, engines=engines, way=name,
        devices=describe_devices(hardware_of(cluster, nodes)),
        parts={
            "start": float(cluster.start or START_SECONDS[cluster.kind]),
            "weights": 2 * count_parameters(answering.model).total / (cluster.storage or STORAGE_BANDWIDTH),
            "scoring": time.seconds,
        },
        details=(
            f"{name}, {answering.precision.value}, {time.rows_at_once:,} rows at once each",
            f"{format_bytes(memory.peak_bytes)} of {format_bytes(memory.usable_bytes)} a device, writes "
            f"{format_rate(time.writing_rate * engines)} ({answering.hardware.rates})",
            f"run there with: --engine {answering.engine}{workers}",
        ),
    )  # fmt: skip
