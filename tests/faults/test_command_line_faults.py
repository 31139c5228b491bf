"""Mistakes as users make them, through the command line: one readable error, a non-zero exit code, nothing lost."""

import json
import shutil
from pathlib import Path

import pytest

import fitune
from conftest import settings_of
from fitune.data.dataset import TokenDataset
from fitune.data.loader import Loader
from fitune.errors import SystemFailed
from fitune.session.train import training
from fitune.values import hub
from fitune.values.plan import Batch
from runs import contents, report_of


def copy_of(folder, to):
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_data_is_looked_at_before_a_plan_is_printed(train, tmp_path):
    code, out, err = train(data=tmp_path / "nowhere.jsonl")
    assert code == 2
    assert "nowhere.jsonl" in err
    assert "FITS" not in out + err


# A directory that is somebody's (rows 6 and 26)


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_run_in_the_model_folder_is_refused(train, model_folder, tmp_path, words):
    model = copy_of(model_folder, tmp_path / "model")
    before = contents(model)
    train(*words, model=model, output_dir=model).ends(2, "output_dir", str(model))
    assert contents(model) == before


def test_a_run_in_the_folder_its_rows_are_read_from_is_refused(train, data_file, tmp_path):
    rows = copy_of(data_file.parent, tmp_path / "rows")
    train(data=rows, output_dir=rows / "run").ends(2, "output_dir", "data", str(tmp_path / "runs" / "run"))
    assert not (rows / "run").exists()


def test_results_do_not_replace_a_folder_that_no_run_wrote(train, tmp_path):
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "model" / "weights").write_text("mine")
    train(tuning="full", output_dir=project).ends(2, "model/")
    assert contents(project) == {"model/weights": b"mine"}


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(train, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("three years")
    assert train(max_steps=1)[0] == 0
    assert train("--overwrite", max_steps=1)[0] == 0
    assert (run / "thesis.txt").read_text() == "three years"
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_export_does_not_replace_a_folder_it_was_pointed_at(call, shop, data_file, tmp_path):
    shutil.copytree(shop, tmp_path / "run")
    rows = copy_of(data_file.parent, tmp_path / "rows")
    before = contents(rows)
    call("export", tmp_path / "run", "--out", rows).ends(2, "not empty")
    assert contents(rows) == before
    assert [call("export", tmp_path / "run")[0] for _ in range(2)] == [0, 0]  # its own may be made again


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_an_output_dir_that_cannot_be(train, tmp_path, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for output_dir in (
        tmp_path / "file",
        tmp_path / ("x" * 300),
        tmp_path / "file" / "run",
        tmp_path / "link",
        tmp_path / "loop",
    ):
        err = train(*words, output_dir=output_dir).ends(2, "output_dir")
        assert "try:" in err or "at most 255 are allowed" in err


def test_a_disk_too_small_is_found_before_training(train, tmp_path, monkeypatch):
    from fitune.checkpoint import commit

    usage = commit.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: usage._replace(free=1024**2))
    code, out, err = train(save_steps=1)
    assert code == 2
    assert "3 checkpoints" in err
    assert "1.0 MiB free" in err
    assert "step 1" not in out
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_on_the_way_is_a_failure(train, tmp_path, monkeypatch):
    from fitune.checkpoint import commit

    monkeypatch.setattr("fitune.session.train.beginning.require_room_on_disk", lambda plan: None)
    usage = commit.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: usage._replace(free=1024))
    code, out, err = train(save_steps=1)
    assert code == 1
    assert "step 1" in out
    assert "checkpoint step-1 needs" in err
    assert report_of(tmp_path / "run").status == "failed"
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["LINE"]


# A run that is there already (rows 4, 7 and 9)


@pytest.fixture(scope="module")
def earlier(model_folder, data_file, tmp_path_factory):
    """Settings of a run that is complete, of a model and rows of its own: what a test changes there it puts back."""
    folder = tmp_path_factory.mktemp("earlier")
    model, rows = copy_of(model_folder, folder / "model"), shutil.copy(data_file, folder / "rows.jsonl")
    settings = settings_of(model, rows, folder / "run", save_steps=1)
    fitune.train(**settings)
    return settings


def test_a_complete_run_is_left_alone_unless_other_settings_are_wanted(train, earlier):
    run = Path(earlier["output_dir"])
    before = contents(run)
    for words in ((), ("--resume",)):
        train(*words, **earlier).ends(0, "already complete")
    train(**earlier | {"learning_rate": 5e-3}).ends(2, "schedule.learning_rate", "0.005")
    train(**earlier | {"max_steps": 4}).ends(2, "--resume")
    assert contents(run) == before


def test_a_complete_run_says_which_data_changed_since(train, earlier):
    rows = Path(earlier["data"])
    content = rows.read_bytes()
    rows.write_bytes(content + content)
    changed = train(**earlier)
    rows.unlink()
    gone = train(**earlier)
    rows.write_bytes(content)
    changed.ends(0, f"already complete, but {rows} changed since; --overwrite starts anew")
    gone.ends(0, "already complete;")


