"""Writes the file that starts a plan's job: a RayJob for KubeRay, a Job for Kubernetes, a script for SLURM's sbatch.

Manifests are the files of templates/, whose ``$words`` are filled in after they were parsed: no value can add a field.
"""

import hashlib
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import yaml

from fitune.errors import HardwareError, RecipeError
from fitune.recipe.job import GPU_RESOURCE, TESTED_RAY, Job, JobSettings, System
from fitune.units import GIB, MIB
from fitune.values.run_lock import WAIT_VARIABLE

RECIPE = "/etc/fitune/recipe.yaml"
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""NVIDIA's feature discovery, which its GPU operator brings, writes the driver's name of the card there."""

_HEAD: dict[str, Any] = {
    "memory_bytes": 8 * GIB,
    "cpus": 2,
    "shm_bytes": 2 * GIB,
    "disk_bytes": 10 * GIB,
    "gpus": 0,
}
"""Ray's control store and dashboard, and the driver, which plans and prepares the data."""
_END_SECONDS = 15
"""Seconds of the grace period that Ray's own end takes."""
_STOPPED = 143
"""Exit code of a run that saved and stopped because SIGTERM asked it to."""


class _Readable(yaml.SafeDumper):
    """Texts of several lines stay lines."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def job_text(job: Job, recipe: str, on: System) -> str:
    """The file for ``kubectl apply -f`` or ``sbatch``, with the recipe in it. Raises RecipeError for a job that the
    cluster would refuse."""
    if on == "slurm":
        return _batch_script(job, recipe)
    _require_pods(job, on)
    asked, labels = job.settings, _labels(job.settings)
    named = {"name": job.name, **({"namespace": asked.namespace} if asked.namespace else {})}
    notes = {f"fitune/{name}": text for name, text in job.notes.items()}
    values: dict[str, Any] = {
        "metadata": {**named, "labels": labels, "annotations": notes}, "keep": asked.keep,
        "retries": asked.retries, "deadline": asked.deadline, "start": asked.start_within,
        "ray": asked.ray_version, "nodes": job.nodes, "cpus": str(job.cpus),
    }  # fmt: skip
    of_plan: dict[str, Any] = {name: getattr(job, name) for name in _HEAD}
    if on == "kubernetes":
        values["pod"] = _pod(job, **of_plan, command=["fitune", "train", RECIPE])
    else:
        train = ["fitune", "train", RECIPE, "--on", "ray", "--ray-address", "auto"]
        values["entrypoint"] = shlex.join([*train, "--workers", str(job.gpus * job.nodes)])
        stop = {"preStop": {"exec": {"command": _before_it_stops(job.grace_seconds)}}}
        values |= {"head": _pod(job, **_HEAD), "worker": _pod(job, **of_plan, lifecycle=stop)}
    config = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {**named, "labels": {"app.kubernetes.io/name": "fitune"}},
        "data": {"recipe.yaml": recipe},
    }  # fmt: skip
    body = _filled(_template("job" if on == "kubernetes" else "rayjob"), values)
    return "---\n".join(
        yaml.dump(each, Dumper=_Readable, sort_keys=False, allow_unicode=True, width=120)
        for each in (config, body)
    )


def _before_it_stops(grace_seconds: int) -> list[str]:
    return ["python", "-m", "fitune.launch.draining", str(grace_seconds - _END_SECONDS)]


@cache
def _template(name: str) -> Any:
    return yaml.safe_load((files("fitune.launch") / "templates" / f"{name}.yaml").read_text(encoding="utf-8"))


def _filled(part: Any, values: Mapping[str, Any]) -> Any:
    """``part`` with the value of each ``$word``; a field without a value, or whose value is empty, is left out."""
    if isinstance(part, dict):
        filled = {key: _filled(one, values) for key, one in part.items()}
        return {key: one for key, one in filled.items() if one not in (None, {}, [])}
    if isinstance(part, list):
        return [_filled(one, values) for one in part]
    return values[part[1:]] if isinstance(part, str) and part.startswith("$") else part


def _require_pods(job: Job, on: System) -> None:
    """Raises RecipeError for a job that lacks what pods cannot do without, or that the controllers would refuse."""
    if not job.settings.image:
        raise RecipeError(
            "no image is named: pods need one that has fitune",
            hint="--set job.image=REGISTRY/fitune:0.1.0; the Dockerfile builds it",
        )
    if not job.settings.claim:
        raise RecipeError(
            "no volume claim is named: data, run and token cache need a folder that outlives the pods",
            hint="--set job.claim=NAME, a PersistentVolumeClaim; ReadWriteMany where there are several pods",
        )
    if on == "kubernetes" and job.nodes > 1:
        raise RecipeError(
            f"--on kubernetes starts one pod, and the plan is for {job.nodes} nodes",
            hint="--on kuberay",
        )
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})\.", f"{job.settings.ray_version}.")
    if on == "kuberay" and (numbers is None or (int(numbers[1]), int(numbers[2])) < (2, 52)):
        raise RecipeError(
            f"job.ray_version = {job.settings.ray_version!r}: authentication by token needs Ray 2.52 or newer",
            hint=f"the version that the image has, e.g. job.ray_version={TESTED_RAY}",
        )


def _labels(settings: JobSettings) -> dict[str, str]:
    """The labels of the job, those by which Kueue takes it into a queue among them. Raises RecipeError for a priority
    alone."""
    labels = {"app.kubernetes.io/name": "fitune"}
    if settings.priority and not settings.queue:
        why = f"job.priority = {settings.priority!r} is Kueue's, and no queue is named"
        raise RecipeError(why, hint="job.queue=NAME")
    if settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    if settings.priority:
        labels["kueue.x-k8s.io/priority-class"] = settings.priority
    return labels


def _pod(
    job: Job, *, memory_bytes: int, cpus: int, shm_bytes: int, disk_bytes: int, gpus: int,
    command: list[str] | None = None, lifecycle: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """A pod's template. Memory, disk and devices have limits, since more would take from others; cores are shared.

    The model's files are cached on the node, tokens where every pod finds them. An attempt that comes while the pods of
    the one before still save waits for them: they hold the lock of the run.
    """
    asked = job.settings
    limits = {"memory": quantity(memory_bytes), "ephemeral-storage": quantity(disk_bytes)}
    if gpus:
        limits |= {GPU_RESOURCE: str(gpus)} if job.gpu != "cpu" else {}
        limits |= {name: str(count) for name, count in asked.extra_resources.items()}
    environment = {
        "HF_HOME": "/cache/huggingface",
        **_environment(job, threads=max(1, job.cpus // job.gpus)),
        "PYTHONUNBUFFERED": "1",
    }
    selector = node_selector(asked) if gpus else {}
    tolerations = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    affinity: dict[str, Any] = {}
    if gpus and job.gpu != "cpu" and not selector:
        wanted = {"key": PRODUCT_LABEL, "operator": "In", "values": list(products(job.gpu))}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return _filled(
        _template("pod"),
        {
            "image": asked.image, "command": command, "lifecycle": lifecycle,
            "env": [{"name": name, "value": value} for name, value in environment.items()],
            "requests": {"cpu": str(cpus), **limits}, "limits": limits, "mount": asked.mount,
            "secrets": [{"secretRef": {"name": name}} for name in asked.secrets], "claim": asked.claim,
            "name": job.name, "disk": quantity(disk_bytes), "shm": quantity(shm_bytes),
            "grace": job.grace_seconds, "has_account": bool(asked.service_account),
            "account": asked.service_account or None,
            "pull_secrets": [{"name": name} for name in asked.image_pull_secrets], "selector": selector,
            "tolerations": tolerations if gpus and job.gpu != "cpu" else None, "affinity": affinity,
        },
    )  # fmt: skip


def _environment(job: Job, *, threads: int) -> dict[str, str]:
    return {
        "FITUNE_CACHE": f"{job.settings.mount}/.fitune-cache",
        WAIT_VARIABLE: str(job.grace_seconds + 120),
        "OMP_NUM_THREADS": str(threads),
    }


def node_selector(settings: JobSettings) -> dict[str, str]:
    """Labels of nodes that the job's settings name."""
    named = {"node.kubernetes.io/instance-type": settings.instance_type} if settings.instance_type else {}
    return {**settings.node_selector, **named}


