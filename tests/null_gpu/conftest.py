"""``on_null_gpu`` runs a script or a command on cards whose kernels do nothing (README.md), in its own process."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CARDS = {
    "t4": "Tesla T4|75|14.56",
    "v100": "Tesla V100-SXM2-32GB|70|31.73",
    "a100": "NVIDIA A100-SXM4-80GB|80|79.25",
    "3090": "NVIDIA GeForce RTX 3090|86|23.56",
    "4090": "NVIDIA GeForce RTX 4090|89|23.52",
    "h100": "NVIDIA H100 80GB HBM3|90|79.11",
    "5090": "NVIDIA GeForce RTX 5090|120|31.36",
}
"""Name, compute capability and GiB as CUDA tells them (a little less than is printed on the box)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A process that ended."""

    status: int
    out: str
    err: str

    @property
    def value(self):
        """What a script printed as its last line, in JSON."""
        return json.loads(self.out.splitlines()[-1])


def environment_folder():
    return Path(os.environ.get("NULL_VENV", ROOT / ".venv-null"))


def has(package):
    """Whether the environment of the null GPU has ``package``."""
    return next(environment_folder().glob(f"lib/python3*/site-packages/{package}"), None) is not None


def missing():
    """Why nothing can run on the null GPU here, or None."""
    venv = environment_folder()
    if not (venv / "bin/python").exists():
        return f"no environment with torch's CUDA build at {venv} (make null-env, or NULL_VENV)"
    if next(venv.glob("lib/python3*/site-packages/nvidia/cu*/include/cuda_runtime_api.h"), None) is None:
        return f"torch in {venv} is not the CUDA build"
    return None if shutil.which("g++") else "no g++ to build the libraries"


def surroundings(*, cards, compute):
    """Environment variables of a process on ``cards``. The test is skipped where there is no null GPU."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    paths = [ROOT / "src", ROOT / "tests", ROOT / "bench", os.environ.get("PYTHONPATH", "")]
    given = {
        "NULLCUDA_CARDS": ", ".join(CARDS.get(card, card) for card in cards),
        "PYTHONPATH": ":".join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cuda",  # a test may have loaded DeepSpeed for the CPU
    }
    if compute is not None:
        given |= {"NULLCUDA_COMPUTE": str(compute)}
    if compute == "all":
        given |= {"NULLCUDA_COPY_MIB": "100000"}
    return given


def run(
    command,
    *,
    cards=("h100",),
    compute=None,
    environment=None,
    timeout_s=300,
    check=True,
):
    """Run ``command`` (``fitune …`` or ``python …`` of the null GPU's environment); its exit status and output.

    ``cards``: names of CARDS, or descriptions like theirs. ``compute``: bytes of an operation's tensors up to which
    it is computed, or "all" (copies of any size are then made too). ``check``: the test fails if the command does.
    """
    given = surroundings(cards=cards, compute=compute)
    given |= {name: str(value) for name, value in (environment or {}).items()}
    with subprocess.Popen(
        [str(HERE / "run.sh"), *map(str, command)],
        env=os.environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(
                f"not done in {timeout_s} s: {' '.join(map(str, command))}\n{out[-2000:]}\n{err[-4000:]}"
            )
    if check and process.returncode:
        pytest.fail(
            f"exit status {process.returncode} of {' '.join(map(str, command))}\n{out[-2000:]}\n{err[-4000:]}"
        )
    return Ran(status=process.returncode, out=out, err=err)


@pytest.fixture
def on_null_gpu(tmp_path):
    """``run`` for a list of words, or for the text of a script; what it prints as its last line is ``.value``."""

    def on(command, **settings):
        if isinstance(command, str):
            script = tmp_path / f"script{len(list(tmp_path.glob('script*.py')))}.py"
            script.write_text(command)
            command = ["python", script]
        return run(command, **settings)

    return on
