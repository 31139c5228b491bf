"""The time of a whole job: what comes before, between and after the steps of its run. Seconds and US dollars."""

from collections.abc import Mapping
from dataclasses import dataclass

from fitune.estimate.overhead import checkpoint_copy_bytes
from fitune.estimate.parameters import trained_parameters
from fitune.planner.clusters.job import STORAGE_BANDWIDTH
from fitune.spec.counts import count_parameters
from fitune.spec.plan import Plan
from fitune.spec.predictions import Priced, WholeRun
from fitune.spec.recipe.fleet import Cluster

START_SECONDS = {"kuberay": 180, "kubernetes": 90, "slurm": 60}
"""From a free node to the first line of fitune, where nobody says: our assumption."""
TOKENS_PER_SECOND = 300_000.0
"""Tokenised by one core: 2,000,000 rows of 54 tokens in 343 s of a core (``bench/tokenise_rows.py``)."""


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
    return {
        "start": float(cluster.start or START_SECONDS[cluster.kind]),
        "weights": 2 * parameters / storage,
        "tokenising": run.epoch.tokens / TOKENS_PER_SECOND,
        "training": run.seconds,
        "checkpoints": _checkpoint_seconds(priced, run, storage),
        "export": 2 * exported / storage,
    }


def _checkpoint_seconds(priced: Priced, run: WholeRun, storage: float) -> float:
    plan, size = priced.plan, priced.estimate.checkpoint_bytes
    count = number_of_saves(plan, run)
    if not count:
        return 0.0
    writing = size / storage
    if not plan.run.async_save:
        return count * writing
    copying = checkpoint_copy_bytes(plan) / plan.hardware.gpu.host_bandwidth
    return count * copying + writing


def number_of_saves(plan: Plan, run: WholeRun) -> int:
    """Checkpoints of the whole run: every ``save_every`` steps or so many an epoch, and the last step's."""
    if plan.run.save_every:
        return -(-run.steps // plan.run.save_every)
    return max(1, round(plan.run.saves_per_epoch * run.epochs)) if plan.run.saves_per_epoch else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A job on some nodes of a cluster: how long all of it takes there, and what it costs."""

    cluster: Cluster
    nodes: int
    parts: Mapping[str, float]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Stay):
    """A plan of training on some nodes of a cluster."""

    priced: Priced
    run: WholeRun


def offer_of(cluster: Cluster, priced: Priced, run: WholeRun) -> Offer:
    return Offer(
        cluster=cluster, nodes=priced.plan.hardware.nodes, priced=priced, run=run,
        parts=job_seconds(priced, run, cluster),
    )  # fmt: skip
