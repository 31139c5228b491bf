"""A ranking of clusters as text for people and as data for programs."""

from collections.abc import Iterator, Sequence
from typing import Any

from fitune.estimate.division import num_ranks
from fitune.planner.clusters.fleet import Ranking
from fitune.planner.clusters.job import STORAGE_BANDWIDTH
from fitune.planner.clusters.whole_job import START_SECONDS, TOKENS_PER_SECOND, Offer, Stay
from fitune.planner.clusters.wishes import where
from fitune.spec.plan import Plan
from fitune.spec.words import (
    describe_devices,
    describe_offload,
    describe_plan,
    describe_sharding,
    method_name,
)
from fitune.units import format_bytes, format_count, format_dollars, format_rate, format_seconds, wrapped

_SIMILAR = 0.05
"""Speeds and costs that differ by less are called the same."""


def explain_ranking(ranking: Ranking) -> str:
    """The table, the winner with the parts of its time, why each other cluster loses, the frontier, what is assumed."""
    sections = [
        "\n".join([wrapped(_title(ranking), indent=0, hanging=2), "", *_table(ranking)]),
        "\n".join(["Taken", *(wrapped(line, hanging=2) for line in _winner(ranking.best))]),
    ]
    lost = [*_losers(ranking), *(f"{name}: {why}" for name, why in ranking.without)]
    if lost:
        sections.append("\n".join(["Why not the others", *(wrapped(line, hanging=2) for line in lost)]))
    if ranking.frontier:
        points = "; ".join(f"{where(each)}: {_time_and_cost(each)}" for each in ranking.frontier)
        line = f"nothing is both faster and cheaper than these, from fast to cheap: {points}"
        sections.append("\n".join(["Time against cost", wrapped(line, hanging=2)]))
    if assumed := list(_assumed(ranking)):
        sections.append("\n".join(["Assumed", *(wrapped(line, hanging=2) for line in assumed)]))
    return "\n\n".join(sections)


def _title(ranking: Ranking) -> str:
    run, plan, wanted = ranking.best.run, ranking.best.priced.plan, ranking.wanted
    epochs = f"{run.epochs:.3g}".rstrip(".")
    words = [
        plan.model.name,
        f"{run.epoch.rows:,} rows, {format_count(run.epoch.tokens)} tokens × {epochs} epoch{'s' * (run.epochs != 1)}",
        f"{wanted.objective} first",
    ]
    if wanted.deadline_seconds is not None:
        words.append(f"within {format_seconds(wanted.deadline_seconds)}")
    if wanted.budget is not None:
        words.append(f"for at most {format_dollars(wanted.budget)}")
    return " · ".join(words)


def _table(ranking: Ranking) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "cluster", "devices", "free", "whole job", "training", "cost", "plan")
    ]
    for number, offer in enumerate(ranking.offers, start=1):
        rows.append((str(number), *_row(offer)))
    rows += [("–", *_row(offer)) for offer, _ in ranking.refused]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a ranking as lines: number, times and cost to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    right = {0, 4, 5, 6}
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.rjust(width) if column in right else text.ljust(width)


def _row(offer: Offer) -> tuple[str, ...]:
    return (
        offer.cluster.name, describe_devices(offer.priced.plan.hardware), free_words(offer),
        format_seconds(offer.seconds), format_seconds(offer.parts["training"]), cost_words(offer),
        _short(offer.priced.plan),
    )  # fmt: skip


def free_words(offer: Stay) -> str:
    """The time at which its nodes are free: ``now``, ``in 2 h 0 min``, ``full``."""
    if offer.is_free:
        return "now"
    return "full" if offer.wait_seconds is None else f"in {format_seconds(offer.wait_seconds)}"


def cost_words(offer: Stay) -> str:
    return "–" if offer.cost is None else format_dollars(offer.cost)


def _short(plan: Plan) -> str:
    """``lora fp16, ZeRO-3 by FSDP2, parameters on the CPU``."""
    words = [
        f"{method_name(plan.tuning)} {plan.precision.value}",
        describe_sharding(plan.sharding),
        describe_offload(plan.offload),
    ]
    return ", ".join(word for word in words if word)


def _winner(offer: Offer) -> Iterator[str]:
    estimate = offer.priced.estimate
    parts = " + ".join(
        f"{name} {format_seconds(seconds)}" for name, seconds in offer.parts.items() if seconds >= 0.5
    )
    yield f"{where(offer)}: {parts} = {format_seconds(offer.seconds)}"
    yield describe_plan(offer.priced.plan)
    yield (
        f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)} a device, "
        f"{format_rate(estimate.tokens_per_second)} ({offer.priced.plan.hardware.rates})"
    )


def _losers(ranking: Ranking) -> Iterator[str]:
    """The best offer of every other cluster, and of a cluster that has only refused ones."""
    told = {ranking.best.cluster.name}
    for offer in ranking.best_of_each:
        if offer.cluster.name not in told:
            told.add(offer.cluster.name)
            yield f"{where(offer)}: {_against(offer, ranking.best)}"
    for offer, why in ranking.refused:
        if offer.cluster.name not in told:
            told.add(offer.cluster.name)
            yield f"{where(offer)}: {why}"


