"""An export of several processes that fails: all of them save a checkpoint together, and it is exported from there."""

import pytest

from fitune.session.exporting import export_run
from several import Job, train_on
from train.test_several_processes import divided

CASES = {"lora": ("adapter", 0), "full": ("model", 3)}
"""Method -> the folder of its export, and the stage: with stage 3 the others hand their weights to the first one."""


@pytest.fixture(scope="module")
def ended(model_folder, data_file, tmp_path_factory):
    from conftest import plan_of

    folder = tmp_path_factory.mktemp("unexported")
    jobs = []
    for tuning, (name, stage) in CASES.items():
        run = folder / tuning
        run.mkdir()
        (run / name).write_text("in the way")
        plan = plan_of(
            model_folder, data_file, run, tuning=tuning, max_steps=2, save_steps=0, precision="fp32"
        )
        jobs.append(Job(plan=divided(plan, 2, stage, run)))
    return folder, train_on(2, jobs, folder / "jobs")


@pytest.mark.parametrize("tuning", CASES)
def test_ranks_save_together_what_could_not_be_exported(ended, tuning):
    folder, said = ended
    run = folder / tuning
    first, second = (rank[list(CASES).index(tuning)]["error"] for rank in said)
    assert f"weights are saved in {run / 'checkpoints' / 'step-2'}, but exporting failed" in first
    assert "already exists" in second
    name, _ = CASES[tuning]
    (run / name).unlink()
    export_run(run, None, "adapter" if tuning == "lora" else "full")
    assert list((run / name).glob("*.safetensors"))
