"""A plan's job as a RayJob of the KubeRay operator: a Ray cluster that lives as long as the job."""

import re
import shlex

from fitune.errors import RecipeError
from fitune.launch.pods import RECIPE, Manifest, metadata, pod_spec, queue_labels, recipe_map, require_pods
from fitune.spec.machines.job import TESTED_RAY, JobSpec
from fitune.units import GIB

_HEAD_CPUS = 2
_HEAD_MEMORY = 8 * GIB
"""Ray's control store and dashboard, and the driver, which plans and prepares the data."""
_SHM = 2 * GIB
_OBJECT_STORE = GIB
"""Ray would take 30 % of a pod's memory for objects, and training keeps next to none."""
_END_SECONDS = 15
"""Seconds of the grace period that Ray's own end takes."""
_TOKEN_SINCE = (2, 52)


def ray_job(job: JobSpec, recipe: str) -> list[Manifest]:
    """The recipe and the RayJob. Raises RecipeError for a job that KubeRay's controller would refuse.

    One worker pod a node holds all GPUs of the job there: Ray's workers are its processes, one a GPU. The head does
    no work.
    """
    require_pods(job)
    _require_token_support(job)
    compute, limits = job.compute, job.limits
    spec: Manifest = {
        "entrypoint": shlex.join(_entrypoint(job)),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": limits.keep_seconds,
        "backoffLimit": limits.retries,
    }
    if limits.deadline_seconds:
        spec["activeDeadlineSeconds"] = limits.deadline_seconds
    if limits.start_seconds:
        spec["preRunningDeadlineSeconds"] = limits.start_seconds
    store = {"object-store-memory": str(_OBJECT_STORE)}
    head = pod_spec(
        job, memory_bytes=_HEAD_MEMORY, cpus=_HEAD_CPUS, shm_bytes=_SHM, disk_bytes=10 * GIB, gpus=0
    )
    worker = pod_spec(
        job, memory_bytes=compute.memory_bytes, cpus=compute.cpus, shm_bytes=compute.shm_bytes,
        disk_bytes=compute.disk_bytes, gpus=compute.gpus,
    )  # fmt: skip
    worker["containers"][0]["lifecycle"] = {
        "preStop": {"exec": {"command": _before_it_stops(limits.grace_seconds)}}
    }
    spec["rayClusterSpec"] = {
        "rayVersion": job.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **store},
            "template": _template(head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": compute.nodes,
                "minReplicas": compute.nodes,
                "maxReplicas": compute.nodes,
                "rayStartParams": {"num-cpus": str(compute.cpus), **store},
                "template": _template(worker),
            }
        ],
    }
    labels = queue_labels(job)
    ray = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(job, labels=labels),
        "spec": spec,
    }
    return [recipe_map(job, recipe), ray]


def _entrypoint(job: JobSpec) -> list[str]:
    workers = str(job.compute.num_gpus)
    return ["fitune", "train", RECIPE, "--on", "ray", "--ray-address", "auto", "--workers", workers]


def _before_it_stops(grace_seconds: int) -> list[str]:
    return ["python", "-m", "fitune.launch.draining", str(grace_seconds - _END_SECONDS)]


def _template(pod: Manifest) -> Manifest:
    """Pods restart nothing in place: Ray and KubeRay replace what fails, and a container that came back would not know
    what its cluster did meanwhile."""
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "fitune"}},
        "spec": {"restartPolicy": "Never", **pod},
    }


def _require_token_support(job: JobSpec) -> None:
    numbers = re.match(r"(\d+)\.(\d+)\.", f"{job.ray_version}.")
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _TOKEN_SINCE:
        raise RecipeError(
            f"job.ray_version = {job.ray_version!r}: authentication by token needs Ray 2.52 or newer",
            hint=f"the version that the image has, e.g. job.ray_version={TESTED_RAY}",
        )