def products(gpu: str) -> tuple[str, ...]:
    """Values of the product label. Raises HardwareError for a card whose label is not known."""
    known = _template("products")
    if gpu not in known:
        raise HardwareError(
            f"the label of nodes with {gpu} is not known",
            hint=f"--set job.node_selector.KEY=VALUE, or job.instance_type=NAME; NVIDIA's key is {PRODUCT_LABEL}",
        )
    return tuple(known[gpu])


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them, never less: ``81Gi``, ``1536Mi``."""
    return f"{size // GIB}Gi" if size % GIB == 0 else f"{math.ceil(size / MIB)}Mi"


def _batch_script(job: Job, recipe: str) -> str:
    """The script, for ``sbatch FILE``. The recipe is in it; it is written beside the runs, where every node sees it.

    Before its time is over SLURM sends SIGTERM, the tasks finish the step and save, and the script queues itself again.
    """
    path = PurePosixPath(job.settings.mount) / f"{job.name}.recipe.yaml"
    mark = f"RECIPE_{hashlib.sha256(recipe.encode(errors='surrogatepass')).hexdigest()[:12]}"
    cpus = max(1, job.cpus // job.gpus)
    environment = _environment(job, threads=cpus)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in _requests(job, cpus)),
        "#SBATCH --requeue",
        *(f"# {name}: {text}" for name, text in job.notes.items()),
        "set -eo pipefail",  # no -u: scripts that sites have people source use variables that are not set
        *job.settings.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f"recipe={shlex.quote(str(path))}",
        f"cat > \"$recipe\" <<'{mark}'",
        recipe.rstrip("\n"),
        mark,
        "code=0",
        # srun takes no --cpus-per-task from the script since SLURM 22.05
        f'srun --kill-on-bad-exit=1 --cpus-per-task={cpus} fitune train "$recipe" || code=$?',
        f'if [ "$code" -eq {_STOPPED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.settings.retries} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"  # it saved before its time was over, and goes on from there',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _requests(job: Job, cpus: int) -> Iterator[tuple[str, str]]:
    asked = job.settings
    yield "job-name", job.name
    yield "output", "%x-%j.out"
    yield "open-mode", "append"
    yield "nodes", str(job.nodes)
    yield "ntasks-per-node", str(job.gpus)
    yield "cpus-per-task", str(cpus)
    yield "mem", f"{job.memory_bytes // MIB}M"
    if job.gpu != "cpu":
        yield "gpus-per-node", str(job.gpus)
    if asked.deadline:
        minutes, seconds = divmod(asked.deadline, 60)
        yield "time", f"{minutes}:{seconds:02}"
    yield "signal", f"TERM@{job.grace_seconds}"
    for name, value in (
        ("partition", asked.queue), ("qos", asked.priority), ("account", asked.account),
        ("constraint", asked.constraint),
    ):  # fmt: skip
        if value:
            yield name, value
