"""GPUs are numbered as NVML numbers them and segments grow, unless the user's environment says otherwise."""

import os
import subprocess
import sys

import pytest

from fitune.values.machines.environment import (
    has_growing_segments,
    set_cuda_environment,
    without_expandable_segments,
)

BOTH = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def test_any_process_that_imports_fitune_has_it_before_torch_is_there():
    """So a command, a rank, a worker of Ray, a worker of the scorer, and Python."""
    names = ("CUDA_DEVICE_ORDER", *BOTH)
    program = f"import os, sys, fitune; print([os.environ.get(n) for n in {names}], 'torch' in sys.modules)"
    clean = {name: value for name, value in os.environ.items() if name not in names}
    told = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=60, check=True
    )
    growing = BOTH["PYTORCH_ALLOC_CONF"] if sys.platform == "linux" else None
    assert told.stdout.strip() == f"{['PCI_BUS_ID', growing, growing]} False"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_users_own_settings_stay(name):
    environment = {name: "max_split_size_mb:512", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    before = dict(environment)
    set_cuda_environment(environment, system="linux")
    assert environment == before
    assert without_expandable_segments(environment) == before


def test_only_linux_has_segments_that_grow():
    environment = {}
    set_cuda_environment(environment, system="win32")
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("environment", "system", "grows"),
    [
        ({}, "darwin", True), (BOTH, "win32", False), (BOTH, "linux", True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "linux", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "linux", False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: true"}, "linux", True),
    ],
)  # fmt: skip
def test_a_plan_knows_which_allocator_a_training_here_would_have(environment, system, grows):
    assert has_growing_segments(environment, system=system) is grows


def test_vllm_gets_none_of_ours():
    environment = {"HOME": "/"}
    set_cuda_environment(environment, system="linux")
    assert environment.items() >= BOTH.items()
    assert without_expandable_segments(environment) == {"HOME": "/", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
