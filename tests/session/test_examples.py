"""docs/python.md and examples/notebook.ipynb run as they stand."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import fitune

ROOT = Path(__file__).parents[2]


def run_all(parts, where):
    """Execute pieces of Python one after another in one namespace, as a notebook does; returns the namespace."""
    names = {"__name__": "__main__"}
    for number, part in enumerate(parts, 1):
        exec(compile(part, f"{where}, part {number}", "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_about_python(folder, model_folder, data_file, capsys):
    shutil.copytree(model_folder, folder / "model")
    shutil.copy(data_file, folder / "train.jsonl")
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    parts = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    with_tasks = [part for part in parts if "score_tasks" in part]
    assert len(with_tasks) == 1
    if find_spec("lm_eval"):
        write_task(folder / "tasks")
    else:
        parts.remove(with_tasks[0])
    names = run_all(parts, "python.md")
    said = capsys.readouterr().out
    assert "NothingFits" in said
    assert "interrupted" in said
    assert (names["run"].status, names["run"].steps) == ("complete", 4)
    assert (names["scores"].rows, names["scores"].failed) == (4, 0)
    if find_spec("lm_eval"):
        (score,) = names["found"].scores
        assert (score.task, score.metric, score.rows, score.shots) == ("sums", "exact_match", 2, 1)
        assert "sums  exact_match" in fitune.explain(names["found"])


def write_task(folder):
    folder.mkdir()
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "train.jsonl"}},
        "test_split": "test", "fewshot_split": "test", "output_type": "generate_until",
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "sums.yaml").write_text(json.dumps(task))


def test_the_notebook(folder, capsys):
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "outputs are not committed"
    names = run_all(["".join(cell["source"]) for cell in cells], "notebook.ipynb")
    assert names["run"].status == "complete"
    assert names["losses"][-1] < names["losses"][0] - 0.5
    assert "rehearsed" in capsys.readouterr().out
