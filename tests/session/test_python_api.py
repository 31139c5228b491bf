"""fitune as a library: the same runs as by the commands, typed answers, nothing printed, errors that can be caught."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fitune
from fitune.errors import DataError, NothingFits, RecipeError, SystemFailed
from fitune.models.language_model import LanguageModel
from fitune.session.events import Compared, DataRead, Exported, Planned, Predicted, RanOutOfMemory
from fitune.session.recipes.reading import recipe_of
from fitune.values.reports import StepReport
from runs import losses, same_weights, set_words, written_plan


def test_the_keywords_are_the_keys_of_a_recipe():
    """keywords.pyi, which editors read, is what the recipe makes now."""
    made = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "keywords.py"))
    assert made["FILE"].read_text() == made["stub"](), "python bench/keywords.py writes it anew"


def test_a_mapping_is_a_recipe_too_and_nothing_else_is():
    report = fitune.plan({"base_model": "gpt2", "gpu": "h100", "tuning": "full"}, tuning="lora")
    assert report.chosen == fitune.plan(model="gpt2", gpu="h100", tuning="lora").chosen
    with pytest.raises(RecipeError, match="cannot be read from 3"):
        fitune.plan(3)


def test_keywords_win_over_the_file_and_none_leaves_a_setting_open(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: gpt2\nmicro_batch_size: 4\nseq_len: 128\n")
    recipe = recipe_of(file, {"seq_len": 256, "micro_batch_size": None, "data": (Path("a.jsonl"), "b.jsonl")})
    assert (recipe.model, recipe.seq_len, recipe.micro_batch_size) == ("gpt2", 256, None)
    assert [source.path for source in recipe.data] == ["a.jsonl", "b.jsonl"]
    again = recipe_of(recipe, {"lora_rank": 8})  # another framework's name
    assert (again.seq_len, again.lora_r) == (256, 8)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"modle": "gpt2"}, RecipeError, "model"),
        ({}, RecipeError, "no model is named"),
        ({"model": "meta-llama/Llama-2-70b-hf", "gpu": "v100-32gb", "tuning": "full"}, NothingFits, "GiB"),
    ],
)
def test_what_cannot_be_is_an_error_to_catch(wrong, error, said):
    with pytest.raises(error, match=said):
        fitune.plan(**wrong)


def test_what_is_planned_is_rehearsed(settings):
    report, rehearsed = fitune.plan(**settings), fitune.rehearse(**settings)
    assert rehearsed.report.chosen.estimate == report.chosen.estimate
    estimated = report.chosen.estimate.memory.tensor_peak_bytes
    assert rehearsed.rehearsal.tensor_peak_bytes == pytest.approx(estimated, rel=0.02)
    assert "peak of tensors" in fitune.explain(rehearsed)
    assert "peak of tensors" in rehearsed._repr_html_()


def test_a_run_by_functions_is_the_run_by_commands(settings, tmp_path, call, capsys):
    events = []
    by_functions = fitune.train(**settings, progress=events.append)
    exported = fitune.export(tmp_path / "run")
    reported = fitune.report(tmp_path / "run")
    graded = fitune.score(exported.path, f"{settings['data']}#2", tmp_path / "scores", max_new_tokens=2)
    assert capsys.readouterr() == ("", "")
    assert by_functions.status == "complete"
    assert reported.run == by_functions
    assert (graded.rows, graded.failed) == (2, 0)
    kinds = [type(event) for event in events]
    assert [kind for kind in kinds if kind in (Planned, DataRead, Predicted, StepReport, Compared, Exported)] == [
        Planned, DataRead, Predicted, StepReport, StepReport, Compared, Exported,
    ]  # fmt: skip

    commands = tmp_path / "commands"
    call("train", *set_words({**settings, "output_dir": commands})).ends(0)
    call("export", commands).ends(0)
    assert what_was_done(tmp_path / "run") == what_was_done(commands)
    assert same_weights(tmp_path / "run" / "merged", commands / "merged")
    assert fitune.train(**settings) == by_functions  # complete already


def what_was_done(run):
    """The plan, the recipe and every loss, but for the run's place and what the disk has free."""
    plan = written_plan(run)
    hardware = replace(plan.hardware, nvme_bytes=0)
    plan = replace(plan, hardware=hardware, run=replace(plan.run, output_dir=""))
    return plan, (run / "recipe.yaml").read_text().replace(str(run), ""), losses(run)


def test_out_of_memory_the_run_goes_on_in_this_process(settings, monkeypatch):
    real, calls = LanguageModel.loss_and_gradient, [0]

    def failing_once(*words, **named):
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError
        return real(*words, **named)

    monkeypatch.setattr(LanguageModel, "loss_and_gradient", failing_once)
    events = []
    report = fitune.train(**settings, progress=events.append)
    assert report.status == "complete"
    assert [type(event) for event in events].count(RanOutOfMemory) == 1
    assert "micro_batch_size 2 × 4 accumulated" in report.retries[0].after


def test_what_the_system_refuses_is_an_error_to_catch(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("fitune.session.reported.report_run", full)
    with pytest.raises(SystemFailed, match="No space left on device") as failed:
        fitune.report("anywhere")
    assert failed.value.exit_code == 1


def test_what_has_no_text_is_refused_by_name():
    with pytest.raises(RecipeError, match="str"):
        fitune.explain("runs/first")


@pytest.mark.parametrize(
    ("allowed", "why"), [(False, "only when that is allowed"), (True, "cannot be downloaded")]
)
def test_score_opens_addresses_that_are_allowed_alone(model_folder, tmp_path, monkeypatch, allowed, why):
    monkeypatch.setattr("fitune.stores.opening.WAITS_S", ())
    with pytest.raises(DataError, match=why):
        fitune.score(model_folder, "https://127.0.0.1:1/rows.jsonl", tmp_path / "out", allow_https=allowed)


def test_a_notebook_shows_a_plan_and_a_run_and_writes_steps_over_each_other(
    settings, tmp_path, monkeypatch, capsys
):
    assert "✔ FITS" in fitune.plan(**settings)._repr_html_()
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    report = fitune.train(**settings | {"max_steps": 3, "output_dir": tmp_path / "<b>"})
    steps = capsys.readouterr().out.split("\r")[1:]
    assert [step[:8] for step in steps] == ["step 1/3", "step 2/3", "step 3/3"]
    assert not steps[1].endswith("\n")
    assert "3 steps" in report._repr_html_()
    assert "&lt;b&gt;/adapter" in report._repr_html_()
    assert "Throughput" in fitune.report(tmp_path / "<b>")._repr_html_()
