"""A recipe becomes what a cluster runs: commands for each machine, a manifest of KubeRay or Kubernetes, a script of
SLURM."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fitune.errors import RecipeError
from fitune.files import is_template
from fitune.launch.manifests import job_text
from fitune.launch.place import meeting_address
from fitune.planner.job import inside, job_of
from fitune.recipe.job import Job, JobSettings, System, read_job_settings, require_meaningful
from fitune.recipe.paths import with_paths
from fitune.recipe.recipe import Recipe, dump_recipe, given_keys, parse_recipe
from fitune.session.planning import for_its_rows, pinned, plan_for
from fitune.values.deepspeed import deepspeed_config
from fitune.values.named_templates import NAMED_TEMPLATES
from fitune.values.plan import Plan, Zero
from fitune.values.predictions import Priced
from fitune.values.words import describe_sharding

JOB = "job."
"""``--set job.KEY=VALUE`` is a setting of the job; every other ``--set`` is one of the recipe."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?(#\d+)?")
_DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|txt)(\.(gz|zst|bz2|xz))?(#\d+)?$", re.I)


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the recipe, and settings of the job without their ``job.``."""
    of_job = [each.strip().removeprefix(JOB) for each in settings if each.strip().startswith(JOB)]
    return [each for each in settings if not each.strip().startswith(JOB)], of_job


def launch_file(
    recipe: Recipe, on: System, *, job_file: Path | None = None, settings: Sequence[str]
) -> tuple[Job, str]:
    """The job of the recipe's plan, and the file that starts it on ``on``: YAML for kubectl, a script for sbatch.

    Raises RecipeError where the plan would be for this machine, and the job is not.
    """
    if recipe.gpu is None and recipe.gpu_memory is None:
        raise RecipeError(
            "no GPU is named, and the plan of a cluster is not one of this machine",
            hint="--gpu h100 --gpus 8 --nodes 2; or --fleet FILE chooses among clusters",
        )
    wanted = read_job_settings(job_file, settings=settings)
    recipe = for_its_rows(recipe)
    return render(recipe, plan_for(recipe, purposes=("plan", "train")).chosen, wanted, on)


def render(
    recipe: Recipe,
    priced: Priced,
    settings: JobSettings,
    on: System,
    *,
    storage_bandwidth: float = 0.0,
) -> tuple[Job, str]:
    """The job of ``priced`` and the text of its file. The recipe in it has the plan's choices and resumes."""
    require_meaningful(settings, on)
    if on == "slurm":
        settings = settings.model_copy(update={"mount": str(Path.cwd())})
    written = recipe_below(pinned(recipe, priced.plan), settings.mount, anywhere=on == "slurm")
    job = job_of(
        priced, settings, fetches_model=is_fetched(recipe.model), storage_bandwidth=storage_bandwidth
    )
    on_hub = [
        source.path for source in (*written.data, *(written.eval_data or ())) if _is_on_hub(source.path)
    ]
    if on_hub:
        names = ", ".join(on_hub)
        note = f"not on this machine, so read from the Hub: {names}; for a folder write ./{on_hub[0]}"
        job = replace(job, notes={**job.notes, "data": note})
    return job, job_text(job, dump_recipe(written), on)


def recipe_below(recipe: Recipe, mount: str, *, anywhere: bool) -> Recipe:
    """The recipe with every relative path below ``mount``, and one that goes on where an earlier attempt stopped.

    Raises RecipeError for a path elsewhere, which pods cannot see; ``anywhere`` True: nodes see the same disk as here.
    """

    def place(name: str, path: str) -> str:
        """The path as pods or nodes see it. Raises RecipeError naming the key where pods cannot."""
        is_fetched_there = (
            _is_on_hub(path) if name in ("data", "eval_data") else name == "model" and is_fetched(path)
        )
        if is_fetched_there or (name == "chat_template" and (is_template(path) or path in NAMED_TEMPLATES)):
            return path
        if not anywhere:
            return inside(path, mount, setting=name)
        return path if "://" in path else str(Path(path).expanduser().absolute())

    keys = with_paths(given_keys(recipe), place, also=("output_dir", "cache_dir", "nvme_path"))
    return parse_recipe({**keys, "resume": keys.get("resume") or True}, where="the recipe of the job")


def _is_on_hub(path: str) -> bool:
    """True for ``owner/name`` unless it is a file or a folder."""
    has_form = _HUB_ID.fullmatch(path) and not path.startswith(".") and not _DATA_FILE.search(path)
    return bool(has_form) and not Path(path.partition("#")[0]).exists()


def is_fetched(model: str) -> bool:
    """True for a Hub id; False for a folder."""
    return not (PurePosixPath(model).is_absolute() or model.startswith((".", "~")) or Path(model).is_dir())


def launch_lines(
    recipe: Recipe, words: Sequence[str], settings: Sequence[str], *, rendezvous: str
) -> tuple[str, dict[str, Any]]:
    """The command for each machine of the recipe's plan: as text, each below its number, and as data. The recipe is
    named as it was typed."""
    typed = [*words, *(part for setting in settings for part in ("--set", setting))]
    plan = plan_for(for_its_rows(recipe), purposes=("plan", "train")).chosen.plan
    commands = machine_commands(plan, typed, rendezvous=rendezvous)
    lines = (f"# machine {number}\n{command}" for number, command in enumerate(commands))
    return "\n".join(lines), {"commands": commands}


def machine_commands(plan: Plan, words: Sequence[str], *, rendezvous: str) -> list[str]:
    """The command line for each machine of a plan; ``words`` follow ``fitune train``.

    Several start their ranks themselves and meet at ``rendezvous``: an address of the first and a free port there. One
    is started by torchrun, as ``fitune train`` alone does.
    """
    if rendezvous != "HOST:PORT":  # what ``fitune launch`` prints when none is given
        meeting_address(rendezvous)
    hardware = plan.hardware
    if hardware.nodes == 1:
        torchrun = f"torchrun --standalone --nproc-per-node {hardware.gpus_per_node} -m fitune train"
        return [f"OMP_NUM_THREADS={hardware.threads_per_process} {torchrun} {shlex.join(words)}"]
    return [
        shlex.join(["fitune", "train", *words, "--node-rank", str(node), "--rendezvous", rendezvous])
        for node in range(hardware.nodes)
    ]


def deepspeed_configuration(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """The ds_config.json of the recipe's plan, as text and as data. Raises RecipeError when it is another's."""
    plan = plan_for(for_its_rows(recipe)).chosen.plan
    if not isinstance(plan.sharding, Zero) or plan.sharding.backend != "deepspeed":
        by = describe_sharding(plan.sharding) or "one process"
        raise RecipeError(f"the plan is {by}, not DeepSpeed", hint="backend: deepspeed, gpus: 2 or more")
    found = deepspeed_config(plan)
    return json.dumps(found, indent=2), {"deepspeed_config": found}
