"""A Job of plain Kubernetes and a script of SLURM: what they ask for, and what they do when an attempt ends."""

import os
import re
import stat
import subprocess
import sys

import pytest
import yaml

from fitune.errors import FituneError, OutOfMemory, RecipeError
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.session.clusters.launching import launch_file
from launch.manifests import wrong_with_pod
from plans import recipe_of

NEEDED = ("image=i:1", "claim=c")


def asked(**settings):
    one = {
        "model": "llama-3.2-1b",
        "tuning": "lora",
        "gpu": "rtx-4090",
        "data": "a.jsonl",
        "output_dir": "runs/a",
    }
    return recipe_of(**one | settings)


def test_a_job_for_one_node():
    _, text = launch_file(asked(gpus=2), "kubernetes", settings=[*NEEDED, "queue=q", "deadline=1h"])
    config, job = yaml.safe_load_all(text)
    spec = job["spec"]
    pod, policy = spec["template"]["spec"], spec["podFailurePolicy"]
    [container] = pod["containers"]
    assert list(wrong_with_pod(pod, "pod")) == []
    assert spec["activeDeadlineSeconds"] == 3600
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    # Fields that podFailurePolicy asks for, and one pod at a time:
    assert (pod["restartPolicy"], spec["podReplacementPolicy"], spec["parallelism"]) == ("Never", "Failed", 1)
    assert container["command"] == ["fitune", "train", "/etc/fitune/recipe.yaml"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert yaml.safe_load(config["data"]["recipe.yaml"])["gpus"] == 2
    fails, ignores = policy["rules"]
    assert fails["onExitCodes"]["values"] == [FituneError.exit_code, OutOfMemory.exit_code]
    assert ignores == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


def test_a_job_is_for_one_node():
    with pytest.raises(RecipeError, match="the plan is for 2 nodes"):
        launch_file(asked(model="gpt2", nodes=2), "kubernetes", settings=NEEDED)


@pytest.mark.parametrize(
    ("on", "setting"),
    [("slurm", "image=i:1"), ("kubernetes", "account=a"), ("kuberay", "setup=[module load x]")],
)
def test_settings_are_for_their_system(on, setting):
    with pytest.raises(RecipeError, match=f"job.{setting.partition('=')[0]} has no meaning --on {on}"):
        launch_file(asked(), on, settings=[setting])


def run_script(text, folder, *, srun, restarts=0):
    """The script's end, where ``srun`` and ``scontrol`` are lines of shell."""
    for name, line in (("srun", srun), ("scontrol", 'echo "scontrol $*"')):
        program = folder / name
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }  # fmt: skip
    (folder / "job.sh").write_text(text)
    return subprocess.run(
        ["bash", folder / "job.sh"], capture_output=True, text=True, timeout=300, env=environment
    )


def test_a_script_starts_one_task_a_gpu_and_goes_on_after_its_time(tmp_path, monkeypatch):
    folder = tmp_path / "a b'c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings = [
        "queue=gpu",
        "priority=high",
        "account=me",
        "deadline=90s",
        "setup=[export MARK=set]",
        "retries=1",
    ]
    job, text = launch_file(asked(gpus=4, nodes=2), "slurm", settings=settings)
    options = dict(re.findall("^#SBATCH --(.*)=(.*)$", text, re.MULTILINE))
    wanted = {
        "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "partition": "gpu", "qos": "high", "account": "me",
        "time": "1:30", "signal": f"TERM@{job.grace_seconds}",
    }  # fmt: skip
    assert {name: options[name] for name in wanted} == wanted
    show = 'echo "$MARK $*"; exit 143'
    ended = run_script(text, tmp_path, srun=show)
    recipe = folder / f"{job.name}.recipe.yaml"
    assert ended.stdout.splitlines() == [
        f"set --kill-on-bad-exit=1 --cpus-per-task={job.cpus // 4} fitune train {recipe}",
        "scontrol requeue 7",
    ]
    read = parse_recipe(canonical_keys(yaml.safe_load(recipe.read_text()), where="node"))
    assert (read.output_dir, read.data[0].path, read.nodes) == (f"{folder}/runs/a", f"{folder}/a.jsonl", 2)
    assert run_script(text, tmp_path, srun=show, restarts=1).stdout.count("scontrol") == 0
    failed = run_script(text, tmp_path, srun="exit 3")
    assert (failed.returncode, failed.stdout) == (3, "")


_SRUN = f"""
shift 2
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$rank SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost \\
    {sys.executable} -m "$@" &
done
wait -n && wait -n
"""


@pytest.mark.slow
def test_a_script_trains_by_the_tasks_of_srun(tmp_path, model_folder, data_file, monkeypatch):
    """``srun`` here starts two processes with SLURM's variables: script, recipe and joining are real."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "model": str(model_folder), "data": [str(data_file)], "precision": "fp32", "gpu": "cpu", "gpus": 2,
        "seq_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 2, "samples": 0,
    }  # fmt: skip
    _, text = launch_file(asked(**settings), "slurm", settings=())
    ended = run_script(text, tmp_path, srun=_SRUN)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/a/report.json").read_text().count('"complete"') == 1
