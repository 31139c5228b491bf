"""Scoring on Ray's workers writes the bytes of a scoring in one process."""

import pytest
import torch

from fitune.demo.files import training_exercises
from fitune.launch.ray_cluster import RayPlace
from fitune.recipe.score_recipe import score_recipe
from fitune.session.clusters import score_on_ray
from fitune.session.score.scoring import score_dataset
from jsonl import read_lines, write_lines
from ray_runs import Heard, KilledOnce

pytestmark = pytest.mark.ray
ROWS = 40
"""Three shards of 16."""


def rows_in(path):
    rows = [{**row, "id": f"row-{number}"} for number, row in enumerate(training_exercises(ROWS, seed=2))]
    rows[3] = {"id": "row-3", "prompt": "1 + " * 400, "completion": "1"}  # longer than the context
    return write_lines(path, rows)


def test_a_killed_worker_leaves_every_id_once_and_the_bytes_of_one_process(
    cluster, model_folder, tmp_path, monkeypatch
):
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FITUNE_TEST_KILLED", str(tmp_path / "killed"))
    monkeypatch.setattr(score_on_ray, "ScoringWorker", KilledOnce)
    data, heard = rows_in(tmp_path / "rows.jsonl"), Heard()

    def scored(out, place):
        recipe = score_recipe(
            model=str(model_folder), data=str(data), out=tmp_path / out, graders=["contains"], max_new_tokens=6,
            batch_size=1,
        )  # fmt: skip
        return score_dataset(recipe, emit=heard, place=place)

    here = scored("here", None)
    there = scored("there", RayPlace(fewest=2, most=2))
    assert (tmp_path / "killed").exists()
    assert "another one takes over" in heard.text
    assert "2 workers on Ray" in heard.text
    lines = read_lines(tmp_path / "there" / "answers.jsonl")
    assert [line["custom_id"] for line in lines] == [f"row-{number}" for number in range(ROWS)]
    assert there.failed == here.failed == 1
    for file in sorted((tmp_path / "here").rglob("*")):
        twin = tmp_path / "there" / file.relative_to(tmp_path / "here")
        if file.is_file() and file.name not in ("report.json", "score.html"):
            assert twin.read_bytes() == file.read_bytes(), file.name
