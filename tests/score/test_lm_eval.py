"""Tasks of lm-evaluation-harness on our engine: the figures are those of lm-eval's own ``hf`` model, row by row."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from fitune.errors import DataError, MissingExtra, RecipeError, RunDirectoryError, ScoringFailed
from fitune.session.score.lm_eval import RESULTS, score_tasks
from optional_libraries import NEEDS_LM_EVAL

NAMES = ("sums_choice", "sums_written", "sums_text")
LONG = " ".join(f"{a} plus {a} is {2 * a}." for a in range(90))
"""More tokens than the model has positions for."""


def _rows():
    rows = [
        {
            "question": f"What is {a} plus {b}?",
            "choices": [f"{a + b}", f"{a + b + 1} and that is all", f"{a} plus {b}"],
            "right": (a + b) % 3,
            "text": f"{a} plus {b} is {a + b}.\n" * (4 * a * b),
        }
        for a in range(2, 5)
        for b in range(3, 7)
    ]
    rows[3]["question"] = f"{LONG} {rows[3]['question']}"
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three tasks over one local file: choices with solved examples, written answers, texts of several windows."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    local = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    perplexity = {"aggregation": "weighted_perplexity", "higher_is_better": False}
    tasks = {
        "sums_choice": {
            "output_type": "multiple_choice", "fewshot_split": "test", "num_fewshot": 2,
            "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{right}}",
            "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
        },
        "sums_written": {
            "output_type": "generate_until", "num_fewshot": 0, "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n", "is"], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match", **mean}],
        },
        "sums_text": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name, **perplexity} for name in ("word_perplexity", "byte_perplexity")],
        },
        "sums_run": {
            "output_type": "generate_until", "unsafe_code": True, "doc_to_text": "", "doc_to_target": "",
        },
        "sums_fetched": {
            "output_type": "generate_until", "doc_to_text": "", "doc_to_target": "",
            "metric_list": [{"metric": "a_metric_of_the_hub", **mean}],
        },
        "sums_elsewhere": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "",
            "dataset_path": "nobody/has_this_dataset", "dataset_kwargs": {},
        },
        "sums_beams": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "num_beams": 3},
        },
        "sums_no_room": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 256},
        },
        "sums_long_choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": ["a", LONG],
            "doc_to_target": 0,
        },
    }  # fmt: skip
    tasks["sums_group"] = {"group": "sums_group", "task": ["sums_choice", "sums_run"]}
    for name, task in tasks.items():
        own = task if "group" in task else {"task": name, **local, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
    return folder


@pytest.fixture(scope="module")
def scored(folder, model_folder, tmp_path_factory):
    """The directory of the three tasks on our engine."""
    out = tmp_path_factory.mktemp("scored") / "out"
    scores = score_tasks(model=str(model_folder), tasks=NAMES, out=out, tasks_folder=folder, tell=_nobody)
    assert {score.task for score in scores.scores} == set(NAMES)
    return out


@pytest.fixture(scope="module")
def theirs(folder, model_folder):
    """Results of the three tasks on lm-eval's own model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=str(model_folder), batch_size=4, dtype="float32", device="cpu")
    found = simple_evaluate(model, tasks=list(NAMES), task_manager=manager, bootstrap_iters=0)
    return found


def _nobody(event):
    return None