def _against(offer: Offer, best: Offer) -> str:
    """Reason why ``offer`` loses to the best one, in words: its time and cost as factors, and where they come from."""
    plan, taken = offer.priced.plan, best.priced.plan
    words = []
    if method_name(plan.tuning) != method_name(taken.tuning):
        words.append(
            f"{method_name(plan.tuning)} is what to train there, and {method_name(taken.tuning)} comes before it"
        )
    whole, training = (
        _times(offer.seconds, best.seconds),
        _times(offer.parts["training"], best.parts["training"]),
    )
    words.append(f"the whole job takes {whole} as long, its training {training}: {_speed(offer, best)}")
    if offer.cost is not None and best.cost is not None:
        words.append(f"costs {_times(offer.cost, best.cost)} as much")
    if not offer.is_free:
        free = offer.cluster.free_nodes
        words.append(
            f"{free} of {offer.nodes} nodes are free"
            + ("" if offer.wait_seconds is None else f", the others in {format_seconds(offer.wait_seconds)}")
        )
    return "; ".join(words)


def _times(one: float, other: float) -> str:
    share = one / other
    return "about" if abs(share - 1) < _SIMILAR else f"{share:,.3g} ×"


def _speed(offer: Offer, best: Offer) -> str:
    """``8 devices instead of 16, each with 46 % of the speed (no bf16; parameters on the CPU)``."""
    plan, taken = offer.priced.plan, best.priced.plan
    each, of_best = (
        one.priced.estimate.tokens_per_second / num_ranks(one.priced.plan) for one in (offer, best)
    )
    count, of_taken = num_ranks(plan), num_ranks(taken)
    devices = f"{count} device{'s' * (count > 1)}" + (f" instead of {of_taken}" if count != of_taken else "")
    share = each / of_best
    why = [describe_offload(plan.offload)] if plan.offload.places != taken.offload.places else []
    why += ["no bf16"] if taken.hardware.gpu.has_bf16 and not plan.hardware.gpu.has_bf16 else []
    shared = plan.recompute.blocks - taken.recompute.blocks
    why += [f"{plan.recompute.blocks} of {plan.model.num_layers} blocks recomputed"] if shared > 0 else []
    why = [word for word in why if word]
    speed = (
        "about as fast each"
        if abs(share - 1) < _SIMILAR
        else f"each with {share * 100:.0f} % of the tokens/s"
    )
    return f"{devices}, {speed}" + (f" ({'; '.join(why)})" if why else "")


def _time_and_cost(offer: Offer) -> str:
    return f"{format_seconds(offer.seconds)} for {cost_words(offer)}"


def _assumed(ranking: Ranking) -> Iterator[str]:
    """Lines that name what was assumed because the fleet file does not say it."""
    clusters = {offer.cluster.name: offer.cluster for offer in ranking.all_offers}.values()
    missing: list[tuple[str, list[str]]] = [
        (
            "start (from a free node to the first line of fitune)",
            [
                f"{one.name} {format_seconds(START_SECONDS[one.kind])}"
                for one in clusters
                if one.start is None
            ],
        ),
        (
            f"storage (a node to the shared file system) {STORAGE_BANDWIDTH / 1e6:g} MB/s",
            [one.name for one in clusters if one.storage is None],
        ),
        ("all nodes are free", [one.name for one in clusters if one.free is None]),
        (
            "host_memory twice the node's device memory",
            [one.name for one in clusters if one.host_memory is None],
        ),
        (
            "node_network 100 Gbit/s",
            [one.name for one in clusters if one.node_network is None and one.nodes > 1],
        ),
    ]
    for name, named in missing:
        if named:
            yield f"{name}: {', '.join(named)}"
    yield f"tokenising {TOKENS_PER_SECOND:,.0f} tokens/s, once, by one core"
    if any(offer.run.epoch.guess for offer in ranking.all_offers):
        yield f"the tokens of an epoch: guessed {ranking.best.run.epoch.guess}"


def ranking_data(ranking: Ranking) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    frontier = {(offer.cluster.name, offer.nodes) for offer in ranking.frontier}

    def data(offer: Offer, why: str = "") -> dict[str, Any]:
        return {
            **stay_data(offer),
            "is_on_frontier": (offer.cluster.name, offer.nodes) in frontier,
            "tokens_per_second": offer.priced.estimate.tokens_per_second,
            "peak_bytes": offer.priced.estimate.peak_bytes,
            "plan": describe_plan(offer.priced.plan),
            "refused": why,
        }

    return {
        "objective": ranking.wanted.objective,
        "offers": [data(offer) for offer in ranking.offers],
        "refused": [data(offer, why) for offer, why in ranking.refused],
        "without": dict(ranking.without),
    }


def stay_data(stay: Stay) -> dict[str, Any]:
    """Place, time and cost of a job on some nodes, as ``--json`` prints them."""
    return {
        "cluster": stay.cluster.name, "nodes": stay.nodes, "gpus_per_node": stay.cluster.gpus,
        "gpu": stay.cluster.gpu, "seconds": stay.seconds, "parts": dict(stay.parts), "cost": stay.cost,
        "wait_seconds": stay.wait_seconds, "is_free": stay.is_free,
    }  # fmt: skip
