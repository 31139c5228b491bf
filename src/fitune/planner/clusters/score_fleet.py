"""The best cluster for a scoring: every cluster of a fleet, ranked by the time and the cost of the whole job."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fitune.errors import FituneError, NothingFits
from fitune.planner.answering import AnsweringReport, name_of
from fitune.planner.answering_words import rows_line
from fitune.planner.clusters.fleet import hardware_of, node_counts
from fitune.planner.clusters.fleet_words import aligned, cost_words, free_words, stay_data
from fitune.planner.clusters.job import STORAGE_BANDWIDTH
from fitune.planner.clusters.whole_job import START_SECONDS, Stay
from fitune.planner.clusters.wishes import Wanted, kept_and_refused, nowhere, require_prices, where
from fitune.spec.answering import Questions
from fitune.spec.counts import count_parameters
from fitune.spec.machines.hardware import Hardware
from fitune.spec.recipe.fleet import Cluster, Fleet
from fitune.spec.words import describe_devices
from fitune.units import format_bytes, format_rate, format_seconds, wrapped

PlanOn = Callable[[Hardware, Questions], AnsweringReport]
"""The fastest way to answer those questions on one node. Raises NothingFits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOffer(Stay):
    """A scoring on some nodes of a cluster: so many engines answer a share of the rows each."""

    report: AnsweringReport
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRanking:
    """The offers that keep what is wanted, the best first; why the others do not; clusters on which nothing runs."""

    questions: Questions
    wanted: Wanted
    offers: tuple[ScoreOffer, ...]
    refused: tuple[tuple[ScoreOffer, str], ...]
    without: tuple[tuple[str, str], ...]


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
    kept, refused = kept_and_refused(found, wanted)
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
        without.append((cluster.name, _on_one_line(error.message)))
        return
    for nodes in node_counts(cluster.nodes):
        options = [(whole, 1)] if nodes == 1 else []
        engines = nodes * cluster.gpus
        share = -(-questions.rows // engines)
        part = replace(questions, rows=share, prompt_tokens=round(questions.mean_prompt * share))
        with suppress(NothingFits):  # no device holds the model alone
            options.append((plan_on(replace(node, gpus_per_node=1), part), engines))
        if options:
            report, count = min(options, key=lambda each: each[0].chosen.time.seconds)
            yield ScoreOffer(
                cluster=cluster, nodes=nodes, parts=_parts(cluster, report), report=report, engines=count
            )


def _on_one_line(message: str) -> str:
    first, *others = (line.strip() for line in message.splitlines())
    return " ".join([first, "; ".join(others)]).strip()


def _parts(cluster: Cluster, report: AnsweringReport) -> dict[str, float]:
    """Seconds: ``start``, ``weights`` 2 · P / storage, and the engine's own."""
    parameters = count_parameters(report.chosen.answering.model).total
    return {
        "start": float(cluster.start or START_SECONDS[cluster.kind]),
        "weights": 2 * parameters / (cluster.storage or STORAGE_BANDWIDTH),
        "scoring": report.chosen.time.seconds,
    }


def explain_score_ranking(ranking: ScoreRanking) -> str:
    """The table, the winner with the parts of its time, clusters without an offer, what is assumed."""
    best, questions = ranking.offers[0], ranking.questions
    model = best.report.chosen.answering.model.name
    rows: list[tuple[str, ...]] = [
        ("", "cluster", "devices", "free", "whole job", "scoring", "cost", "engines")
    ]
    rows += [(str(number), *_row(offer)) for number, offer in enumerate(ranking.offers, start=1)]
    rows += [("–", *_row(offer)) for offer, _ in ranking.refused]
    chosen = best.report.chosen
    parts = " + ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in best.parts.items() if seconds >= 0.5
    )
    taken = [
        f"{where(best)}: {parts} = {format_seconds(best.seconds)}",
        f"{_engines(best)}, {chosen.answering.precision.value}, {chosen.time.rows_at_once:,} rows at once each",
        f"{format_bytes(chosen.memory.peak_bytes)} of {format_bytes(chosen.memory.usable_bytes)} a device, writes "
        f"{format_rate(chosen.time.writing_rate * best.engines)} ({chosen.answering.hardware.rates})",
        f"run there with: {_options(best)}",
    ]
    title = f"{model} · {rows_line(questions)} · {ranking.wanted.objective} first"
    sections = ["\n".join([wrapped(title, indent=0, hanging=2), "", *aligned(rows)])]
    lost = [f"{where(offer)}: {why}" for offer, why in ranking.refused]
    lost += [f"{name}: {why}" for name, why in ranking.without]
    assumed = [
        f"start {', '.join(sorted({f'{kind} {format_seconds(seconds)}' for kind, seconds in START_SECONDS.items()}))} "
        f"and storage {STORAGE_BANDWIDTH / 1e6:g} MB/s where the fleet file does not say",
        "every answer is as long as --max-new-tokens: time and cost are upper bounds",
    ]
    for heading, lines in (("Taken", taken), ("Why not the others", lost), ("Assumed", assumed)):
        if lines:
            sections.append("\n".join([heading, *(wrapped(line, hanging=2) for line in lines)]))
    return "\n\n".join(sections)


def _row(offer: ScoreOffer) -> tuple[str, ...]:
    hardware = hardware_of(offer.cluster, offer.nodes)
    return (
        offer.cluster.name, describe_devices(hardware), free_words(offer), format_seconds(offer.seconds),
        format_seconds(offer.parts["scoring"]), cost_words(offer), _engines(offer),
    )  # fmt: skip


def _engines(offer: ScoreOffer) -> str:
    """``16 × vllm by Ray``."""
    name = name_of(offer.report.chosen.answering)
    return name if offer.engines == 1 else f"{offer.engines} × {name} by Ray"


def _options(offer: ScoreOffer) -> str:
    """``--engine vllm --on ray --workers 4``: the options that run what was ranked."""
    engine = f"--engine {offer.report.chosen.answering.engine}"
    return engine if offer.engines == 1 else f"{engine} --on ray --workers {offer.engines}"


def score_ranking_data(ranking: ScoreRanking) -> dict[str, Any]:
    """The object that ``--json`` prints."""

    def data(offer: ScoreOffer, why: str = "") -> dict[str, Any]:
        return {
            **stay_data(offer),
            "engines": offer.engines,
            "engine": offer.report.chosen.answering.engine,
            "devices": offer.report.chosen.answering.devices,
            "refused": why,
        }

    return {
        "objective": ranking.wanted.objective,
        "offers": [data(offer) for offer in ranking.offers],
        "refused": [data(offer, why) for offer, why in ranking.refused],
        "without": dict(ranking.without),
    }
