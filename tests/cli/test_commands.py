"""The commands as a user types them: what they print, how they exit, what they import."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jsonl import read_lines, write_lines

LLAMA_8B = "--model meta-llama/Llama-3.1-8B --gpu rtx-4090"


def test_planning_imports_no_torch_and_writes_nothing(tmp_path):
    """In a fresh process, as a user starts it."""
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n' * 40)
    commands = [
        f"plan {LLAMA_8B} --tuning lora --data rows.jsonl",
        "score --model Qwen/Qwen3-8B --data rows.jsonl --out out --gpu h100 --plan",
    ]
    program = (
        "import sys, fitune\n"
        "assert 'fitune.values.plan' not in sys.modules, 'fitune is imported quickly'\n"
        "from fitune.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['fitune', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    said = (
        "--tuning qlora",
        "your job about 40 rows",
        "40 rows: prompts of",
        "weights 15.26 + keys and values",
    )
    assert all(words in finished.stdout for words in said)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


WITHOUT_TRAINING = """
import importlib.metadata as metadata, sys
HIDDEN = {"torch", "transformers", "huggingface_hub", "peft", "safetensors", "datasets"}
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
real = metadata.version
def version(name):
    if name in HIDDEN:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from fitune.cli import main
for words in sys.argv[1:]:
    sys.argv = ["fitune", *words.split()]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print("ended with", code, flush=True)
