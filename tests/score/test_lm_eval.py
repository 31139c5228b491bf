"""Tasks of lm-evaluation-harness on our engine: the figures are those of lm-eval's own ``hf`` model, row by row."""

import errno
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fitune.errors import DataError, MissingExtra, RecipeError, RunDirectoryError, ScoringFailed
from fitune.recipe.score_recipe import score_recipe
from fitune.session.score.lm_eval import RESULTS, score_tasks
from jsonl import read_lines, write_lines
from optional_libraries import NEEDS_LM_EVAL

NAMES = ("sums_choice", "sums_written", "sums_text")
LONG = " ".join(f"{a} plus {a} is {2 * a}." for a in range(90))
"""More tokens than the model has positions for."""
DRAWN = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
NO_SYSTEM = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    "{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant: {%- endif -%}"
)
"""A template that refuses a system message, as Gemma's does."""


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
    """Tasks over one local file, with a description: choices with solved examples, written and drawn answers, texts of
    several windows; and those that are refused."""
    folder = tmp_path_factory.mktemp("tasks")
    data = write_lines(folder / "sums.jsonl", _rows())
    local = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{question}}", "doc_to_target": "", "description": "Add the numbers.",
    }  # fmt: skip
    mean = {"aggregation": "mean", "higher_is_better": True}
    perplexity = {"aggregation": "weighted_perplexity", "higher_is_better": False}
    matched = {"doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match", **mean}]}
    choices = {
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}", "fewshot_split": "test", "num_fewshot": 2,
        "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
    }  # fmt: skip
    texts = {
        "doc_to_text": "", "doc_to_target": "{{text}}", "description": "",
        "metric_list": [{"metric": name, **perplexity} for name in ("word_perplexity", "byte_perplexity")],
    }  # fmt: skip
    until = {"until": ["\n"], "max_gen_toks": 4}
    is_ends = {"until": ["\n", "is"], "max_gen_toks": 24, "do_sample": False}
    tasks = {
        "sums_choice": ("multiple_choice", choices),
        "sums_written": ("generate_until", {**matched, "generation_kwargs": is_ends}),
        "sums_text": ("loglikelihood_rolling", texts),
        "sums_drawn": ("generate_until", {**matched, "repeats": 2, "generation_kwargs": DRAWN}),
        "sums_top_k": ("generate_until", {**matched, "generation_kwargs": DRAWN | {"top_k": 5}}),
        "sums_run": ("generate_until", {"unsafe_code": True}),
        "sums_fetched": ("generate_until", {"metric_list": [{"metric": "a_metric_of_the_hub", **mean}]}),
        "sums_elsewhere": ("loglikelihood_rolling", {"dataset_path": "nobody/has_it", "dataset_kwargs": {}}),
        "sums_no_room": ("generate_until", {"generation_kwargs": until | {"max_gen_toks": 256}}),
        "sums_long_choice": ("multiple_choice", {"doc_to_choice": ["a", LONG], "doc_to_target": 0}),
    }
    for name, (kind, task) in tasks.items():
        own = {"task": name, "output_type": kind, **local, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
    group = {"group": "sums_group", "task": ["sums_choice", "sums_run"]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture
def run(folder, model_folder):
    """Runs tasks on our engine; returns the samples of each."""

    def run(out, *tasks, model=model_folder, emit=lambda event: None, tasks_folder=folder, **more):
        recipe = score_recipe(model=model, lm_eval=tasks, out=out, lm_eval_tasks=tasks_folder, **more)
        score_tasks(recipe, emit=emit)
        return {task: read_lines(out / f"samples_{task}.jsonl") for task in tasks}

    return run


def require_those_of_lm_eval(folder, found, model, *, chat=False):
    """The samples are those of lm-eval's own model, whose results are returned."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    known = simple_evaluate(
        HFLM(pretrained=str(model), batch_size=4, dtype="float32", device="cpu"), tasks=list(found), bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), apply_chat_template=chat,
    )  # fmt: skip
    for task, samples in found.items():
        for mine, other in zip(samples, known["samples"][task], strict=True):
            assert mine["prompt_hash"] == other["prompt_hash"]
            for (one,), (two,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(two, str):
                    assert one == two
                else:  # nats, or nats and if the text is the likeliest
                    nats, *greedy = one if isinstance(two, tuple) else (one,)
                    wanted, *is_greedy = two if isinstance(two, tuple) else (two,)
                    assert (nats, greedy) == (pytest.approx(wanted, rel=1e-5), is_greedy)
    return known


def answers(samples):
    return [sample["resps"] for sample in samples]


@NEEDS_LM_EVAL
def test_figures_are_those_of_lm_evals_own_model(run, folder, model_folder, tmp_path):
    """Prompts longer than the context, texts of several windows, answers that end at a stop text or with their room."""

    def numbers(results, task):
        found = results["results"][task].items()
        return {name: value for name, value in found if isinstance(value, float) and "stderr" not in name}

    found = run(tmp_path, *NAMES)
    theirs = require_those_of_lm_eval(folder, found, model_folder)
    ours = json.loads((tmp_path / RESULTS).read_text())
    for task in NAMES:
        wanted = numbers(theirs, task)
        assert wanted
        assert numbers(ours, task) == pytest.approx(wanted, rel=1e-5 if task == "sums_text" else 0, abs=0)
        assert ours["n-shot"][task] == theirs["n-shot"][task]
    encode = AutoTokenizer.from_pretrained(model_folder).encode
    longest = {task: max(len(encode(each["arguments"][0][0])) for each in found[task]) for task in NAMES}
    assert longest["sums_choice"] > 256
    assert longest["sums_text"] > 2 * 256
    assert len({len(encode(said)) for ((said,),) in answers(found["sums_written"])}) > 1
    before = (tmp_path / RESULTS).read_bytes()
    with pytest.raises(RunDirectoryError, match="limit: None there, 2 now"):
        run(tmp_path, *NAMES, limit=2)
    assert (tmp_path / RESULTS).read_bytes() == before


@NEEDS_LM_EVAL
def test_a_disk_that_is_full_under_the_results_leaves_samples_from_which_the_next_one_goes_on(
    run, tmp_path, monkeypatch
):
    real = os.fsync

    def full(handle):
        if f"/.tmp-{RESULTS}-" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=f"No space left .*{RESULTS}"):
            run(tmp_path / "out", "sums_choice", limit=2)
    assert [path.name for path in tmp_path.rglob("*s*_*.json*")] == ["samples_sums_choice.jsonl"]
    run(tmp_path / "out", "sums_choice", limit=2)
    assert (tmp_path / "out" / RESULTS).is_file()


@NEEDS_LM_EVAL
def test_as_chats_with_an_adapter_the_figures_are_those_of_lm_evals_own_model_that_has_it_merged(
    run, folder, model_folder, tmp_path
):
    """lm-eval's own model given the adapter would first cut the embeddings to the words of the tokenizer."""
    chatting = Path(shutil.copytree(model_folder, tmp_path / "model"))
    settings = json.loads((chatting / "tokenizer_config.json").read_text())
    (chatting / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": NO_SYSTEM}))
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    merged = Path(shutil.copytree(chatting, tmp_path / "merged"))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(chatting), config)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(merged)
    said = []

    def tell(event):
        said.append(getattr(event, "text", ""))

    words = {"model": chatting, "chat_template": "own", "emit": tell}
    found = run(tmp_path / "adapted", *NAMES[:2], adapter=str(tmp_path / "adapter"), **words)
    require_those_of_lm_eval(folder, found, merged, chat=True)
    asked = found["sums_written"][0]["arguments"][0][0]
    assert asked == "user: What is 2 plus 3?</s>assistant:"
    assert [line for line in said if "system" in line] == [
        "lm-eval: the chat template refuses a system message (no system role): the tasks' descriptions are left out"
    ]
    base = run(tmp_path / "base", "sums_written", **words)
    assert answers(found["sums_written"]) != answers(base["sums_written"])


@NEEDS_LM_EVAL
def test_drawn_answers_follow_from_the_seed_alone(run, tmp_path):
    def drawn(name, **more):
        return answers(run(tmp_path / name, "sums_drawn", **more)["sums_drawn"])

    first = drawn("first", seed=7)
    assert drawn("again", seed=7, batch_size=3) == first
    assert drawn("other", seed=8) != first
    assert all(one != two for ((one, two),) in first), "each repeat is drawn anew"


@NEEDS_LM_EVAL
@pytest.mark.parametrize(
    ("tasks", "settings", "error", "words"),
    [
        (["sums_chioce"], {}, RecipeError, "sums_chioce: lm-eval has no such task\n  try: did you mean 'sums_choice'?"),
        (["sums_group"], {}, RecipeError, "sums_run: the task runs the code that the model writes"),
        (["sums_fetched"], {}, RecipeError, "its metric a_metric_of_the_hub is code of the Hub"),
        (["sums_elsewhere"], {}, DataError, "sums_elsewhere: the task or its data cannot be read"),
        (["sums_top_k"], {}, ScoringFailed, "task sums_top_k, row 0: generation_kwargs has top_k = 5"),
        (["sums_no_room"], {}, ScoringFailed, "max_gen_toks 256 leaves no room for a prompt"),
        (["sums_long_choice"], {}, ScoringFailed, "row 0: the text to be scored has"),
        (["sums_text"], {"tasks_folder": Path("nowhere")}, RecipeError, "nowhere: no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(
    run, folder, tasks, settings, error, words, tmp_path, monkeypatch
):
    ours = import_module("fitune.score.lm_eval_tasks")
    index = ours.TaskManager(include_path=str(folder), include_defaults=False)
    # lm-eval's own 14,000 files, where an unknown name is looked for, take ten seconds to read
    monkeypatch.setattr(ours, "TaskManager", lambda **_: index)
    monkeypatch.setattr("fitune.values.hub.answers", lambda url: False)
    with pytest.raises(error) as refused:
        run(tmp_path / "out", *tasks, **settings)
    assert words in str(refused.value)


@NEEDS_LM_EVAL
def test_a_variable_that_the_user_has_set_is_put_back(monkeypatch, tmp_path):
    monkeypatch.setenv("DISABLE_MULTIPROC", "0")
    load_tasks = import_module("fitune.score.lm_eval_tasks").load_tasks
    load_tasks([], folder=tmp_path, shots=None, say=print)
    assert os.environ["DISABLE_MULTIPROC"] == "0"


def test_without_lm_eval_the_error_names_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fitune\[lm-eval\]'"):
        score_tasks(score_recipe(model="no model", lm_eval="gsm8k", out=tmp_path / "out"), emit=print)