def test_a_run_made_longer_still_compares_its_samples(train, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_SAMPLE_TOKENS", 2)
    settings = {"save_steps": 1, "val_fraction": 0.2}
    assert train(**settings, samples=1)[0] == 0
    assert train("--resume", **settings, samples=2, max_steps=3)[0] == 0
    first, second = report_of(tmp_path / "run").samples
    assert "not asked" not in first.before
    assert "not asked" in second.before


def test_resume_refuses_rows_and_a_base_that_changed_under_the_same_name(train, earlier):
    run = Path(earlier["output_dir"])
    before = contents(run)
    for file, said in (
        (Path(earlier["data"]), "training rows changed"),
        (Path(earlier["model"]) / "model.safetensors", "weights in"),
    ):
        content = file.read_bytes()
        file.write_bytes(
            content.replace(b"plus", b"minus") if file.suffix == ".jsonl" else content[:-4] + bytes(4)
        )
        ended = train("--resume", **earlier | {"max_steps": 4})
        file.write_bytes(content)
        ended.ends(2, said)
        assert contents(run) == before


def test_resume_starts_anew_only_when_there_was_nothing(train, tmp_path):
    train("--resume", save_steps=1).ends(0, "nothing to resume")
    for file in (tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    before = contents(tmp_path / "run")
    train("--resume", save_steps=1, max_steps=4).ends(2, "no checkpoint", "step-2")
    assert contents(tmp_path / "run") == before


def test_resume_from_the_directory_of_a_run_names_its_checkpoint(train, earlier, tmp_path):
    train(output_dir=tmp_path / "other", resume=earlier["output_dir"]).ends(2, "checkpoints/step-2")


def test_the_report_says_when_a_run_has_not_ended(call, shop, tmp_path):
    shutil.copytree(shop, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()  # as a kill leaves it
    call("report", tmp_path / "run").ends(0, "nobody runs it, and it wrote no report")


# Data (rows 10 to 12)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"question": "a", "answer": "b"}\n'.encode("utf-16"), "UTF-16"),
        ("rows.csv", "question,answer\na,b\n".encode("utf-16"), "UTF-16"),
        ("rows.jsonl", b"\x1f\x8b\x08\0\0\0\0", "gzip"),
        ("rows.csv", b"question|answer\na|b\n", "commas"),
        ("rows.csv", b'question,answer\na,b\n"c,d\ne,f\n', "rows.csv:3: a quote opens"),
    ],
)
def test_files_of_another_kind_are_named(train, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    train(data=tmp_path / name).ends(2, said, "try:")


def test_an_unclosed_quote_counts_the_lines_it_swallowed(train, tmp_path):
    rows = "".join(f"what is {n}?,it is {n}\n" for n in range(4))
    (tmp_path / "rows.csv").write_text(f'question,answer\n{rows}"broken,row\n{rows}')
    train(data=tmp_path / "rows.csv", on_bad_row="skip").ends(0, "quote never closed (5 lines lost)")


def test_val_fraction_that_leaves_nothing_to_train_on(train):
    train(val_fraction=0.9999).ends(2, "val_fraction 0.9999 holds out every row")


def test_evaluating_on_the_training_rows_is_said(train, data_file, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_text(data_file.read_text())
    train(eval_data=copy, max_steps=1).ends(0, f"note: eval_data {copy} is also trained on")


# Settings (row 25)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 2**70}, "seed"),
        ({"max_steps": "1" + "0" * 5000}, "max_steps"),
        ({"eval_steps": 1}, "nothing to evaluate on"),
    ],
)
def test_settings_that_cannot_be_honoured(train, tmp_path, settings, said):
    train(**settings).ends(2, said)
    assert not (tmp_path / "run").exists()


def test_a_rank_beyond_the_width_of_the_model_is_remarked_on(call, model_folder):
    call(
        "plan", "--model", model_folder, "--gpu", "cpu", "--seq-len", 64, "--lora-r", 64, "--tuning", "lora"
    ).ends(0, "note on lora_r")


def test_a_setting_that_another_overrules_is_named(call, model_folder):
    call(
        "plan", "--model", model_folder, "--gpu", "cpu", "--seq-len", 64, "--max-steps", 3, "--num-epochs", 2
    ).ends(0, "note on num_epochs: max_steps 3")


def test_an_option_without_its_value_is_no_model_called_true(call):
    code, out, _ = call("plan", "--model", "--json")
    assert code == 2
    assert json.loads(out)["error"]["message"] == "--model has no value"


def test_a_run_of_very_many_epochs_begins_at_once():
    import numpy as np

    rows = TokenDataset(np.ones(8, np.int32), np.ones(8, np.bool_), np.arange(0, 9, 2))
    loader = Loader(rows, Batch(micro_batch_size=2, accumulation=1, seq_len=8, packing=False), seed=0)
    for heavy in loader.heaviest(range(1, 10**9)):
        assert heavy.step < 10_000
        assert heavy.shape.tokens == 4


# Models


def test_weights_of_another_shape_are_named(train, model_folder, tmp_path):
    model = copy_of(model_folder, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    train(model=model).ends(2, "lm_head.weight (384, 32) in model.safetensors, config.json says (400, 32)")


def test_a_hub_that_does_not_answer_is_not_waited_for(call, data_file, tmp_path, monkeypatch):
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "answers", lambda url: False)
    code, out, _ = call(
        "score", "--model", "no/such-model", "--data", data_file, "--out", tmp_path / "out", "--json"
    )
    error = json.loads(out)["error"]
    assert code == 2
    assert "does not answer" in error["message"]
    assert error["hint"]
    assert constants.HF_HUB_OFFLINE is False
    assert not (tmp_path / "out").exists()


# Scoring (rows 21 and 33)


def test_rows_without_an_answer_make_the_exit_code(call, model_folder, data_file, tmp_path):
    code, out, err = call(
        "score", "--model", model_folder, "--data", data_file, "--out", tmp_path / "out",
        "--max-new-tokens", 1000, "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 1
    assert report["failed"] == report["rows"]
    assert "no answer to" in err


# The system


def test_an_error_of_the_system_is_no_traceback(call, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "/somewhere/report.html")

    monkeypatch.setattr("fitune.session.reported.report_run", full)
    code, out, _ = call("report", "run", "--json")
    assert code == SystemFailed.exit_code == 1
    assert json.loads(out)["error"]["message"] == "/somewhere/report.html: No space left on device"
