"""A fleet file: the clusters that a job may go to, each with its nodes, its price and how a job gets in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from fitune.errors import FituneError, RecipeError, did_you_mean
from fitune.recipe.job import (
    Duration,
    JobSettings,
    LabelValue,
    System,
    checked,
    one_line,
    require_meaningful,
)
from fitune.recipe.strict_yaml import load_yaml, parse_mapping
from fitune.recipe.types import (
    Bandwidth,
    CountInt,
    PositiveFloat,
    PositiveInt,
    Size,
    Strict,
    Text,
    as_name,
)
from fitune.values.machines.gpus import BY_FIGURES, find_gpu, most_gpus

Objective = Literal["fastest", "cheapest", "soonest"]
Source = Literal["nodes", "kueue", "slurm", "ray"]


class Cluster(Strict):
    """Nodes that are alike. What is not said is not held against a plan, or is assumed and said so."""

    name: Annotated[Text, AfterValidator(one_line)]
    gpu: Annotated[Text, BeforeValidator(as_name)]
    gpus: PositiveInt = 1
    """In each node."""
    nodes: CountInt = 1
    free: CountInt | None = None
    """Nodes that are free now; left out: all."""
    wait: Duration | None = None
    """Seconds until all nodes are free, for those that are not."""
    kind: System = "kuberay"
    price: PositiveFloat | None = None
    """US dollars for an hour of one GPU."""
    host_memory: Size | None = None
    """Bytes of a node."""
    disk: Size | None = None
    """Bytes of a node, for caches."""
    interconnect: Bandwidth | None = None
    node_network: Bandwidth | None = None
    storage: Bandwidth | None = None
    """Bytes/s of one node to the shared file system."""
    start: Duration | None = None
    """Seconds from a free node to the first line of fitune: pulling the image, starting Ray."""
    instance_type: LabelValue = ""
    live: Source | None = None
    """Who is asked for ``free`` with --live."""
    job: dict[str, Any] = {}

    @property
    def free_nodes(self) -> int:
        """Nodes free now, never more than it has; all of them where nobody said."""
        return self.nodes if self.free is None else min(self.free, self.nodes)

    @property
    def most_nodes(self) -> int:
        """Nodes that one job can have: a Job of Kubernetes is one pod."""
        return 1 if self.kind == "kubernetes" else self.nodes

    @property
    def settings(self) -> JobSettings:
        """The ``job:`` settings, with the instance type of the cluster where a pod can ask for one."""
        wanted = dict(self.job)
        if self.instance_type and self.kind != "slurm":
            wanted.setdefault("instance_type", self.instance_type)
        return checked(JobSettings, wanted, where=f"job of cluster {self.name}")


_EXAMPLES = {
    "name": "a word, another for each cluster", "gpu": "h100 (80GB lists cards of its size)",
    "gpus": "8 (in each node)", "nodes": "2", "free": "1 (nodes that are free now)", "wait": "2h",
    "kind": "kuberay, kubernetes or slurm",
    "price": "2.50 (US dollars for an hour of one GPU)", "host_memory": "1800GiB", "disk": "6TB",
    "interconnect": "450GB/s", "node_network": "50GB/s", "storage": "2GB/s", "start": "3m",
    "live": "nodes, kueue, slurm or ray", "job": "{queue: training}",
}  # fmt: skip
"""Key of a cluster -> an example of how it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All clusters of one file."""

    source: str
    clusters: tuple[Cluster, ...]


def read_fleet(path: Path) -> Fleet:
    """The clusters of a YAML file. Raises RecipeError naming the cluster, the key and what is wrong."""
    return _fleet(load_yaml(path, kind="fleet"), source=str(path))


def parse_fleet(text: str, *, source: str) -> Fleet:
    """The clusters of a file's text, as ``read_fleet`` reads them. Raises RecipeError, which names ``source``."""
    return _fleet(parse_mapping(text, where=source, kind="fleet"), source=source)


def _fleet(content: dict[str, Any], *, source: str) -> Fleet:
    for key in content.keys() - {"clusters"}:
        hint = did_you_mean(str(key), ["clusters"]) or "clusters: a list, one entry for each cluster"
        raise RecipeError(f"{source}: unknown key {key!r}", hint=hint)
    entries = content.get("clusters")
    if not isinstance(entries, list) or not entries:
        raise RecipeError(
            f"{source}: {'clusters is no list' if entries else 'no cluster is listed'}",
            hint="clusters: [{name: a, gpu: h100, gpus: 8, nodes: 2}]",
        )
    clusters = tuple(_cluster(entry, number, source) for number, entry in enumerate(entries, start=1))
    names = [cluster.name for cluster in clusters]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"{source}: two clusters are called {name!r}", hint="a name for each")
    return Fleet(source=source, clusters=clusters)


def _cluster(entry: Any, number: int, source: str) -> Cluster:
    if not isinstance(entry, dict):
        raise RecipeError(
            f"{source}: cluster {number} is {entry!r}", hint="name: …, gpu: …, gpus: …, nodes: …"
        )
    where = f"{source}: cluster {entry.get('name') or number}"
    cluster = checked(Cluster, entry, where=where, examples=_EXAMPLES)
    if cluster.nodes == 0:
        raise RecipeError(
            f"{where}: nodes is 0", hint="free: 0 where all of them are taken now, or leave the cluster out"
        )
    if cluster.free is not None and cluster.free > cluster.nodes:
        raise RecipeError(
            f"{where}: free = {cluster.free}, more than its nodes = {cluster.nodes}",
            hint=f"nodes: {cluster.free}, or free: {cluster.nodes}",
        )
    try:
        gpu = find_gpu(cluster.gpu)
        require_meaningful(cluster.settings, cluster.kind)
    except FituneError as error:
        hint = (error.hint or "").removesuffix(BY_FIGURES).removesuffix("; ")  # no options in a file
        for option, key in ((" --gpus ", ", gpus: "), ("--gpu ", "gpu: "), ("--on ", "kind: ")):
            hint = hint.replace(option, key)
        message = error.message.replace("--on ", "with kind: ")
        raise type(error)(f"{where}: {message}", hint=hint or None) from None
    if cluster.gpus > 1 and most_gpus(gpu.name) == 1:
        raise RecipeError(
            f"{where}: gpus = {cluster.gpus}, and a {gpu.name} is alone in its machine: it has the host's memory",
            hint=f"gpus: 1, nodes: {cluster.gpus * cluster.nodes}",
        )
    return cluster.model_copy(update={"gpu": gpu.name})
