"""A plan's job as a script for sbatch: srun starts one task a GPU, and the tasks join by SLURM's variables."""

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from fitune.spec.machines.job import JobSpec
from fitune.spec.run_lock import WAIT_VARIABLE
from fitune.units import MIB

_STOPPED = 143
"""Exit code of a run that saved and stopped because SIGTERM asked it to."""


def batch_script(job: JobSpec, recipe: str) -> str:
    """The script, for ``sbatch FILE``. The recipe is in it; it is written beside the runs, where every node sees it.

    Before its time is over SLURM sends SIGTERM, the tasks finish the step and save, and the script queues itself again.
    """
    path = PurePosixPath(job.storage.mount) / f"{job.name}.recipe.yaml"
    mark = f"RECIPE_{hashlib.sha256(recipe.encode(errors='surrogatepass')).hexdigest()[:12]}"
    environment = {
        "FITUNE_CACHE": f"{job.storage.mount}/.fitune-cache",
        WAIT_VARIABLE: str(job.limits.grace_seconds + 120),
        "OMP_NUM_THREADS": str(_cpus_per_task(job)),
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in _requests(job)),
        "#SBATCH --requeue",
        *(f"# {name}: {text}" for name, text in job.notes.items()),
        "set -eo pipefail",  # no -u: scripts that sites have people source use variables that are not set
        *job.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f"recipe={shlex.quote(str(path))}",
        f"cat > \"$recipe\" <<'{mark}'",
        recipe.rstrip("\n"),
        mark,
        "code=0",
        # srun takes no --cpus-per-task from the script since SLURM 22.05
        f'srun --kill-on-bad-exit=1 --cpus-per-task={_cpus_per_task(job)} fitune train "$recipe" || code=$?',
        f'if [ "$code" -eq {_STOPPED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.limits.retries} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"  # it saved before its time was over, and goes on from there',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _requests(job: JobSpec) -> Iterator[tuple[str, str]]:
    compute, limits, queue = job.compute, job.limits, job.queue
    yield "job-name", job.name
    yield "output", "%x-%j.out"
    yield "open-mode", "append"
    yield "nodes", str(compute.nodes)
    yield "ntasks-per-node", str(compute.gpus)
    yield "cpus-per-task", str(_cpus_per_task(job))
    yield "mem", f"{compute.memory_bytes // MIB}M"
    if compute.gpu != "cpu":
        yield "gpus-per-node", str(compute.gpus)
    if limits.deadline_seconds:
        minutes, seconds = divmod(limits.deadline_seconds, 60)
        yield "time", f"{minutes}:{seconds:02}"
    yield "signal", f"TERM@{limits.grace_seconds}"
    for name, value in (
        ("partition", queue.name), ("qos", queue.priority), ("account", queue.account),
        ("constraint", compute.constraint),
    ):  # fmt: skip
        if value:
            yield name, value


def _cpus_per_task(job: JobSpec) -> int:
    return max(1, job.compute.cpus // job.compute.gpus)
