"""Mistakes as users make them, through the command line: one readable error, a non-zero exit code, nothing lost."""

import json
import shutil
from pathlib import Path

import pytest

import fitune
from conftest import settings_of
from fitune.data.dataset import TokenDataset
from fitune.data.loader import Loader
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


def test_export_does_not_replace_a_folder_it_was_pointed_at(call, shop, data_file, tmp_path):
    rows = copy_of(data_file.parent, tmp_path / "rows")
    before = contents(rows), contents(shop)
    call("export", shop, "--out", rows).ends(2, "not empty")
    assert (contents(rows), contents(shop)) == before


def test_overwrite_removes_what_a_run_wrote_and_nothing_else_once_the_new_one_can_begin(
    train, saved, tmp_path
):
    (saved / "thesis.txt").write_text("three years")
    before = contents(saved)
    (tmp_path / "broken.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question"\n')
    for data in (tmp_path / "missing.jsonl", tmp_path / "broken.jsonl"):
        train("--overwrite", data=data).ends(2)
        assert contents(saved) == before
    train("--overwrite", max_steps=1).ends(0)
    assert (saved / "thesis.txt").read_text() == "three years"
    assert not list(saved.glob("checkpoints/step-*"))
    assert report_of(saved).steps == 1
    assert (saved / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_an_output_dir_that_cannot_be(train, tmp_path, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "x" * 300, "file/run", "link", "loop"):
        err = train(*words, output_dir=tmp_path / name).ends(2, "output_dir")
        assert "try:" in err or "at most 255 are allowed" in err


def test_a_disk_too_small_is_found_before_training(train, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024**2))
    ended = train(save_steps=1)
    ended.ends(2, "3 checkpoints", "1.0 MiB free")
    assert "step 1" not in ended.out
    assert not (tmp_path / "run").exists()


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
    try:
        rows.write_bytes(content + content)
        changed = train(**earlier)
        rows.unlink()
        gone = train(**earlier)
    finally:
        rows.write_bytes(content)
    changed.ends(0, f"already complete, but {rows} changed since; --overwrite starts anew")
    gone.ends(0, "already complete;")


def test_a_run_made_longer_still_compares_its_samples(train, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_SAMPLE_TOKENS", 2)
    settings = {"save_steps": 1, "val_fraction": 0.2}
    train(**settings, samples=1, max_steps=1).ends(0)
    train("--resume", **settings, samples=2).ends(0)
    first, second = report_of(tmp_path / "run").samples
    assert "not asked" not in first.before
    assert "not asked" in second.before


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("data", lambda content: content.replace(b"plus", b"minus"), "training rows changed"),
        ("model", lambda content: content[:-4] + bytes(4), "weights in"),
    ],
)
def test_resume_refuses_rows_and_a_base_that_changed_under_the_same_name(train, earlier, file, change, said):
    before = contents(Path(earlier["output_dir"]))
    file = Path(earlier[file])
    file = file / "model.safetensors" if file.is_dir() else file
    content = file.read_bytes()
    try:
        file.write_bytes(change(content))
        ended = train("--resume", **earlier | {"max_steps": 4})
    finally:
        file.write_bytes(content)
    ended.ends(2, said)
    assert contents(Path(earlier["output_dir"])) == before


def test_resume_starts_anew_only_when_there_was_nothing(train, saved, tmp_path):
    train("--resume", output_dir=tmp_path / "new", max_steps=1).ends(0, "nothing to resume")
    for file in saved.glob("checkpoints/step-*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    before = contents(saved)
    train("--resume", save_steps=1, max_steps=4).ends(2, "no checkpoint", "step-2")
    assert contents(saved) == before


def test_resume_from_the_directory_of_a_run_names_its_checkpoint(train, earlier, tmp_path):
    train(output_dir=tmp_path / "other", resume=earlier["output_dir"]).ends(2, "checkpoints/step-2")


# Data (rows 10 to 12)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"question": "a", "answer": "b"}\n'.encode("utf-16"), "UTF-16"),
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


def test_evaluating_on_the_training_rows_is_said_and_on_none_is_refused(train, data_file, tmp_path):
    copy = shutil.copy(data_file, tmp_path / "copy.jsonl")
    train(eval_steps=1).ends(2, "nothing to evaluate on")
    assert not (tmp_path / "run").exists()
    train(eval_data=copy, max_steps=1).ends(0, f"note: eval_data {copy} is also trained on")


def test_what_is_most_often_a_slip_is_noted_in_the_plan(call, model_folder):
    words = ("--lora-r", 64, "--tuning", "lora", "--max-steps", 3, "--num-epochs", 2)
    call("plan", "--model", model_folder, "--gpu", "cpu", "--seq-len", 64, *words).ends(
        0, "note on lora_r", "note on num_epochs: max_steps 3"
    )


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
    words = ("--model", "no/such-model", "--data", data_file, "--out", tmp_path / "out")
    call("score", *words).ends(2, "does not answer", "try: ")
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