"""
"""Runs commands where nothing of these is installed."""


def test_a_plan_that_needs_a_library_says_which(tmp_path):
    """A name that nobody knows, and a folder whose architecture has no formula. Others need none: base_install.py."""
    config = {
        "model_type": "gpt_neox", "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2,
        "num_attention_heads": 6, "vocab_size": 400,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = ("nobody/unknown", str(tmp_path))
    words = [f"plan --model {model} --gpu h100" for model in models]
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRAINING, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"FITUNE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    unknown, traced, end = " ".join(finished.stdout.split()).split("ended with ")
    assert "huggingface_hub, which fetches its config.json, is not installed" in unknown
    assert "is traced once, which needs transformers, and that is not installed" in traced
    assert (traced[0], end) == ("2", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model llama-3.1-70b", ("transformers: weights 131.42 + ", "21.81 usable, ")),
        ("--max-new-tokens 200000", ("the model has room for 131,072",)),
        ("--grader perplexity", ("--grader perplexity weighs references",)),
        ("--adapter adapter", ("cut short or no safetensors file",)),
        ("--engine server", ("leave --plan out",)),
    ],
)
def test_a_score_that_cannot_fit_is_refused_with_the_arithmetic(call, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [{"question": "What is 2 plus 3?", "answer": "5"}])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    model = [] if "--model" in words else ["--model", "llama-3.1-8b"]
    call("score", "--data", "rows.jsonl", "--plan", "--gpu", "rtx-4090", *model, *words.split()).ends(
        2, *said
    )


def test_rows_with_choices_are_planned_where_a_grader_has_their_answers_written(call, tmp_path):
    data = write_lines(
        tmp_path / "rows.jsonl", [{"question": "2 + 3?", "choices": ["4", "5"], "answer": "5"}]
    )
    words = ["score", "--data", data, "--plan", "--gpu", "rtx-4090", "--model", "llama-3.1-8b"]
    call(*words).ends(2, "predict written answers, and rows with choices")
    call(*words, "--grader", "number").ends(0, "1 row")


def test_plan_json_is_one_object(call):
    content = json.loads(call(*f"plan {LLAMA_8B} --tuning lora --json".split()).ends(0))
    assert content["model"]["num_params"] == 8_030_261_248
    estimate = content["estimate"]
    inside = max(sum(terms.values()) for terms in estimate["phases"].values())
    assert inside + sum(estimate["outside"].values()) == estimate["peak_bytes"] <= estimate["usable_bytes"]
    assert content["plan"]["tuning"]["kind"] == "Lora"
    assert content["runners_up"]
    assert all({"what", "why"} <= set(entry) for entry in content["rejected"])


def test_a_training_without_data_is_one_readable_error(call):
    call("train", "--model", "nowhere").ends(2, "no data is named")


def test_train_report_export_score(call, model_folder, data_file, tmp_path, monkeypatch):
    """The commands of the README, one after another."""
    monkeypatch.setattr("fitune.session.train.training._SAMPLE_TOKENS", 4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {model_folder}\ntuning: lora\nprecision: fp32\ndata: {data_file}\nval_fraction: 0.1\nseq_len: 64\n"
        f"micro_batch_size: 4\nlearning_rate: 1e-2\nmax_steps: 2\nsamples: 1\noutput_dir: {tmp_path / 'run'}\n"
    )
    run = tmp_path / "run"
    ended = call("train", recipe)
    ended.ends(0, "predicted")
    assert ended.err == ""

    rows = json.loads(call("report", run, "--json").ends(0))["comparison"]
    assert {row["what"] for row in rows} >= {"Forward", "Loss", "Backward", "Update"}

    call("export", run).ends(0)
    assert (run / "merged" / "model.safetensors").is_file()
    for kind, library in (("adapter", "peft"), ("merged", "transformers")):
        card = (run / kind / "README.md").read_text()
        for said in (f"library_name: {library}", "measured peak memory", "4 at a time, 4 accumulated"):
            assert said in card
        assert f"```yaml\n{(run / 'recipe.yaml').read_text()}```" in card

    said = []
    for out, *model in (("a", model_folder, "--adapter", run / "adapter"), ("b", run / "merged")):
        words = ("--data", f"{data_file}#6", "--out", tmp_path / out, "--max-new-tokens", 4, "--json")
        assert json.loads(call("score", "--model", *model, *words).ends(0))["answered"] == 6
        lines = read_lines(tmp_path / out / "answers.jsonl")
        said.append([line["response"]["body"]["choices"][0]["message"] for line in lines])
    assert said[0] == said[1]


def test_an_adapter_of_another_rank_is_refused_before_the_model_is_loaded(
    call, shop, model_folder, data_file, tmp_path
):
    adapter = shutil.copytree(shop / "adapter", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    words = ("--adapter", adapter, "--data", data_file, "--out", tmp_path / "scores")
    call("score", "--model", model_folder, *words).ends(2, "does not fit", "and 20 more")
    assert not (tmp_path / "scores").exists()


def test_the_version_is_told(call):
    from importlib.metadata import version

    assert call("--version") == (0, f"fitune {version('fitune')}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("score", "--model"),
        ("plan --model", "--model has no value"),
        ("doctor --jsn", "--jsn"),
    ],
)
def test_words_that_are_no_options_are_an_error_object_too(call, words, said):
    code, out, err = call(*words.split(), "--json")
    error = json.loads(out)["error"]
    assert (code, err) == (2, "")
    assert said in error["message"]
    assert error["hint"]


def test_another_trainers_recipe_is_planned_and_converted(call, tmp_path):
    """How it was read stands on standard error, so that standard output is the answer alone."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(
        "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 2\nlearning_rate: 0.0002\nwandb_project:\n"
        "datasets: [{path: org/rows, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n"
        "lora_target_linear: true\nbf16: auto\n"
    )
    for seq_len, words in ((512, ()), (256, ("--set", "seq_len=256"))):
        ended = call("plan", theirs, "--gpu", "4090", *words, "--json")
        assert json.loads(ended.ends(0))["plan"]["batch"]["seq_len"] == seq_len
        assert "a recipe of axolotl" in ended.err
        assert "passed over, being empty, off or bookkeeping: wandb_project" in ended.err
    call("convert", str(theirs)).ends(
        0, "lora_r: 8  # as in axolotl\n", "data:  # from datasets: rendered by the chat template"
    )


def test_help_lists_every_key_of_a_recipe_by_group(call):
    from fitune.recipe.keys import GROUPS, all_keys

    out = call("train", "--help").ends(0)
    assert all(group in out for group in GROUPS.values())
    assert all(f" {key.option} " in out for key in all_keys())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fitune tra", ["train"]),
        ("fitune plan --saves", ["--saves-per-epoch"]),
        ("fitune plan r.yaml --overw", []),
        ("fitune train r.yaml --overw", ["--overwrite"]),
        ("fitune plan --gpu rtx-509", ["rtx-5090"]),
        ("fitune train --tuning q", ["qlora"]),
        ("fitune plan --base-model Qwen/Qwen3-0.6B-", ["Qwen/Qwen3-0.6B-Base"]),
    ],
)
def test_the_shell_completes_commands_keys_and_values(line, offered, call, monkeypatch):
    monkeypatch.setenv("_FITUNE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    code, out, _ = call()
    assert (code, out.split()) == (0, offered)


@pytest.mark.parametrize(("given", "taken"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_give_their_core_away_unless_somebody_said_otherwise(
    given, taken, call, monkeypatch
):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # what is there now comes back after the test
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    call("--version")
    assert os.environ["OMP_WAIT_POLICY"] == taken
