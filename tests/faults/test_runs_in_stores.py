"""Runs whose checkpoints, export and report go to a real S3 server: stores that refuse, fail, and machines that die."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.s3_server import DENIED, SECRET, environment_of, names, objects
from fitune.stores import opening
from fitune.stores.writing import Store
from fitune.train import uploading
from fitune.train.uploading import Uploads
from optional_libraries import NEEDS_S3
from runs import losses, report_of, set_words

pytestmark = NEEDS_S3


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """From now on another machine's folder is the current one."""

    def go():
        other = tmp_path / "elsewhere"
        other.mkdir()
        monkeypatch.chdir(other)
        return other

    return go


def steps_in(bucket):
    return {name.split("/")[3] for name in names(bucket) if "/step-" in name}


def test_a_run_is_in_the_store_when_it_ends_and_goes_on_from_there_elsewhere(
    train, bucket, here, tmp_path, elsewhere
):
    url, words = f"s3://{bucket}/runs/x", {"save_steps": 1, "keep_checkpoints": 2}
    out = train(output_dir=url, max_steps=3, **words).ends(0)
    (run,) = (here / "runs").iterdir()
    assert f"output   runs/{run.name}, and from there {url}" in out
    assert f"sent: {url}" in out
    there = objects(bucket)
    kept = {
        str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*")
        if file.is_file() and not file.is_symlink() and file.name not in ("run.lock", "calibration.json")
    }  # fmt: skip
    assert there == {f"runs/x/{name}": content for name, content in kept.items()}
    assert steps_in(bucket) == {"step-2", "step-3"}
    other = elsewhere()
    train(output_dir=url, max_steps=3, **words).ends(0, "already complete")
    assert objects(bucket) == there
    train(output_dir=url, max_steps=3, learning_rate=2e-2, **words).ends(
        2, "holds a complete run with other settings"
    )
    shutil.rmtree(other / "runs")
    train("--resume", output_dir=url, max_steps=4, **words).ends(
        0, f"fetching {url}/checkpoints/step-3: ", "resuming from"
    )
    (again,) = (other / "runs").iterdir()
    assert losses(again)[:3] == losses(run)
    assert steps_in(bucket) == {"step-3", "step-4"}
    assert not any(SECRET.encode() in content for content in objects(bucket).values())
    train("--resume", f"{url}/checkpoints/step-3", output_dir=tmp_path / "third", max_steps=4).ends(0)
    assert losses(tmp_path / "third") == losses(again)
    train("--resume", url, output_dir=tmp_path / "fourth").ends(2, f"resume: {url}/checkpoints/step-4")


