"""A Ray cluster of two machines with a network between them: the run is that of one process."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fitune.recipe.recipe import dump_recipe
from launch.namespaces import two_machines
from ray_runs import by_one_process, losses, rank_of, report_of

pytestmark = pytest.mark.ray
PORT = 26_379
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves the workers where other tests run beside these
}


def end_all(of):
    """End the processes that ``of`` stands in the command line of: Ray's own stop would end every cluster here."""
    found = [each for each in psutil.process_iter(["cmdline"]) if of in " ".join(each.info["cmdline"] or [])]
    for process in found:
        process.kill()
    psutil.wait_procs(found, timeout=30)


@pytest.fixture
def machines():
    """Two machines, the first with the head of a cluster, each with room for one worker."""
    pytest.importorskip("ray", reason="needs ray: fitune[ray]")
    ray = str(Path(sys.executable).parent / "ray")
    with two_machines() as cable:
        head, other = cable.addresses
        here = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--node-ip-address", head]
        there = ["--address", f"{head}:{PORT}", "--node-ip-address", other]
        try:
            for machine, words in enumerate((here, there)):
                size = ["--num-cpus", "1", "--object-store-memory", str(80 * 2**20)]
                start = [*cable.on(machine), ray, "start", *words, *size]
                subprocess.run(start, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
            yield cable
        finally:
            end_all(of=head)


def test_workers_of_two_machines_train_the_model_of_one_process(machines, recipe, tmp_path):
    one, folder, file = by_one_process(recipe("one")), tmp_path / "two", tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe("two", zero=3, backend="fsdp")))
    address = f"{machines.addresses[0]}:{PORT}"
    words = ["train", str(file), "--on", "ray", "--ray-address", address, "--workers", "2"]
    program = [*machines.on(0), sys.executable, "-m", "fitune", *words]
    ran = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    assert "· 2 nodes of" in ran.stdout
    assert losses(folder) == pytest.approx(losses(one), abs=1e-5)
    assert len(report_of(folder).ranks) == 2
    assert rank_of(folder, 0).pid != rank_of(folder, 1).pid
