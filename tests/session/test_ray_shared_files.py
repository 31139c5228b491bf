"""Ray's nodes are asked for what all of them must see: the run directory, the model and the data."""

import os

import pytest

from fitune.errors import RunDirectoryError
from fitune.session.clusters import ray_nodes
from fitune.session.clusters.ray_nodes import require_shared


def answering(lost):
    """A cluster of this machine and one that does not have the paths for which ``lost`` says so."""

    def ask(question, paths):
        here = question(paths)
        return {"a": here, "b": ("other", [path for path in paths if lost(path) or not os.path.exists(path)])}

    return ask


def test_an_output_dir_of_one_machine_is_refused_before_the_first_step(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(ray_nodes, "ask_nodes", answering(lambda path: path.startswith(str(run))))
    with pytest.raises(
        RunDirectoryError, match=rf"output_dir {run} is a folder of .* that node other does not"
    ) as no:
        require_shared(run, [])
    assert no.value.hint == "a folder that all nodes share (NFS or the like)"
    assert list(run.iterdir()) == []


def test_a_model_that_a_node_lacks_is_named_and_an_id_of_the_hub_is_not(tmp_path, monkeypatch):
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    data.touch()
    monkeypatch.setattr(ray_nodes, "ask_nodes", answering(lambda path: path == str(model)))
    with pytest.raises(RunDirectoryError, match=rf"node other has no {model}"):
        require_shared(tmp_path / "run", [str(model), str(data), "owner/name"])
    monkeypatch.setattr(ray_nodes, "ask_nodes", answering(lambda path: False))
    require_shared(tmp_path / "run", [str(model), str(data), "owner/name"])
