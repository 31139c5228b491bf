"""An export on its way to the Hub: what is sent, what is asked before a run, and what is said where it fails."""

import os
import re
import shutil
from pathlib import Path

import pytest

import fitune
from fitune.errors import RecipeError, RunDirectoryError, StoreError
from hub_server import TOKEN, serving
from runs import contents


@pytest.fixture
def hub(monkeypatch):
    with serving(monkeypatch) as found:
        yield found


def puts(hub):
    return [path for method, path in hub.asked if method == "PUT"]


def test_a_run_ends_with_its_export_on_the_hub(hub, settings, tmp_path):
    told = []
    fitune.train(**settings, push_to_hub="shop-adapter", progress=lambda event: told.append(str(event)))
    assert hub.files["me/shop-adapter"] == contents(tmp_path / "run" / "adapter")
    assert hub.private["me/shop-adapter"] is True
    assert f"on the Hub: {hub.url}/me/shop-adapter (private)" in told
    assert any(line.startswith("note: its adapter_config.json names the base by a folder") for line in told)
    assert hub.asked.index(("POST", "/api/repos/create")) < hub.asked.index(("POST", "/api/validate-yaml"))
    everything = "\n".join(told) + "".join(
        file.read_text("utf-8", "replace") for file in (tmp_path / "run").rglob("*") if file.is_file()
    )
    assert TOKEN not in everything


def test_an_export_that_is_there_is_sent_as_it_is_and_once(hub, shop, call):
    before = (shop / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    for _ in range(2):
        call("export", shop, "--push-to-hub", "team/shop", "--hub-public").ends(0, "(everybody can read it)")
    assert hub.private["team/shop"] is False
    assert hub.files["team/shop"] == contents(shop / "adapter")
    assert len(puts(hub)) == 1
    assert (shop / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == before


def test_an_export_is_taken_as_it_is_where_the_runs_files_are_younger(hub, shop, tmp_path):
    """As where a run was copied, or fetched from a store."""
    copied = tmp_path / "copied"
    shutil.copytree(shop, copied)
    os.utime(copied / "metrics.jsonl")
    fitune.export(copied, push_to_hub="me/copied")
    assert hub.files["me/copied"] == contents(shop / "adapter")


def test_where_there_is_no_run_nothing_is_made_on_the_hub(hub, tmp_path):
    with pytest.raises(RunDirectoryError):
        fitune.export(tmp_path / "typo", push_to_hub="me/typo")
    assert hub.files == {}


def test_a_merged_model_is_made_and_sent(hub, shop, tmp_path):
    sent = fitune.export(shop, tmp_path / "whole", kind="merged", push_to_hub="me/whole").path
    assert hub.files["me/whole"] == contents(sent)
    assert "base_model" not in (sent / "README.md").read_text()  # a folder is no model on the Hub


def test_what_was_cut_off_is_sent_by_the_command_that_is_named(hub, settings, tmp_path):
    hub.takes_large = False
    with pytest.raises(
        StoreError, match="not on the Hub: push_to_hub = me/x: .*; the export is whole in"
    ) as cut:
        fitune.train(**settings, push_to_hub="me/x")
    assert cut.value.exit_code == 1
    again = f"fitune export {tmp_path / 'run'} --push-to-hub me/x"
    assert cut.value.hint.startswith(f"{again} sends what is missing")
    assert hub.files["me/x"] == {}
    hub.takes_large = True
    fitune.export(tmp_path / "run", push_to_hub="me/x")
    assert hub.files["me/x"] == contents(tmp_path / "run" / "adapter")
    fitune.train(**settings, push_to_hub="me/x", resume=True)  # complete already: nothing is sent twice
    assert len(puts(hub)) == 2


def not_trained(settings, error, said, **more):
    with pytest.raises(error) as refused:
        fitune.train(**settings | more)
    assert not Path(settings["output_dir"]).exists()
    assert TOKEN not in str(refused.value)
    assert said in re.sub(r"\s+", " ", str(refused.value))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "push_to_hub = me/x, but the Hub is switched off (HF_HUB_OFFLINE) try: HF_HUB_OFF"),
        ({"HF_TOKEN": ""}, "push_to_hub = me/x, and there is no token of the Hub try: hf auth login, or HF_TOKEN"),
        ({"HF_TOKEN": "hf_" + "x" * 34}, "push_to_hub = me/x: the Hub does not know the token try: hf auth login"),
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_pushed_does_not_start(
    hub, settings, tmp_path, monkeypatch, environment, words
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    not_trained(settings, StoreError if "know" in words else RecipeError, words, push_to_hub="me/x")


def test_what_the_hub_refuses_is_refused_before_training(hub, settings, monkeypatch):
    refused = "push_to_hub = others/x: the token may not write there: "  # and what the Hub says
    not_trained(settings, StoreError, refused, push_to_hub="others/x")
    hub.private["me/open"], hub.files["me/open"] = False, {}
    refused = "push_to_hub = me/open is there, and everybody can read it try: hub_public: true"
    not_trained(settings, RecipeError, refused, push_to_hub="me/open")
    hub.may_write = False  # a token that reads, and a repository that is there
    refused = "push_to_hub = me/open: the token may not write there"
    not_trained(settings, StoreError, refused, push_to_hub="me/open", hub_public=True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused = "push_to_hub = me/x: http://127.0.0.1:9 does not answer try: try again where"
    not_trained(settings, StoreError, refused, push_to_hub="me/x")


@pytest.mark.parametrize(
    "name", ["a/b/c", "me/--x", "me/x.git", "me/", "me/" + "x" * 96, "https://hf.co/me/x"]
)
def test_a_name_that_the_hub_does_not_take_is_refused_by_the_recipe(name):
    with pytest.raises(RecipeError, match="push_to_hub = .*is no name on the Hub: OWNER/NAME of at most 96"):
        fitune.plan(model="gpt2", gpu="h100", push_to_hub=name)


def test_the_words_of_other_trainers_and_what_makes_no_sense():
    with pytest.raises(RecipeError, match="names the repository here: OWNER/NAME"):
        fitune.plan(model="gpt2", gpu="h100", push_to_hub=True)
    with pytest.raises(RecipeError, match="hub_public: true, and nothing is pushed"):
        fitune.plan(model="gpt2", gpu="h100", hub_public=True)
    report = fitune.plan({"model": "gpt2", "gpu": "h100", "hub_model_id": "me/x"}, tuning="lora")
    assert report.chosen.plan.run.push_to_hub == "me/x"
    assert "the Hub: me/x gets the export, private" in report.decisions
