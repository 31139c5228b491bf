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


def test_states_on_nvme_train_and_resume_the_same_model_as_states_on_the_host(plan, tmp_path):
    alone, on_host, straight, stopped = (tmp_path / name for name in ("alone", "host", "straight", "stopped"))
    trained(divided(plan, 1, 3, alone))
    nvme = tmp_path / "nvme"
    host = replace(divided(plan, 2, 3, on_host, by="deepspeed"), offload=Offload(optimizer="cpu"))
    jobs = [
        Job(plan=host),
        Job(plan=on_nvme(plan, straight, nvme)),
        Job(plan=on_nvme(plan, stopped, nvme), stop_after=3),
        Job(plan=on_nvme(plan, stopped, nvme), resume=True),
    ]
    with Seen(nvme) as seen:
        first, second = train_on(2, jobs, tmp_path / "jobs")
    assert first == second
    assert [each["status"] for each in first] == ["complete", "complete", "interrupted", "complete"]
    assert seen.most >= 2 * 3  # of each rank the masters and both moments
    assert_close(on_host, alone, within=LOSS)
    for folder in (straight, stopped):
        assert losses(folder) == losses(on_host)
        assert largest_difference(folder, on_host) == 0.0
    assert not list(nvme.iterdir())  # checkpoints have it


@pytest.fixture
def wide(model_folder, data_file, tmp_path):
    """Full training where shares of tables and MLPs are over 1 MiB, and those of attention and norms are not.

    In 16 bits: on a processor DeepSpeed reads no others back from NVMe (Init._set_dtype).
    """
    shape = {"hidden_size": 256, "intermediate_size": 4096, "head_dim": 64, "vocab_size": 4096}
    folder = wide_like(model_folder, tmp_path / "wider", **shape)
    words = {"val_fraction": 0.1, "eval_steps": 3, "precision": "bf16-master"}
    return plan_of(folder, data_file, tmp_path / "unused", **words, **FULL)


def test_weights_on_nvme_train_and_resume_the_same_model_as_weights_on_the_host(wide, tmp_path):
    on_host, straight, stopped = (tmp_path / name for name in ("host", "straight", "stopped"))
    nvme = tmp_path / "nvme"
    host = replace(
        divided(wide, 2, 3, on_host, by="deepspeed"), offload=Offload(parameters="cpu", optimizer="cpu")
    )
    jobs = [
        Job(plan=host),
        Job(plan=on_nvme(wide, straight, nvme, weights="nvme")),
        Job(plan=on_nvme(wide, stopped, nvme, weights="nvme"), stop_after=3),
        Job(plan=on_nvme(wide, stopped, nvme, weights="nvme"), resume=True),
    ]
    with Seen(nvme, "*_param.tensor.swp") as seen:
        first, second = train_on(2, jobs, tmp_path / "jobs")
    assert first == second
    assert [each["status"] for each in first] == ["complete", "complete", "interrupted", "complete"]
    assert seen.most == 2 * (2 + 3 * wide.model.num_layers)  # both tables, and three weights of every MLP
    for folder in (straight, stopped):
        assert losses(folder) == losses(on_host)
        assert evaluations(folder) == evaluations(on_host)
        assert largest_difference(folder, on_host) == 0.0
    assert not list(nvme.iterdir())  # checkpoints have it


def test_frozen_weights_on_nvme_train_the_same_adapters(wide, data_file, tmp_path):
    lora = plan_of(
        Path(wide.model_path),
        data_file,
        tmp_path / "unused",
        tuning="lora",
        max_steps=3,
        precision="bf16-master",
    )
    on_host, away, nvme = (tmp_path / name for name in ("host", "away", "nvme"))
    host = replace(
        divided(lora, 2, 3, on_host, by="deepspeed"), offload=Offload(parameters="cpu", optimizer="cpu")
    )
    jobs = [Job(plan=host), Job(plan=on_nvme(lora, away, nvme, weights="nvme"))]
    with Seen(nvme, "*_param.tensor.swp") as seen:
        first, second = train_on(2, jobs, tmp_path / "jobs")
    assert first == second
    assert [each["status"] for each in first] == ["complete", "complete"]
    assert seen.most == 2 * (2 + 3 * wide.model.num_layers)
    assert losses(away) == losses(on_host)
    assert largest_difference(away, on_host) == 0.0
    assert not list(nvme.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_by_name(plan, tmp_path):
    missing = tmp_path / "missing"
    planned = divided(plan, 2, 3, tmp_path / "run", by="deepspeed")
    planned = replace(planned, offload=Offload(optimizer="nvme", nvme_path=str(missing)))
    [first, _] = train_on(2, [Job(plan=planned)], tmp_path / "jobs")
    assert str(missing) in first[0]["error"]
