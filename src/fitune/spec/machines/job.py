"""A job: what the processes of a plan ask of a cluster. A value that the launchers write down in their own words."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fitune.errors import RecipeError

System = Literal["kuberay", "kubernetes", "slurm"]

TESTED_RAY = "2.60.0"
"""The version of Ray that runs on a cluster are tested with."""
GPU_RESOURCE = "nvidia.com/gpu"
"""Kubernetes' name for the GPUs of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Resources that each of ``nodes`` gives to the job. One pod or task a node, one process a GPU."""

    gpu: str
    """Canonical name; ``cpu`` for the processor."""
    gpus: int
    nodes: int
    cpus: int
    memory_bytes: int
    """Host memory, ``shm_bytes`` included."""
    shm_bytes: int
    """/dev/shm."""
    disk_bytes: int
    """Disk of the node for caches; it is gone when the job is."""
    instance_type: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    constraint: str = ""
    """SLURM's words for features of a node."""
    extra_resources: Mapping[str, int] = field(default_factory=dict)
    """Other devices of a node, as Kubernetes names them: ``rdma/hca``."""

    @property
    def num_gpus(self) -> int:
        """Devices on all nodes."""
        return self.gpus * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The folder that every process of the job sees: data, caches of tokens, and the run."""

    mount: str
    claim: str = ""
    """A PersistentVolumeClaim, ReadWriteMany where there are several pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Kueue's local queue and priority class, or SLURM's partition, account and quality of service."""

    name: str = ""
    priority: str = ""
    account: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Retries and times of a job. Seconds; 0 is no limit."""

    retries: int
    grace_seconds: int
    """From the request to stop to the kill: longer than a step and a save."""
    deadline_seconds: int = 0
    """Seconds of the whole job, its retries included."""
    start_seconds: int = 0
    """To wait for its nodes."""
    keep_seconds: int = 3600
    """A finished job stays listed so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One plan on one cluster."""

    name: str
    compute: Compute
    storage: Storage
    queue: Queue
    limits: Limits
    cluster: str = ""
    """The name in the fleet file."""
    context: str = ""
    """kubectl's."""
    namespace: str = ""
    image: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    """Names of Secrets whose keys become environment variables. Their values are not known here."""
    service_account: str = ""
    ray_version: str = ""
    setup: tuple[str, ...] = ()
    """Lines of shell before the command, of SLURM: modules, a virtual environment."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Words for people, by name: what was planned and predicted."""


MOST_NAME = 47
"""Characters of a RayJob's name: KubeRay makes names of pods and services from it."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def job_name(output_dir: str, *, asked: str = "") -> str:
    """A DNS-1035 name of at most 47 characters, the same for the same run: a run that is there already cannot be
    started a second time under another name.

    Raises RecipeError where the name that was ``asked`` for is none.
    """
    if asked:
        if len(asked) <= MOST_NAME and _DNS_1035.fullmatch(asked):
            return asked
        raise RecipeError(
            f"job.name = {asked!r}: lower-case letters, digits and '-', a letter first, at most {MOST_NAME} characters",
            hint=f"job.name={_slug(asked)[:MOST_NAME].rstrip('-') or 'run'}",
        )
    mark = hashlib.sha256(output_dir.encode(errors="surrogatepass")).hexdigest()[:6]
    last = output_dir.rstrip("/").rsplit("/", 1)[-1]
    return f"{_slug(last)[: MOST_NAME - 7].rstrip('-') or 'run'}-{mark}"


def _slug(text: str) -> str:
    """``text`` in the letters of DNS-1035; empty where it has none of them."""
    slug = re.sub(r"-+", "-", re.sub(r"[^a-z0-9]", "-", text.lower())).strip("-")
    return f"run-{slug}" if slug and not slug[0].isalpha() else slug
