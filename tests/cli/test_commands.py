"""The commands as a user types them: what they print, how they exit, what they import."""

import json
import os
import subprocess
import sys

import pytest

from jsonl import read_lines
from runs import trained

LLAMA_8B = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090"]


def test_planning_imports_no_torch_and_writes_nothing(tmp_path):
    """In a fresh process, as a user starts it."""
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n' * 40)
    score = "score --model Qwen/Qwen3-8B --data rows.jsonl --out out --gpu h100 --plan"
    commands = [
        ["plan", *LLAMA_8B, "--tuning", "lora"],
        ["plan", *LLAMA_8B, "--data", "rows.jsonl"],
        score.split(),
    ]
    program = (
        "import sys, fitune\n"
        "assert 'fitune.spec.plan' not in sys.modules, 'fitune is imported quickly'\n"
        "from fitune.cli import main\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['fitune', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for said in (
        "--tuning qlora",
        "your job about 40 rows",
        "40 rows: prompts of",
        "weights 15.26 + keys and values",
    ):
        assert said in finished.stdout
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


def test_plans_need_no_library_of_training(tmp_path):
    """A name with a shipped profile, one that nobody knows, and a folder whose architecture has no formula."""
    config = {
        "model_type": "gpt_neox", "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2,
        "num_attention_heads": 6, "vocab_size": 400,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = ("openai/gpt-oss-20b --tuning lora", "nobody/unknown", str(tmp_path))
    words = [f"plan --model {model} --gpu h100" for model in models]
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRAINING, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"FITUNE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    fits, unknown, traced, _ = " ".join(finished.stdout.split()).split("ended with ")
    assert "✔ FITS openai/gpt-oss-20b" in fits
    assert unknown.startswith("0 ")
    assert "huggingface_hub, which fetches its config.json, is not installed" in unknown
    assert traced.startswith("2 ")
    assert "is traced once, which needs transformers, and that is not installed" in traced


def test_a_score_that_cannot_fit_is_refused_with_the_arithmetic(call, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n')
    words = ("score", "--data", str(rows), "--plan", "--gpu", "rtx-4090")
    call(*words, "--model", "llama-3.1-70b").ends(2, "transformers: weights 131.42 + ", "21.81 usable, ")
    call(*words, "--model", "llama-3.1-8b", "--max-new-tokens", "200000").ends(
        2, "the model has room for 131,072"
    )
    call(*words, "--model", "llama-3.1-8b", "--grader", "perplexity").ends(
        2, "--grader perplexity weighs references"
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    call(*words, "--model", "llama-3.1-8b", "--adapter", str(folder)).ends(
        2, "cut short or no safetensors file"
    )
    call(*words, "--model", "llama-3.1-8b", "--engine", "server").ends(2, "leave --plan out")


def test_plan_json_is_one_object(call):
    code, out, _ = call("plan", *LLAMA_8B, "--tuning", "lora", "--json")
    content = json.loads(out)
    assert code == 0
    assert content["model"]["num_params"] == 8_030_261_248
    phases = content["estimate"]["phases"]
    peak = max(sum(terms.values()) for terms in phases.values()) + sum(
        content["estimate"]["outside"].values()
    )
    assert peak == content["estimate"]["peak_bytes"] <= content["estimate"]["usable_bytes"]
    assert content["plan"]["tuning"]["kind"] == "Lora"
    assert content["runners_up"]
    assert all({"what", "why"} <= set(entry) for entry in content["rejected"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", *LLAMA_8B, "--seq-len", "0"], "seq_len"),
        (["train", "--model", "nowhere"], "no data is named"),
        (["report", "nowhere"], "no such run directory"),
    ],
)
def test_mistakes_are_one_readable_error(call, words, said):
    call(*words).ends(2, said)


@pytest.mark.pictures
def test_train_report_export_score(call, model_folder, data_file, tmp_path):
    """The commands of the README, one after another."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {model_folder}\ntuning: lora\nprecision: fp32\ndata: {data_file}\nval_fraction: 0.1\nseq_len: 64\n"
        f"micro_batch_size: 4\nlearning_rate: 1e-2\nmax_steps: 4\nsamples: 1\noutput_dir: {tmp_path / 'run'}\n"
    )
    code, out, err = call("train", str(recipe))
    assert (code, err) == (0, "")
    assert "predicted" in out
    assert (tmp_path / "run" / "report.html").read_text().count("<svg") == 5

    call("train", str(recipe)).ends(0, "already complete")

    code, out, _ = call("report", str(tmp_path / "run"), "--json")
    assert {row["what"] for row in json.loads(out)["comparison"]} >= {"Forward", "Loss", "Backward", "Update"}

    out = call("export", str(tmp_path / "run")).ends(0)
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()
    cards = {kind: (tmp_path / "run" / kind / "README.md").read_text() for kind in ("adapter", "merged")}
    assert "library_name: peft" in cards["adapter"]
    assert "library_name: transformers" in cards["merged"]
    for card in cards.values():
        assert "measured peak memory" in card
        assert "4 at a time, 4 accumulated" in card
        assert f"```yaml\n{(tmp_path / 'run' / 'recipe.yaml').read_text()}```" in card

    for arguments in (["--adapter", str(tmp_path / "run" / "adapter")], []):
        model = str(model_folder) if arguments else str(tmp_path / "run" / "merged")
        out_dir = tmp_path / f"scores{len(arguments)}"
        out = call(
            "score", "--model", model, *arguments, "--data", f"{data_file}#6", "--out", str(out_dir),
            "--max-new-tokens", "8", "--json",
        ).ends(0)  # fmt: skip
        assert json.loads(out)["answered"] == 6
    first, second = (read_lines(tmp_path / f"scores{n}" / "answers.jsonl") for n in (2, 0))
    assert messages(first) == messages(second)


def messages(lines):
    return [line["response"]["body"]["choices"][0]["message"] for line in lines]


def test_an_adapter_of_another_rank_is_refused_before_the_model_is_loaded(
    call, make_plan, model_folder, data_file, tmp_path
):
    """Fault 21, as a user meets it."""
    plan = make_plan(max_steps=1)
    trained(plan)
    adapter = tmp_path / "run" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    call(
        "score", "--model", str(model_folder), "--adapter", str(adapter), "--data", str(data_file),
        "--out", str(tmp_path / "scores"),
    ).ends(2, "does not fit", "and 20 more")  # fmt: skip
    assert not (tmp_path / "scores").exists()


def test_the_version_is_told(call):
    from importlib.metadata import version

    assert call("--version") == (0, f"fitune {version('fitune')}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["score", "--json"], "--model"),
        (
            ["score", "--model", "a", "--data", "b", "--out", "c", "--batch-size", "x", "--json"],
            "--batch-size",
        ),
        (["doctor", "--jsn", "--json"], "--jsn"),
        (["plam", "--json"], "plam"),
    ],
)
def test_words_that_are_no_options_are_an_error_object_too(call, words, said):
    code, out, err = call(*words)
    error = json.loads(out)["error"]
    assert (code, err) == (2, "")
    assert said in error["message"]
    assert "--help" in error["hint"] or "did you mean" in error["hint"]


def test_score_takes_sampling_template_and_ids(call, model_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b", "name": "first"}\n')
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}")
    call(
        "score", "--model", str(model_folder), "--data", str(rows), "--out", str(tmp_path / "out"), "--top-p", "0.5",
        "--seed", "7", "--temperature", "0.5", "--id-column", "name", "--chat-template", str(template),
        "--max-new-tokens", "2",
    ).ends(0)  # fmt: skip
    sampling = json.loads((tmp_path / "out" / "manifest.json").read_text())["sampling"]
    assert sampling == {"max_new_tokens": 2, "seed": 7, "temperature": 0.5, "top_p": 0.5}
    line = json.loads((tmp_path / "out" / "answers.jsonl").read_text())
    assert line["custom_id"] == "first"


def test_another_trainers_recipe_is_planned_and_converted(call, tmp_path):
    """How it was read stands on standard error, so that standard output is the answer alone."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(
        "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 2\nlearning_rate: 0.0002\nwandb_project:\n"
        "datasets: [{path: org/rows, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n"
        "lora_target_linear: true\nbf16: auto\n"
    )
    code, out, err = call("plan", str(theirs), "--gpu", "4090", "--json")
    assert code == 0
    assert json.loads(out)["plan"]["batch"]["seq_len"] == 512
    assert "a recipe of axolotl" in err
    assert "passed over, being empty, off or bookkeeping: wandb_project" in err
    call("convert", str(theirs)).ends(
        0, "lora_r: 8  # as in axolotl\n", "data:  # from datasets: rendered by the chat template"
    )
    code, out, err = call("plan", str(theirs), "--gpu", "4090", "--set", "seq_len=256", "--json")
    assert json.loads(out)["plan"]["batch"]["seq_len"] == 256


def test_help_lists_every_key_of_a_recipe_by_group(call):
    from fitune.spec.recipe.keys import GROUPS, all_keys

    out = call("train", "--help").ends(0)
    assert all(group in out for group in GROUPS)
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
        ("fitune plan rec", []),
    ],
)
def test_the_shell_completes_commands_keys_and_values(line, offered, call, monkeypatch):
    monkeypatch.setenv("_FITUNE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    code, out, _ = call()
    assert (code, out.split()) == (0, offered)


def test_init_writes_a_recipe_that_trains(call, model_folder, data_file, tmp_path):
    path, run_folder = tmp_path / "recipe.yaml", tmp_path / "run"
    flags = ["--model", model_folder, "--data", data_file, "--tuning", "lora", "--gpu", "cpu"]
    flags += ["--output-dir", run_folder, "--seq-len", 64, "--max-steps", 1, "--samples", 0]
    call("init", str(path), *map(str, flags)).ends(0, "steps in")
    assert call("train", str(path))[0] == 0
    assert (run_folder / "adapter").is_dir()
    code, _, err = call("init", str(path), *map(str, flags))
    assert code != 0
    assert "is there already" in err


@pytest.mark.parametrize(("given", "taken"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_give_their_core_away_unless_somebody_said_otherwise(
    given, taken, call, monkeypatch
):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # what is there now comes back after the test
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    call("--version")
    assert os.environ["OMP_WAIT_POLICY"] == taken
