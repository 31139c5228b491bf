"""What wandb, MLflow, Comet and TensorBoard have of a run, read back from the files that they keep offline.

Two attempts, the second of which resumes at step 3: each library is started twice, all four beside one another.
"""

import json
import math
import os
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.track import feed
from fitune.track.feed import Trackers
from fitune.track.record import read_tracked
from fitune.track.trackers import End, wanted_trackers
from fitune.values.plan import Tracking
from report.conftest import make_run_report

pytestmark = pytest.mark.slow

LOSSES = {1: 2.5, 2: 2.25, 3: 2.0, 4: math.nan, 5: 1.75}
SECRET = "correct-horse-battery-staple"
END = End(
    status="complete",
    figures={"predicted/peak_of_tensors": 1000.0, "measured/peak_of_tensors": 900.0},
    table=(("", "predicted", "measured", "error"), ("Peak of tensors", "1000 B", "900 B", "+11.1 %")),
)
NAMES = ("report.html", "report.json", "plan.json", "recipe.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run in two attempts, told to every tracker that is installed."""
    from track.conftest import _step

    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "COMET_"))]:
            patch.delenv(name)
        patch.chdir(folder)  # MLflow keeps files where it runs
        patch.setenv("HOME", str(folder))  # no key of who runs this
        patch.setenv("COMET_INI", str(folder / "none"))
        patch.setenv("SOME_PASSWORD", SECRET)
        _attempts(folder / "run", folder / "store.db", _step)
        yield folder / "run"


def _attempts(directory, store, make_step):
    from plans import plan_for, small_llama

    directory.mkdir()
    for name in NAMES:
        (directory / name).write_text(json.dumps({"train_data": {"rows_read": 7}, "said": f"my {SECRET}"}))
    plan = plan_for(small_llama())
    tracking = Tracking(run_name="a name", project="a-project", server=f"sqlite:///{store}", offline=True)
    for steps, lr in (((1, 2, 3), 1e-3), ((3, 4, 5), 2e-3)):
        changed = replace(plan, run=replace(plan.run, tracking=tracking, seed=int(lr * 1e3)))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(feed, "END_S", 600.0)
            trackers = Trackers(wanted_trackers(["all"]), directory, say=lambda line: None)
        trackers.start(changed, "a name")
        for step in steps:
            trackers.step(make_step(step, loss=LOSSES[step], eval_loss=1.5 if step == 5 else None))
        trackers.finish(make_run_report())
        trackers.close(replace(END, files=tuple(str(directory / name) for name in NAMES)))
        assert not [one for one in trackers.tracked if one.failure]


def tracked_by(run, tracker):
    found = [one for one in read_tracked(run) if one.tracker == tracker]
    if not found:
        pytest.skip(f"{tracker} is not installed: pip install 'fitune[{tracker}]'")
    assert (found[0].sent, found[0].lost, found[0].failure) == (6, 0, "")
    return found[0]


def require_same_losses(found):
    assert found.keys() == LOSSES.keys()
    for step, loss in LOSSES.items():
        assert found[step] == loss or (math.isnan(found[step]) and math.isnan(loss))


def test_wandb(run):
    """Two offline files of one run, by wandb's own messages; the client's ``wandb sync`` would send both."""
    tracked = tracked_by(run, "wandb")
    losses, summary, files, codes = {}, {}, set(), []
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    for folder in folders:
        (log,) = folder.glob("*.wandb")
        for record in wandb_records(log):
            if record.HasField("run"):
                head = record.run
                assert (head.run_id, head.display_name, head.project) == (
                    tracked.run_id,
                    "a name",
                    "a-project",
                )
                assert not head.host
                assert not head.git.remote_url
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            values = {
                one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item
            }
            if "train/loss" in values:
                losses[values["step"]] = float(values["train/loss"])
            summary |= {one.key: json.loads(one.value_json) for one in record.summary.update}
            files |= {one.path for one in record.files.files}
        assert SECRET.encode() not in log.read_bytes()
        copies = [folder / "files" / name for name in NAMES]
        assert all(SECRET not in copy.read_text() and "[hidden]" in copy.read_text() for copy in copies)
    require_same_losses(losses)
    assert summary["predicted/peak_of_tensors"] == 1000.0
    assert (summary["status"], codes) == ("complete", [0, 0])
    assert set(NAMES) <= files
    assert any("table.json" in name for name in files)
    pattern = Path(tracked.command.removeprefix("wandb sync "))
    assert sorted(pattern.parent.glob(pattern.name)) == folders


def wandb_records(log):
    """Messages of a .wandb file: pieces of at most 32 KiB blocks, each after a checksum, its length and its kind."""
    from wandb.proto import wandb_internal_pb2

    content, place, message = log.read_bytes(), 7, b""  # after its own mark and version
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def test_mlflow(run):
    tracked = tracked_by(run, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent / 'store.db'}")
    experiment = client.get_experiment_by_name("a-project")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (
        tracked.run_id,
        "a name",
        "FINISHED",
    )
    assert found.data.params["run.seed"] == "1"
    assert found.data.tags["now.run.seed"] == "2"
    require_same_losses({m.step: m.value for m in client.get_metric_history(tracked.run_id, "train/loss")})
    assert found.data.metrics["measured/peak_of_tensors"] == 900.0
    artifacts = {one.path for one in client.list_artifacts(tracked.run_id)}
    assert artifacts == {*NAMES, "predicted_and_measured.md"}
    text = Path(client.download_artifacts(tracked.run_id, "report.html")).read_text()
    assert SECRET not in text
    assert not {name for name in found.data.tags if name in ("mlflow.user", "mlflow.source.name")}


def test_comet(run):
    tracked = tracked_by(run, "comet")
    archives = sorted((run / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    assert len(archives) == 2
    losses = {}
    for archive, strategy in zip(archives, ("create", "get"), strict=True):
        with zipfile.ZipFile(archive) as content:
            head = json.loads(content.read("experiment.json"))
            assert (head["offline_id"], head["project_name"]) == (tracked.run_id, "a-project")
            assert head["resume_strategy"] == strategy
            messages = [json.loads(line) for line in content.read("messages.json").splitlines()]
            assert all(SECRET.encode() not in content.read(name) for name in content.namelist())
        kinds = {message["type"] for message in messages}
        assert not kinds & {"system_details", "git_metadata", "installed_packages", "file_name", "stdout"}
        for metric in (m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"):
            if metric["metricName"] == "train/loss":
                losses[metric["step"]] = float(metric["metricValue"])
        assets = {
            m["payload"]["additional_params"]["fileName"] for m in messages if m["type"] == "asset_upload"
        }
        assets |= {m["payload"].get("additional_params", {}).get("fileName") for m in messages}
        assert {*NAMES, "predicted_and_measured.csv"} <= assets
    require_same_losses(losses)
    pattern = Path(tracked.command.removeprefix("comet upload "))
    assert set(pattern.parent.glob(pattern.name)) == set(archives)


def test_tensorboard(run):
    """A resumed run is shown once: the steps that were done again are purged."""
    tracked_by(run, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5]
    require_same_losses({event.step: event.value for event in losses})
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]
    }
    assert texts["run"] == "a name"
    assert "| Peak of tensors | 1000 B | 900 B | +11.1 % |" in texts["predicted and measured"]
    assert '"rows_read": 7' in texts["data"]
    assert SECRET not in str(texts)
