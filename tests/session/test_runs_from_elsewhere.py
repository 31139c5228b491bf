"""A run is used from any folder, and after it moved together with its base."""

import shutil

import fitune
from fitune.session.named_models import find_model
from fitune.values.plan import Full
from runs import written_plan

KEYS = """\
model: base/model
data: rows.jsonl
tuning: lora
precision: fp32
gpu: cpu
seq_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 1
save_steps: 1
samples: 0
output_dir: run
"""


def test_a_run_is_used_from_any_folder_and_moves_with_its_base(
    model_folder, data_file, tmp_path, monkeypatch
):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    shutil.copytree(model_folder, here / "base" / "model")
    shutil.copy(data_file, here / "rows.jsonl")
    (here / "r.yaml").write_text(KEYS)
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    fitune.train("r.yaml")
    monkeypatch.chdir(elsewhere)
    assert find_model(str(here / "run")).model == str(here / "base" / "model")
    assert fitune.report(here / "run").run is not None
    again = {"resume": True, "max_steps": 2, "output_dir": here / "run"}
    assert fitune.train(here / "r.yaml", **again).steps == 2
    assert fitune.train(here / "run" / "recipe.yaml", output_dir=here / "run").steps == 2
    here.rename(tmp_path / "moved")
    run = tmp_path / "moved" / "run"
    assert find_model(str(run)).model == str(tmp_path / "moved" / "base" / "model")
    assert fitune.export(run).path == run / "merged"
    once_more = {"resume": True, "max_steps": 3, "output_dir": run}
    assert fitune.train(tmp_path / "moved" / "r.yaml", **once_more).steps == 3


def test_what_a_recipe_leaves_open_is_that_of_the_run_it_goes_on_with(
    model_folder, data_file, tmp_path, monkeypatch
):
    """Left open on one processor, precision is fp32; two of them would take bf16-master."""
    shutil.copytree(model_folder, tmp_path / "base" / "model")
    shutil.copy(data_file, tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    open_keys = KEYS.replace("precision: fp32\n", "").replace("tuning: lora\n", "")
    (tmp_path / "open.yaml").write_text(open_keys)
    first = fitune.train("open.yaml", tuning="full", precision="bf16-master")
    assert fitune.plan("open.yaml").chosen.plan.precision.value == "fp32"
    again = fitune.train("open.yaml", resume=True, max_steps=2)
    assert (first.steps, again.steps, again.status) == (1, 2, "complete")
    plan = written_plan(tmp_path / "run")
    assert (plan.tuning, plan.precision.value) == (Full(), "bf16-master")