def _numbers(results, task):
    return {
        name: value
        for name, value in results["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }


def _samples(out, task):
    return [json.loads(line) for line in (out / f"samples_{task}.jsonl").read_text().splitlines()]


@NEEDS_LM_EVAL
def test_figures_are_those_of_lm_evals_own_model(scored, theirs, model_folder):
    ours = json.loads((scored / RESULTS).read_text())
    for task in NAMES:
        wanted = _numbers(theirs, task)
        assert wanted
        assert _numbers(ours, task) == pytest.approx(wanted, rel=1e-5 if task == "sums_text" else 0, abs=0)
        assert ours["n-shot"][task] == theirs["n-shot"][task]
        for mine, other in zip(_samples(scored, task), theirs["samples"][task], strict=True):
            assert mine["prompt_hash"] == other["prompt_hash"]
            for found, known in zip(mine["resps"], other["resps"], strict=True):
                _require_equal(found[0], known[0])
    _require_hard_cases(scored, AutoTokenizer.from_pretrained(model_folder).encode)


def _require_hard_cases(scored, encode):
    """Prompts longer than the context, texts of several windows, answers that end at a stop text or with their room."""
    assert max(len(encode(each["arguments"][0][0])) for each in _samples(scored, "sums_choice")) > 256
    assert max(len(encode(each["arguments"][0][0])) for each in _samples(scored, "sums_text")) > 2 * 256
    answers = [each["resps"][0][0] for each in _samples(scored, "sums_written")]
    assert len({len(encode(answer)) for answer in answers}) > 1


def _require_equal(found, known):
    """A text; nats; or nats, and if the text is the likeliest."""
    if isinstance(known, str):
        assert found == known
    elif isinstance(known, tuple):
        assert found[0] == pytest.approx(known[0], rel=1e-5)
        assert found[1] == known[1]
    else:
        assert found == pytest.approx(known, rel=1e-5)


@NEEDS_LM_EVAL
@pytest.mark.parametrize(
    ("tasks", "settings", "error", "words"),
    [
        (["sums_chioce"], {}, RecipeError, "sums_chioce: lm-eval has no such task\n  try: did you mean 'sums_choice'?"),
        (["sums_run"], {}, RecipeError, "sums_run: the task runs the code that the model writes"),
        (["sums_group"], {}, RecipeError, "sums_run: the task runs the code that the model writes"),
        (["sums_fetched"], {}, RecipeError, "its metric a_metric_of_the_hub is code of the Hub"),
        (["sums_elsewhere"], {}, DataError, "sums_elsewhere: the task or its data cannot be read"),
        (["sums_beams"], {}, ScoringFailed, "task sums_beams, row 0: generation_kwargs has num_beams = 3"),
        (["sums_no_room"], {}, ScoringFailed, "max_gen_toks 256 leaves no room for a prompt"),
        (["sums_long_choice"], {}, ScoringFailed, "row 0: the text to be weighed has"),
        ([""], {}, RecipeError, "--lm-eval '' names no task"),
        (["sums_text"], {"limit": 0}, RecipeError, "--limit 0: must be 1 or more"),
        (["sums_text"], {"shots": -1}, RecipeError, "--shots -1: must be 0 or more"),
        (["sums_text"], {"tasks_folder": Path("nowhere")}, RecipeError, "nowhere: no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(
    tasks, settings, error, words, folder,
    model_folder, tmp_path, monkeypatch,
):  # fmt: skip
    ours = import_module("fitune.score.lm_eval_tasks")
    index = ours.TaskManager(include_path=str(folder), include_defaults=False)
    # lm-eval's own 14,000 files, where an unknown name is looked for, take ten seconds to read
    monkeypatch.setattr(ours, "TaskManager", lambda **_: index)
    monkeypatch.setattr("fitune.spec.hub.answers", lambda url: False)
    with pytest.raises(error) as refused:
        score_tasks(
            model=str(model_folder), tasks=tasks, out=tmp_path / "out", tell=_nobody,
            **{"tasks_folder": folder, **settings},
        )  # fmt: skip
    assert words in str(refused.value)


@NEEDS_LM_EVAL
def test_results_of_other_settings_are_kept(scored, folder, model_folder):
    before = (scored / RESULTS).read_bytes()
    with pytest.raises(RunDirectoryError, match="limit: None there, 2 now"):
        score_tasks(
            model=str(model_folder), tasks=NAMES, out=scored, tasks_folder=folder, limit=2, tell=_nobody
        )
    assert (scored / RESULTS).read_bytes() == before


def test_without_lm_eval_the_error_names_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fitune\[lm-eval\]'"):
        score_tasks(model="no model", tasks=["gsm8k"], out=tmp_path / "out", tell=_nobody)
