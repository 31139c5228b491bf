"""A recipe becomes what a cluster runs: a manifest of KubeRay or Kubernetes, or a script of SLURM."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import yaml

from fitune.errors import RecipeError
from fitune.launch.kuberay import ray_job
from fitune.launch.pods import manifest_text
from fitune.planner.job import inside, job_of
from fitune.session.planning import plan_for
from fitune.spec.job import JobSpec, System
from fitune.spec.job_settings import JobSettings, read_job_settings
from fitune.spec.pins import pinned
from fitune.spec.predictions import Priced
from fitune.spec.recipe import Recipe

JOB = "job."
"""``--set job.KEY=VALUE`` is a setting of the job; every other ``--set`` is one of the recipe."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(#\d+)?")
_DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|txt)(\.(gz|zst|bz2|xz))?(#\d+)?$", re.I)


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the recipe, and those of the job without their ``job.``."""
    of_job = [each.strip().removeprefix(JOB) for each in settings if each.strip().startswith(JOB)]
    return [each for each in settings if not each.strip().startswith(JOB)], of_job


def launch_file(
    recipe: Recipe, on: System, *, job_file: Path | None = None, settings: Sequence[str] = ()
) -> tuple[JobSpec, str]:
    """The job of the recipe's plan, and the file that starts it on ``on``: YAML for kubectl, a script for sbatch."""
    _require_named_hardware(recipe)
    wanted = read_job_settings(job_file, settings=settings)
    return render(recipe, plan_for(recipe, purposes=("plan", "train")).chosen, wanted, on)


def render(
    recipe: Recipe,
    priced: Priced,
    settings: JobSettings,
    on: System,
    *,
    cluster: str = "",
    storage_bandwidth: float = 0.0,
) -> tuple[JobSpec, str]:
    """The job of ``priced`` and the text of its file. The recipe in it has the plan's choices and resumes."""
    written = recipe_in_pods(pinned(recipe, priced.plan), settings.mount)
    job = job_of(
        priced,
        settings,
        fetches_model=_is_fetched(recipe.model),
        cluster=cluster,
        storage_bandwidth=storage_bandwidth,
    )
    return job, manifest_text(ray_job(job, recipe_text(written)))


def recipe_text(recipe: Recipe) -> str:
    """YAML of what the recipe says, its defaults included where they were said."""
    said = recipe.model_dump(mode="json", include=recipe.model_fields_set)
    text: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True, width=120)
    return text


def recipe_in_pods(recipe: Recipe, mount: str) -> Recipe:
    """The recipe with every path below ``mount``, and one that goes on where an earlier attempt stopped.

    Raises RecipeError for a path that pods cannot see.
    """
    changes: dict[str, object] = {
        name: inside(getattr(recipe, name), mount, setting=name)
        for name in ("output_dir", "chat_template", "cache_dir", "nvme_path")
        if getattr(recipe, name)
    }
    for name in ("data", "eval_data"):
        sources = getattr(recipe, name)
        if sources:
            paths = [_data_path(source.path, mount, setting=name) for source in sources]
            changes[name] = [
                source.model_copy(update={"path": path}) for source, path in zip(sources, paths, strict=True)
            ]
    if not _is_fetched(recipe.model):
        changes["model"] = inside(recipe.model, mount, setting="model")
    if "://" in str(changes.get("output_dir", "")):
        raise RecipeError(
            f"output_dir = {recipe.output_dir!r}: a run is written into a folder with locks and renames, no bucket",
            hint="a folder of the claim; data may be read from a bucket",
        )
    return recipe.model_copy(update={**changes, "resume": recipe.resume or True})


def _data_path(path: str, mount: str, *, setting: str) -> str:
    """A dataset on the Hub and a URL stay as they are; a file lies below ``mount``."""
    is_hub = _HUB_ID.fullmatch(path) and not path.startswith(".") and not _DATA_FILE.search(path)
    return (
        path if is_hub and not Path(path.partition("#")[0]).exists() else inside(path, mount, setting=setting)
    )


def _is_fetched(model: str) -> bool:
    """True for a Hub id; False for a folder."""
    return not (PurePosixPath(model).is_absolute() or model.startswith((".", "~")) or Path(model).is_dir())


def _require_named_hardware(recipe: Recipe) -> None:
    """Raises RecipeError where the plan would be for this machine, and the job is not."""
    if recipe.gpu is None and recipe.gpu_memory is None:
        raise RecipeError(
            "no GPU is named, and the plan of a cluster is not one of this machine",
            hint="--gpu h100 --gpus 8 --nodes 2; or --fleet FILE chooses among clusters",
        )
