"""Pods: which node, what they ask of it, and what they see: for KubeRay and for plain Kubernetes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fitune.errors import HardwareError, RecipeError
from fitune.spec.machines.job import GPU_RESOURCE, Compute, JobSpec
from fitune.spec.recipe.job_settings import JobSettings
from fitune.spec.run_lock import WAIT_VARIABLE
from fitune.units import GIB, MIB

Manifest = dict[str, Any]

RECIPE = "/etc/fitune/recipe.yaml"
CACHE = "/cache"
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""NVIDIA's feature discovery, which its GPU operator brings, writes the driver's name of the card there."""

INSTANCE_LABEL = "node.kubernetes.io/instance-type"

_PRODUCTS: dict[str, tuple[str, ...]] = {
    "t4": ("Tesla-T4",),
    "v100-16gb": ("Tesla-V100-SXM2-16GB", "Tesla-V100-PCIE-16GB"),
    "v100-32gb": ("Tesla-V100-SXM2-32GB", "Tesla-V100-SXM3-32GB", "Tesla-V100-PCIE-32GB"),
    "a10": ("NVIDIA-A10",),
    "a10g": ("NVIDIA-A10G",),
    "a30": ("NVIDIA-A30",),
    "a40": ("NVIDIA-A40",),
    "a100-40gb": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "a100-80gb": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "l4": ("NVIDIA-L4",),
    "l40": ("NVIDIA-L40",),
    "l40s": ("NVIDIA-L40S",),
    "h100": ("NVIDIA-H100-80GB-HBM3",),
    "h100-pcie": ("NVIDIA-H100-PCIe",),
    "h100-nvl": ("NVIDIA-H100-NVL",),
    "h200": ("NVIDIA-H200",),
    "b200": ("NVIDIA-B200",),
    "rtx-a5000": ("NVIDIA-RTX-A5000",),
    "rtx-a6000": ("NVIDIA-RTX-A6000",),
    "rtx-6000-ada": ("NVIDIA-RTX-6000-Ada-Generation",),
    "rtx-3090": ("NVIDIA-GeForce-RTX-3090",),
    "rtx-4090": ("NVIDIA-GeForce-RTX-4090",),
    "rtx-5090": ("NVIDIA-GeForce-RTX-5090",),
}
"""Canonical name -> values of the product label: what nvidia-smi prints, with '-' for spaces."""


class _Readable(yaml.SafeDumper):
    """Texts of several lines stay lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def manifest_text(documents: Sequence[Manifest]) -> str:
    """The documents as YAML, for ``kubectl apply -f``."""
    written = (
        yaml.dump(each, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)
        for each in documents
    )
    return "---\n".join(written)


def metadata(job: JobSpec, *, labels: Mapping[str, str] | None = None, notes: bool = True) -> Manifest:
    """Name, namespace, labels, and with ``notes`` the plan in words for whoever reads the object later."""
    found: Manifest = {"name": job.name}
    if job.namespace:
        found["namespace"] = job.namespace
    found["labels"] = {"app.kubernetes.io/name": "fitune", **(labels or {})}
    if notes:
        found["annotations"] = {f"fitune/{name}": text for name, text in job.notes.items()}
    return found


def queue_labels(job: JobSpec) -> dict[str, str]:
    """Labels by which Kueue takes the job into a queue; none without one. Raises RecipeError for a priority alone."""
    if job.queue.priority and not job.queue.name:
        why = f"job.priority = {job.queue.priority!r} is Kueue's, and no queue is named"
        raise RecipeError(why, hint="job.queue=NAME")
    if not job.queue.name:
        return {}
    labels = {"kueue.x-k8s.io/queue-name": job.queue.name}
    return {**labels, "kueue.x-k8s.io/priority-class": job.queue.priority} if job.queue.priority else labels


def recipe_map(job: JobSpec, recipe: str) -> Manifest:
    """The ConfigMap that carries the recipe into the pods."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, notes=False),
        "data": {"recipe.yaml": recipe},
    }


