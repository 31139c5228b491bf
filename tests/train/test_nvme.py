"""An optimizer, and weights, on NVMe under DeepSpeed (ZeRO-Infinity, arXiv 2104.07857): two processes train the model
of one.

DeepSpeed reads and writes by libaio, in an operation that it compiles when it is first asked: a minute or two.
"""

import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import plan_of
from fitune.values.choices import Offload
from models.tiny_models import beside_tokenizer
from optional_libraries import NEEDS_DEEPSPEED
from runs import (
    assert_close,
    losses,
    trained,
)
from several import Job, train_on
from train.test_several_processes import LOSS, divided, evaluations, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.deepspeed, NEEDS_DEEPSPEED]


CHECK = "from fitune.engine.deepspeed import require_nvme; require_nvme('/tmp')"


@pytest.fixture(scope="module", autouse=True)
def reads_and_writes():
    """Skip where DeepSpeed has no libaio or no compiler, asked in a process of its own: DeepSpeed changes the one that
    imports it."""
    asked = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    if asked.returncode:
        pytest.skip(" ".join(asked.stderr.strip().splitlines()[-2:]))


FULL = {"tuning": "full", "learning_rate": 1e-3, "max_steps": 6, "save_steps": 2}


@pytest.fixture
def plan(model_folder, data_file, tmp_path):
    """Full training of a model whose share is over 1 MiB: DeepSpeed keeps less in memory."""
    wide = wide_like(model_folder, tmp_path / "wide", hidden_size=128, intermediate_size=512, head_dim=32)
    return plan_of(wide, data_file, tmp_path / "unused", **FULL)


def wide_like(folder, wide, **shape):
    config = LlamaConfig.from_pretrained(folder, **shape)
    torch.manual_seed(0)
    return beside_tokenizer(LlamaForCausalLM(config), folder, wide)


def on_nvme(plan, folder, nvme, *, weights="device"):
    nvme.mkdir(exist_ok=True)
    planned = divided(plan, 2, 3, folder, by="deepspeed")
    return replace(planned, offload=Offload(parameters=weights, optimizer="nvme", nvme_path=str(nvme)))


class Seen:
    """Counts the largest number of swap files below ``folder`` while the block runs."""

    def __init__(self, folder, files="*.swp"):
        self.folder, self.files, self.most, self._over = folder, files, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._over.is_set():
            with suppress(OSError):  # a folder that is removed while it is read
                self.most = max(self.most, len(list(self.folder.rglob(self.files))))
            time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def most_files(plan, folder, *, weights="device", files="*.swp", resumes=True):
    """The most swap files at once of runs that are, bit for bit, the one on the host: one goes straight to its end, and
    one is stopped and goes on."""
    on_host, straight, stopped, nvme = (folder / name for name in ("host", "straight", "stopped", "nvme"))
    host = Offload(parameters="device" if weights == "device" else "cpu", optimizer="cpu")
    jobs = [
        Job(plan=replace(divided(plan, 2, 3, on_host, by="deepspeed"), offload=host)),
        Job(plan=on_nvme(plan, straight, nvme, weights=weights)),
    ]
    if resumes:
        away = on_nvme(plan, stopped, nvme, weights=weights)
        jobs += [Job(plan=away, stop_after=3), Job(plan=away, resume=True)]
    with Seen(nvme, files) as seen:
        first, second = train_on(2, jobs, folder / "jobs")
    assert first == second
    ends = ["complete", "complete", "interrupted", "complete"]
    assert [each["status"] for each in first] == ends[: len(jobs)]
    for run in (straight, stopped) if resumes else (straight,):
        assert losses(run) == losses(on_host)
        assert evaluations(run) == evaluations(on_host)
        assert largest_difference(run, on_host) == 0.0
    assert not list(nvme.iterdir())  # checkpoints have it
    return seen.most


def test_states_on_nvme_train_and_resume_the_same_model_as_states_on_the_host(plan, tmp_path):
    trained(divided(plan, 1, 3, tmp_path / "alone"))
    assert most_files(plan, tmp_path) >= 2 * 3  # of each rank the masters and both moments
    assert_close(tmp_path / "host", tmp_path / "alone", within=LOSS)


@pytest.fixture
def wide(model_folder, data_file, tmp_path):
    """Full training where shares of tables and MLPs are over 1 MiB, and those of attention and norms are not.

    In 16 bits: on a processor DeepSpeed reads no others back from NVMe (Init._set_dtype).
    """
    shape = {"hidden_size": 256, "intermediate_size": 4096, "head_dim": 64, "vocab_size": 4096}
    folder = wide_like(model_folder, tmp_path / "wider", **shape)
    words = {"val_fraction": 0.1, "eval_steps": 3, "precision": "bf16-master"}
    return plan_of(folder, data_file, tmp_path / "unused", **words, **FULL)


def files_of_weights(plan):
    """Of each rank both tables, and three weights of every MLP."""
    return 2 * (2 + 3 * plan.model.num_layers)


def test_weights_on_nvme_train_and_resume_the_same_model_as_weights_on_the_host(wide, tmp_path):
    found = most_files(wide, tmp_path, weights="nvme", files="*_param.tensor.swp")
    assert found == files_of_weights(wide)


def test_frozen_weights_on_nvme_train_the_same_adapters(wide, data_file, tmp_path):
    words = {"tuning": "lora", "max_steps": 3, "precision": "bf16-master"}
    lora = plan_of(Path(wide.model_path), data_file, tmp_path / "unused", **words)
    found = most_files(lora, tmp_path, weights="nvme", files="*_param.tensor.swp", resumes=False)
    assert found == files_of_weights(wide)


def test_a_folder_that_cannot_be_written_is_refused_by_name(plan, tmp_path):
    missing = tmp_path / "missing"
    planned = divided(plan, 2, 3, tmp_path / "run", by="deepspeed")
    planned = replace(planned, offload=Offload(optimizer="nvme", nvme_path=str(missing)))
    [first, _] = train_on(2, [Job(plan=planned)], tmp_path / "jobs")
    assert str(missing) in first[0]["error"]
