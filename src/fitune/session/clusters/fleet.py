"""A recipe is planned on every cluster of a fleet; the best of them that is free gets the job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from fitune.errors import HardwareError, RecipeError
from fitune.estimate.predict import usual_batch
from fitune.measure.hardware import calibrated
from fitune.planner.clusters.fleet import EpochOf, rank_fleet
from fitune.planner.clusters.ranking import Wanted
from fitune.planner.clusters.training_ranking import TrainingRanking
from fitune.recipe.fleet import Fleet, Objective, read_fleet
from fitune.recipe.job import System, read_job_settings
from fitune.recipe.recipe import Recipe
from fitune.session.clusters.launching import is_fetched, launch_file, render
from fitune.session.planning import sampled
from fitune.units import parse_seconds
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Plan
from fitune.values.predictions import Epoch


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The options of ``--fleet`` as they are typed."""

    file: Path
    objective: str = ""
    deadline: str = ""
    budget: float | None = None
    rows: int | None = None
    """Rows of an epoch, each of seq_len tokens, where the data is not on this machine."""
    live: bool = False
    """Ask the clusters which nodes are free."""


def plan_on_fleet(recipe: Recipe, request: FleetRequest) -> TrainingRanking:
    """The ranking of the fleet's clusters. Raises RecipeError, HardwareError or NothingFits."""
    fleet = fleet_of(request)
    for name in ("gpu_memory", "gpu_flops", "gpu_bandwidth", "nvme_path"):
        if getattr(recipe, name):
            why = f"{name} is of one machine, and {request.file} lists several"
            raise RecipeError(why, hint=f"leave {name} out")
    wanted = wanted_of(request, recipe.objective)
    recipe, epoch_of = _on_rows(recipe, request.rows)
    return rank_fleet(
        recipe, fleet, wanted, model=load_model_spec(recipe.model), epoch_of=epoch_of,
        fetches_model=is_fetched(recipe.model), known=calibrated,
    )  # fmt: skip


def fleet_of(request: FleetRequest) -> Fleet:
    """The clusters of the file, with the nodes that are free now where that is asked."""
    fleet = read_fleet(request.file)
    if not request.live:
        return fleet
    from fitune.session.clusters.live_fleet import with_free_nodes  # subprocesses: only for those who ask

    return with_free_nodes(fleet)


def wanted_of(request: FleetRequest, objective: str = "fastest") -> Wanted:
    """Deadline, budget and objective of the request; ``objective`` where none is typed. Raises RecipeError."""
    asked = request.objective or objective
    if asked not in ("fastest", "cheapest", "soonest"):
        raise RecipeError(f"--objective {asked} is not for clusters", hint="fastest, cheapest or soonest")
    seconds = None
    if request.deadline:
        try:
            seconds = parse_seconds(request.deadline)
        except ValueError as error:
            raise RecipeError(f"--deadline: {error}") from None
        if seconds <= 0:
            raise RecipeError(f"--deadline {request.deadline} is over already", hint="--deadline 12h")
    return Wanted(objective=cast(Objective, asked), deadline_seconds=seconds, budget=request.budget)