def require_pods(job: JobSpec) -> None:
    """Raises RecipeError for a job that lacks what pods cannot do without."""
    if not job.image:
        raise RecipeError(
            "no image is named: pods need one that has fitune",
            hint="--set job.image=REGISTRY/fitune:0.1.0; the Dockerfile builds it",
        )
    if not job.storage.claim:
        raise RecipeError(
            "no volume claim is named: data, run and token cache need a folder that outlives the pods",
            hint="--set job.claim=NAME, a PersistentVolumeClaim; ReadWriteMany where there are several pods",
        )


def pod_spec(
    job: JobSpec,
    *,
    memory_bytes: int,
    cpus: int,
    shm_bytes: int,
    disk_bytes: int,
    gpus: int,
    command: Sequence[str] = (),
) -> Manifest:
    """A pod with one container. It sees the claim, the recipe, its own cache and a /dev/shm of the size asked for."""
    container: Manifest = {"name": "fitune", "image": job.image}
    if command:
        container["command"] = list(command)
    container |= {
        "env": _environment(job),
        "resources": _resources(job, memory_bytes=memory_bytes, cpus=cpus, disk_bytes=disk_bytes, gpus=gpus),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "run", "mountPath": job.storage.mount},
            {"name": "recipe", "mountPath": RECIPE.rsplit("/", 1)[0], "readOnly": True},
            {"name": "cache", "mountPath": CACHE},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    spec: Manifest = {
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": job.storage.claim}},
            {"name": "recipe", "configMap": {"name": job.name}},
            {"name": "cache", "emptyDir": {"sizeLimit": quantity(disk_bytes)}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(shm_bytes)}},
        ],
        "terminationGracePeriodSeconds": job.limits.grace_seconds,
        "automountServiceAccountToken": bool(job.service_account),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    if job.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.image_pull_secrets]
    if gpus:
        spec |= _placement(job)
    return spec


def _environment(job: JobSpec) -> list[Manifest]:
    """Caches: the model's files on the node, tokens where every pod finds them. An attempt that comes while the pods of
    the one before still save waits for them: they hold the lock of the run."""
    values = {
        "HF_HOME": f"{CACHE}/huggingface",
        "FITUNE_CACHE": f"{job.storage.mount}/.fitune-cache",
        WAIT_VARIABLE: str(job.limits.grace_seconds + 120),
        "OMP_NUM_THREADS": str(max(1, job.compute.cpus // job.compute.gpus)),
        "PYTHONUNBUFFERED": "1",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _resources(job: JobSpec, *, memory_bytes: int, cpus: int, disk_bytes: int, gpus: int) -> Manifest:
    """Requests, and limits where more would take from others: memory, disk and GPUs, but no cores, which are shared."""
    bounded = {"memory": quantity(memory_bytes), "ephemeral-storage": quantity(disk_bytes)}
    if gpus:
        bounded |= {GPU_RESOURCE: str(gpus)} if job.compute.gpu != "cpu" else {}
        bounded |= {name: str(count) for name, count in job.compute.extra_resources.items()}
    return {"requests": {"cpu": str(cpus), **bounded}, "limits": dict(bounded)}


def node_selector(settings: JobSettings | Compute) -> dict[str, str]:
    """Labels of nodes that the job's settings name."""
    named = {INSTANCE_LABEL: settings.instance_type} if settings.instance_type else {}
    return {**settings.node_selector, **named}


def _placement(job: JobSpec) -> Manifest:
    """Nodes with the plan's GPU: by the labels that are named, else by the product label."""
    compute = job.compute
    selector = node_selector(compute)
    placement: Manifest = {"nodeSelector": selector} if selector else {}
    if compute.gpu == "cpu":
        return placement
    placement["tolerations"] = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    if selector:
        return placement
    wanted = {"key": PRODUCT_LABEL, "operator": "In", "values": list(products(compute.gpu))}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    return {
        **placement,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
    }


def products(gpu: str) -> tuple[str, ...]:
    """Values of the product label. Raises HardwareError for a card whose label is not known."""
    if gpu not in _PRODUCTS:
        raise HardwareError(
            f"the label of nodes with {gpu} is not known",
            hint=f"--set job.node_selector.KEY=VALUE, or job.instance_type=NAME; NVIDIA's key is {PRODUCT_LABEL}",
        )
    return _PRODUCTS[gpu]


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them, never less: ``81Gi``, ``1536Mi``."""
    return f"{size // GIB}Gi" if size % GIB == 0 else f"{math.ceil(size / MIB)}Mi"
