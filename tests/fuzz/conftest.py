"""What examples share: a command that has to end in an orderly way, a finished run, and copies to damage."""

import re
import resource
import shutil
import signal
import time

import pytest
from hypothesis import HealthCheck, settings

import conftest
import fitune
from fitune.units import GIB
from runs import set_words

_ALWAYS = {
    "deadline": None,  # ``orderly`` has limits of its own
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("minute", max_examples=45, derandomize=True, **_ALWAYS)
settings.register_profile("hour", max_examples=3000, **_ALWAYS)

CPU_LIMIT_S = 30.0
"""Processor time of one command, also on a slow machine: the clock would measure its other work, too."""
CLOCK_LIMIT_S = 300.0
"""For commands that wait: nothing they wait for will ever come."""


@pytest.fixture(autouse=True, scope="module")
def room():
    """A command that wants more than 8 GiB gets a MemoryError and spares the machine."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def orderly(call):
    """Runs a command, which succeeds or ends in an error for people, within the limits."""

    def hung(number, frame):
        pytest.fail(f"still running after {CLOCK_LIMIT_S:g} s")

    def run(*words):
        before, began = signal.signal(signal.SIGALRM, hung), time.process_time()
        signal.setitimer(signal.ITIMER_REAL, CLOCK_LIMIT_S)
        try:
            ended = call(*words)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        assert ended.code in (0, 1, 2, 3), ended
        if ended.code:
            assert re.search(r"^error: \S", ended.err, re.MULTILINE), f"no error for people: {ended}"
        assert time.process_time() - began < CPU_LIMIT_S

    return run


def quick(model, data, run, **more):
    """Two quick steps on the CPU, each of them saved, as settings of a recipe."""
    steps = {
        "lora_r": 2,
        "seq_len": 48,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "save_steps": 1,
    }
    return conftest.settings_of(model, data, run, **{**steps, **more})


def settings_of(model, data, run, **more):
    return set_words(quick(model, data, run, **more))


@pytest.fixture(scope="session")
def finished_run(model_folder, data_file, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    fitune.train(**quick(model_folder, data_file, run))
    return run


def copied(folder, to):
    """A fresh copy: each example damages its own."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to