def test_a_run_in_a_store_is_reported_and_exported_from_there_once_it_has_ended(
    train, call, bucket, here, elsewhere
):
    url, model = f"s3://{bucket}/runs/x", f"s3://{bucket}/models/y"
    train(output_dir=url, max_steps=1).ends(0)
    (run,) = (here / "runs").iterdir()
    table = call("report", run).ends(0).partition("report: ")[0]
    elsewhere()
    told, _, page = call("report", url).ends(0).partition("report: ")
    assert told == table
    assert Path(page.strip()).is_file()
    assert Path(page.strip()).parent.parent.name == "runs"
    call("report", url, "--watch").ends(2, "--watch reads a run's directory")
    call("export", url, "--out", model).ends(0, f"sent: {model}")
    there = objects(bucket)
    merged = {name.rpartition("/")[2] for name in there if name.startswith("models/y/")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= merged
    call("export", url, "--out", model).ends(2, "holds a model already")
    call("export", url).ends(0)
    assert objects(bucket)["runs/x/merged/model.safetensors"] == there["models/y/model.safetensors"]
    Store(url).remove(["report.json"])
    call("report", url).ends(2, "its run has not ended")
    for command in ("report", "export"):
        call(command, f"s3://{bucket}/nothing").ends(2, "no run of fitune")


def test_methods_are_compared_in_a_store(call, model_folder, data_file, bucket, here):
    words = ["--model", model_folder, "--data", data_file, "--gpu", "cpu", "--seq-len", 64, "--max-steps", 1]
    words += ["--samples", "0", "--tunings", "lora", "--output-dir", f"s3://{bucket}/all"]
    call("compare", *words).ends(0, f"sent: s3://{bucket}/all/compare.html")
    there = objects(bucket)
    (folder,) = (here / "runs").iterdir()
    assert there["all/compare.html"] == (folder / "compare.html").read_bytes()
    assert "all/lora/adapter/adapter_model.safetensors" in there
    call("compare", *words).ends(0, "already complete")


def test_a_store_that_cannot_be_written_to_is_refused_before_anything(
    train, bucket, wire, tmp_path, monkeypatch
):
    import s3fs

    run = tmp_path / "run"
    train(upload_to="s3://not-there/x").ends(2, "no such file, folder or bucket")
    wire.refused, wire.refusal = 1, DENIED
    train(upload_to=f"s3://{bucket}/x").ends(2, "does not let you write it")
    train(upload_to="ftp://127.0.0.1:1/x").ends(2, "ftp://127.0.0.1:1/x: cannot be written")
    train(upload_to="runs/x").ends(2, "is no URL")
    train(upload_to=f"s3://{bucket}/x", output_dir="s3://other/y").ends(2, "names another")
    for data, url in (("rows", "rows/run"), ("run/adapter/rows.jsonl", "run"), ("rows", "rows")):
        train(data=f"s3://{bucket}/{data}", upload_to=f"s3://{bucket}/{url}").ends(
            2, f"output_dir s3://{bucket}/{url} "
        )
    code, _, err = train(upload_to=f"s3://me:{SECRET}@{bucket}/x")
    assert (code, SECRET in err) == (2, False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    train(upload_to=f"s3://{bucket}/x").ends(2, "no credentials for s3://", "AWS_ACCESS_KEY_ID")
    assert not (run / "metrics.jsonl").exists()


def test_an_earlier_run_in_the_store_is_neither_continued_nor_replaced_unasked(train, bucket, tmp_path):
    url = f"s3://{bucket}/x"
    Store(url).write("checkpoints/step-1/COMMIT", b"of somebody")
    train(upload_to=url).ends(2, f"{url} holds an earlier run")
    train("--overwrite", upload_to=url, max_steps=1).ends(0)
    assert "x/report.json" in names(bucket)
    assert "x/checkpoints/step-1/COMMIT" not in names(bucket)


def refuses(wire, patched):
    """From now on the store refuses, and the steps do not end before it did so once: they may be quicker."""
    wire.refused, close = 10**6, Uploads.close

    def close_after_a_failure(uploads, *, tidy):
        until = time.monotonic() + 60
        while not uploads._has_failed and time.monotonic() < until:
            time.sleep(0.01)
        close(uploads, tidy=tidy)

    patched.setattr(Uploads, "close", close_after_a_failure)


def falls_silent(wire, patched):
    wire.is_silent = True
    patched.setattr(opening, "SILENT_S", 0.2)
    patched.setattr(opening, "ANSWER_S", 0.2)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (refuses, "the run goes on, and it is tried again with the next checkpoint"),
        (falls_silent, "the store did not answer within 0.2 s"),
    ],
)
def test_a_store_that_fails_on_the_way_costs_no_step_and_is_made_up_for(
    train, bucket, wire, tmp_path, monkeypatch, fails, said
):
    url, run, words = f"s3://{bucket}/x", tmp_path / "run", {"max_steps": 3, "save_steps": 1}
    write = Store.write

    def failing_from_now(store, name, content, **named):
        write(store, name, content, **named)
        if name.endswith("LINE"):
            fails(wire, broken)

    with monkeypatch.context() as broken:
        broken.setattr(Store, "write", failing_from_now)
        ended = train(upload_to=url, **words)
        wire.refused, wire.is_silent = 0, False
    ended.ends(
        1, f"the end of the run is not in {url}", f"all of it is in {run}", "--resume sends what is missing"
    )
    assert said in ended.out + ended.err
    assert report_of(run).status == "complete"
    assert (run / "adapter/adapter_model.safetensors").is_file()
    assert not any(name.endswith("COMMIT") for name in names(bucket))
    train("--resume", upload_to=url, **words).ends(0, "already complete")
    there = objects(bucket)
    assert {"x/report.json", "x/report.html", "x/adapter/adapter_config.json"} <= there.keys()
    assert there["x/checkpoints/step-3/COMMIT"] == (run / "checkpoints/step-3/COMMIT").read_bytes()


def test_a_checkpoint_that_is_on_its_way_when_the_steps_end_is_waited_for_with_a_word(tmp_path, monkeypatch):
    is_under_way, is_waited_for, told = threading.Event(), threading.Event(), []

    def send(uploads):
        is_under_way.set()
        is_waited_for.wait(60)
        time.sleep(0.1)
        told.append("sent")

    def note(text):
        told.append(text)
        is_waited_for.set()

    monkeypatch.setattr(uploading, "_QUIET_S", 0.0)
    monkeypatch.setattr(Uploads, "_send", send)
    store = SimpleNamespace(url="s3://x", close=lambda: told.append("closed"))
    with Uploads(store, tmp_path, (), keep=1, on_note=note) as uploads:
        uploads.saved()
        assert is_under_way.wait(60)
    assert told == ["waiting for s3://x, to which a checkpoint is on its way", "sent", "closed"]


STEPS = 40


@pytest.mark.weekly
def test_killed_and_resumed_from_the_store_in_a_fresh_directory_the_losses_are_those_of_an_undisturbed_run(
    bucket, wire, settings, tmp_path
):
    """Two machines, each killed once its checkpoint is in the store, and a third that ends."""
    often = {"max_steps": STEPS, "save_steps": 2, "val_fraction": 0.2, "eval_steps": 4}
    words = set_words(settings | often | {"lora_dropout": 0.1, "micro_batch_size": 2})
    command = [sys.executable, "-m", "fitune", "train", *words]
    environment = {**os.environ, **environment_of(wire)}
    straight = tmp_path / "straight"
    subprocess.run(
        [*command, "--set", f"output_dir={straight}"], env=environment, check=True, capture_output=True, timeout=300
    )  # fmt: skip
    command += ["--set", f"output_dir=s3://{bucket}/runs/x", "--resume"]
    wire.slow_s = 0.02  # the link is slower than the steps
    for number in range(2):
        machine = tmp_path / f"machine-{number}"
        machine.mkdir()
        had = names(bucket)
        process = subprocess.Popen(
            command, cwd=machine, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 120
        while not any(name.endswith("COMMIT") for name in names(bucket) - had):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = tmp_path / "last"
    last.mkdir()
    done = subprocess.run(
        command, cwd=last, env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    assert "fetching " in done.stdout
    (run,) = (last / "runs").iterdir()
    assert losses(run) == losses(straight)
    adapter = "adapter/adapter_model.safetensors"
    assert objects(bucket)[f"runs/x/{adapter}"] == (straight / adapter).read_bytes()
