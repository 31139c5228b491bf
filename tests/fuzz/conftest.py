"""What the examples of one process share: the watched child, a tiny model, its data, a finished run."""

import shutil

import pytest
from hypothesis import HealthCheck, settings

from fuzz.bounded import Bounded

_ALWAYS = {
    "deadline": None,  # bounded.py has limits of its own
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("minute", max_examples=45, derandomize=True, **_ALWAYS)
settings.register_profile("hour", max_examples=3000, **_ALWAYS)


@pytest.fixture(scope="session")
def bounded(tmp_path_factory):
    with Bounded(tmp_path_factory.mktemp("fuzz")) as child:
        yield child


@pytest.fixture(scope="session")
def finished_run(bounded, model_folder, data_file, tmp_path_factory):
    """Two steps, each saved."""
    run = tmp_path_factory.mktemp("finished") / "run"
    outcome = bounded.run(["train", *settings_of(model_folder, data_file, run)])
    assert outcome.code == 0, outcome.err + outcome.crash
    return run


def settings_of(model, data, run, **more):
    """Two quick steps on the CPU as words of ``fitune train``."""
    wanted = {
        "model": model, "data": data, "tuning": "lora", "lora_r": 2, "precision": "fp32", "gpu": "cpu", "seq_len": 48,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "max_steps": 2, "samples": 0,
        "save_steps": 1, "output_dir": run, **more,
    }  # fmt: skip
    return [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]


def copied(folder, to):
    """A fresh copy: each example damages its own."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to