def launch_text(
    recipe: Recipe,
    request: FleetRequest | None,
    settings: Sequence[str],
    *,
    on: System | None,
    job_file: Path | None = None,
) -> tuple[str, str]:
    """The file that starts the recipe's plan ``on`` a system, or on the best cluster of a fleet whose nodes are free;
    and what is to be said: which cluster that is, a note on the data.

    Raises HardwareError when all clusters are full.
    """
    if request is None:
        assert on is not None
        job, text = launch_file(recipe, on, job_file=job_file, settings=settings)
        return text, job.notes.get("data", "")
    if on is not None:
        raise RecipeError(
            f"--on {on} contradicts --fleet, which takes the kind of the cluster that it chooses",
            hint="leave --on or --fleet out",
        )
    ranking = plan_on_fleet(recipe, request)
    free = next((offer for offer in ranking.offers if offer.is_free), None)
    if free is None:
        raise HardwareError(
            f"every cluster is full: {', '.join(offer.place for offer in ranking.best_of_each)}",
            hint="wait, or free: in the fleet file as it is now",
        )
    cluster = free.cluster
    said = cluster.settings.model_dump(exclude_unset=True)
    hardware = free.priced.plan.hardware
    taken = recipe.model_copy(
        update={
            "gpu": cluster.gpu, "gpus": hardware.gpus_per_node, "nodes": hardware.nodes, "objective": "fastest",
            "host_memory": hardware.host_memory_bytes,
            **({"interconnect": cluster.interconnect} if cluster.interconnect else {}),
            **({"node_network": cluster.node_network} if cluster.node_network and hardware.nodes > 1 else {}),
        }
    )  # fmt: skip
    job, text = render(
        taken, free.priced, read_job_settings(job_file, settings=settings, defaults=said),
        cluster.kind, storage_bandwidth=cluster.storage or 0.0,
    )  # fmt: skip
    full = [offer.place for offer in ranking.offers[: ranking.offers.index(free)]]
    place = free.place + (f" ({', '.join(full)}: full now)" if full else "")
    return text, "\n".join(filter(None, [place, job.notes.get("data")]))


def _on_rows(recipe: Recipe, rows: int | None) -> tuple[Recipe, EpochOf]:
    """The recipe with its average row, and an epoch for each plan: of the data that is here, else of ``rows``, else as
    max_steps says. Raises RecipeError where nothing says it."""
    recipe, sample = sampled(recipe) if rows is None else (recipe, None)
    if sample is not None:
        epoch = cache(sample.epoch)  # once for plans that differ in accumulation alone
        return recipe, lambda plan: epoch(replace(plan.batch, accumulation=1))
    if rows is None and recipe.max_steps is None:
        raise RecipeError(
            "the length of a run follows from its number of rows, and "
            + ("the data is not on this machine" if recipe.data else "no data is named"),
            hint="data: in the recipe, --rows N where it is not on this machine, or max_steps",
        )
    return recipe, lambda plan: full_rows(plan, rows)


def full_rows(plan: Plan, rows: int | None) -> Epoch:
    """``rows`` of seq_len tokens each, or of the average that the recipe names; without a number, those that the plan's
    steps take."""
    batch = plan.batch
    mean, named = batch.usual_row_tokens, "mean_row_tokens" if batch.mean_row_tokens else "seq_len"
    if rows is None:
        steps = getattr(plan.schedule.duration, "count", 1)
        units = round(steps * batch.global_batch_size * plan.hardware.num_gpus)
        rows = units * batch.seq_len // mean if batch.packing else units
    return Epoch(
        rows=rows, tokens=rows * mean, longest_row=batch.seq_len,
        units=-(-rows * mean // batch.seq_len) if batch.packing else rows,
        usual=usual_batch(plan), guess=f"as {mean:,} tokens ({named}) in each row",
    )  # fmt: skip


def draw_ranking(ranking: TrainingRanking, path: Path) -> None:
    """Write time against cost as SVG. Raises RecipeError for another ending or without prices."""
    priced = [offer for offer in ranking.all_offers if offer.cost is not None]
    if not priced:
        raise RecipeError(
            "--picture draws time against cost, and no cluster has a price", hint="price: in the fleet file"
        )
    from fitune.report.comparison_plots import OfferPoint, draw_frontier  # not for those who only plan

    draw_frontier(
        path,
        [
            OfferPoint(
                name=offer.place if offer.cluster.nodes > 1 else offer.cluster.name,
                seconds=offer.seconds, cost=offer.cost or 0.0,
                is_on_frontier=offer in ranking.frontier, is_taken=offer is ranking.best,
            )
            for offer in priced
        ],
        title=f"{ranking.best.priced.plan.model.name}: where it trains, {ranking.wanted.objective} first",
    )  # fmt: skip
