"""A checkpoint that is written beside the steps holds the state of its own step, and nothing of a later one."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint.killed_saves import state_of
from conftest import plan_of
from fitune.checkpoint import save as saves
from fitune.checkpoint.resume import load_checkpoint
from fitune.checkpoint.slices import share_of
from fitune.errors import CheckpointError
from fitune.track.metrics import read_metrics
from fitune.train.saving import HostCopies
from runs import (
    losses,
    trained,
)

MIXED = {"tuning": "full", "precision": "bf16-master", "learning_rate": 1e-3}
STEPS, EVERY = 6, 2


@pytest.fixture
def make(model_folder, data_file, tmp_path):
    def make(name, **settings):
        words = {"max_steps": STEPS, "save_steps": EVERY, "keep_checkpoints": 9, **MIXED, **settings}
        return plan_of(model_folder, data_file, tmp_path / name, **words)

    return make


def saved(plan, step):
    state = load_checkpoint(Path(plan.run.output_dir) / f"checkpoints/step-{step}")
    return {
        group: {name: t.clone() for name, t in tensors.items()} for group, tensors in state.tensors.items()
    }


def equal(left, right):
    return left.keys() == right.keys() and all(
        left[group].keys() == right[group].keys()
        and all(torch.equal(left[group][name], tensor) for name, tensor in right[group].items())
        for group in right
    )


class SlowDisk:
    """The first file of a checkpoint's tensors is written only after the training is a step further."""

    def __init__(self, monkeypatch, plan):
        self.log = Path(plan.run.output_dir) / "metrics.jsonl"
        self.threads = []
        self.steps_behind = []
        waited = set()
        real = saves.write_hashed

        def slow(path, chunks):
            if path.suffix == ".safetensors":
                self.threads.append(threading.current_thread().name)
                step = int(path.parent.name.split("-")[2])  # .tmp-step-2-<pid>-<random>
                # A regular save is waited for by the next one, EVERY steps later; the last by nothing.
                if step % EVERY == 0 and step < STEPS and step not in waited:
                    waited.add(step)
                    self.steps_behind.append(self.wait_for_more_than(step))
            return real(path, chunks)

        monkeypatch.setattr(saves, "write_hashed", slow)

    def wait_for_more_than(self, step):
        until = time.monotonic() + 60
        while self.steps() <= step and time.monotonic() < until:
            time.sleep(0.002)
        return self.steps() - step

    def steps(self):
        return len(read_metrics(self.log))


@pytest.mark.parametrize("settings", [{}, {"optimizer": "momentum", "precision": "fp32"}])
def test_the_next_step_changes_nothing_of_what_is_being_written(make, monkeypatch, settings):
    """pytorch#144657: the state was written while the optimizer stepped it."""
    between, beside = make("between", **settings), make("beside", async_save=True, **settings)
    trained(between)
    disk = SlowDisk(monkeypatch, beside)
    trained(beside)
    assert set(disk.threads) == {"saving"}
    assert len(disk.steps_behind) == STEPS // EVERY - 1
    assert min(disk.steps_behind) >= 1, "no step went on beside the writing"
    for step in range(EVERY, STEPS + 1, EVERY):
        assert equal(saved(beside, step), saved(between, step))
    assert losses(beside) == losses(between)


def test_a_run_that_is_stopped_ends_when_its_checkpoint_is_written(make, monkeypatch):
    straight, stopped = make("straight"), make("stopped", async_save=True)
    trained(straight)
    SlowDisk(monkeypatch, stopped)
    assert trained(stopped, stop_after=3).status == "interrupted"
    assert trained(stopped, resume=True).status == "complete"
    assert losses(stopped) == losses(straight)
    assert equal(saved(stopped, STEPS), saved(straight, STEPS))


def test_a_disk_that_is_full_stops_the_run_and_names_the_bytes(make, monkeypatch):
    plan = make("full", async_save=True)
    real = saves.write_hashed

    def full(path, chunks):
        if "step-4" in str(path.parent) and path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")
        return real(path, chunks)

    monkeypatch.setattr(saves, "write_hashed", full)
    with pytest.raises(
        CheckpointError, match=r"step-4 could not be saved: No space left on device; it needs"
    ) as caught:
        trained(plan)
    assert "The last saved one is step-2." in caught.value.message
    folder = Path(plan.run.output_dir) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["LINE", "latest", "step-2"]
    monkeypatch.undo()
    assert trained(plan, resume=True).status == "complete"


def test_an_error_of_a_step_waits_for_the_checkpoint_before_it(make, monkeypatch):
    plan = make("failing", async_save=True)
    disk = SlowDisk(monkeypatch, plan)

    def failing(report):
        if disk.steps() == EVERY + 1:
            raise ValueError("a fault of the test")

    class Failing:
        def start(self, *words): ...

        step = staticmethod(failing)

        def finish(self, report): ...

    with pytest.raises(Exception, match="a fault of the test"):
        trained(plan, sinks=[Failing()])
    assert (Path(plan.run.output_dir) / f"checkpoints/step-{EVERY}/COMMIT").is_file()


def test_the_room_of_copies_is_kept_from_save_to_save():
    copies, seen = HostCopies(), []
    for step in (1, 2):
        copied, wait = copies.take(share_of(state_of(step), rank=0))
        wait()
        seen.append([t.data_ptr() for tensors in copied.files.values() for t in tensors.values()])
    assert seen[0] == seen[1] != []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory beside a GPU")
def test_the_copy_of_a_gpu_is_pinned_and_complete_before_the_next_step():
    state = state_of(3)
    on_gpu = replace(state, tensors={"model": {"w": torch.ones(64 << 20, device="cuda")}})
    share = share_of(on_gpu, rank=0)
    copied, wait = HostCopies().take(share)
    share.files["model.safetensors"]["w"].add_(1)  # the next step, on the same stream
    wait()
    copy = copied.files["model.safetensors"]["w"]
    assert copy.is_pinned()
    assert bool((copy == 1).all())
