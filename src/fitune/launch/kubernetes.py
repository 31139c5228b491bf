"""A plan's job as a batch/v1 Job of plain Kubernetes: one pod, whose ranks fitune starts itself."""

from fitune.errors import RecipeError
from fitune.launch.pods import RECIPE, Manifest, metadata, pod_spec, queue_labels, recipe_map, require_pods
from fitune.spec.machines.job import JobSpec

_NOT_RETRIED = [2, 3]
"""Exit codes that another attempt would repeat: refused before any work, and out of memory at the smallest plan."""


def one_node_job(job: JobSpec, recipe: str) -> list[Manifest]:
    """The recipe and the Job. Raises RecipeError for a plan of several nodes.

    A pod takes the place of another only when that one has ended, so two attempts never write one run. A pod that the
    cluster took away (a node drained, a higher priority) does not count as a retry.
    """
    require_pods(job)
    if job.compute.nodes > 1:
        raise RecipeError(
            f"--on kubernetes starts one pod, and the plan is for {job.compute.nodes} nodes",
            hint="--on kuberay",
        )
    compute, limits = job.compute, job.limits
    pod = pod_spec(
        job, memory_bytes=compute.memory_bytes, cpus=compute.cpus, shm_bytes=compute.shm_bytes,
        disk_bytes=compute.disk_bytes, gpus=compute.gpus, command=("fitune", "train", RECIPE),
    )  # fmt: skip
    spec: Manifest = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": limits.retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "fitune", "operator": "In", "values": _NOT_RETRIED},
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "ttlSecondsAfterFinished": limits.keep_seconds,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": "fitune"}},
            "spec": {"restartPolicy": "Never", **pod},
        },
    }  # fmt: skip
    if limits.deadline_seconds:
        spec["activeDeadlineSeconds"] = limits.deadline_seconds
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job, labels=queue_labels(job)),
        "spec": spec,
    }
    return [recipe_map(job, recipe), body]
