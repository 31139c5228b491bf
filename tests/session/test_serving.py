"""The commands that serve a model: what they name, and what is refused with the next step."""

import shutil
from pathlib import Path

import pytest

import fitune
from fitune.errors import CheckpointError, ModelError, RecipeError
from fitune.session.exporting import commands_for
from fitune.session.score import serving
from fitune.session.score.serving import serve_command


def command(word, server=None, **changed):
    words = {"host": "localhost", "port": 8000, "context": 0, "only_print": True, **changed}
    return serve_command(str(word), server=server, **words)  # type: ignore[arg-type]


def value_of(served, option):
    return served.argv[served.argv.index(option) + 1]


def test_vllm_gets_base_adapter_rank_template_type_and_length(shop, model_folder):
    served = command(shop, "vllm")
    for option, value in {
        "--model": model_folder, "--lora-modules": f"shop={shop / 'adapter'}", "--max-lora-rank": 8,
        "--chat-template": shop / "adapter" / "chat_template.jinja", "--dtype": "float32", "--max-model-len": 256,
    }.items():  # fmt: skip
        assert value_of(served, option) == str(value)
    assert value_of(command(shop, "vllm", context=128), "--max-model-len") == "128"
    assert (served.name, served.url) == ("shop", "http://localhost:8000/v1")
    whole = command(model_folder, "vllm")
    assert "--enable-lora" not in whole.argv
    assert value_of(whole, "--served-model-name") == model_folder.name


def test_a_model_that_is_not_there_is_told_as_one():
    for server in ("vllm", "transformers"):
        with pytest.raises(ModelError, match="no-such-model: the model cannot be read: no such folder"):
            command("no-such-model", server)


def test_a_processor_has_no_graphs_and_a_command_for_another_machine_says_nothing_of_it(shop, monkeypatch):
    assert "--enforce-eager" not in command(shop, "vllm").argv
    monkeypatch.setattr("fitune.session.score.serving.python_of_vllm", lambda: "python-of-vllm")
    here = command(shop, "vllm").argv
    assert here[0] == "python-of-vllm"
    assert "--enforce-eager" in here


def test_what_is_next_is_true_for_the_export(shop, model_folder, tmp_path):
    """Each command names what it takes: base, rank, template and type for an adapter, the folder for a whole model."""
    told = []
    whole = fitune.export(
        shop, tmp_path / "my shop", kind="merged", progress=lambda event: told.append(str(event))
    )
    folder = f"'{whole.path}'"
    assert told[-1].splitlines() == [
        f"next:    vllm serve {folder} --dtype float32",
        f"         ollama create shop -f '{whole.path / 'Modelfile'}'",
        f"         python convert_hf_to_gguf.py {folder}   (llama.cpp)",
    ]
    adapter = shop / "adapter"
    assert commands_for(adapter, "My Shop!") == [
        f"vllm serve {model_folder} --enable-lora --lora-modules my-shop={adapter} --max-lora-rank 8 "
        f"--chat-template {adapter / 'chat_template.jinja'} --dtype float32",
        f"python convert_lora_to_gguf.py {adapter} --base {model_folder}   (llama.cpp)",
    ]
    (whole.path / "Modelfile").unlink()  # an architecture that Ollama does not import
    assert not any("ollama" in command for command in commands_for(whole.path, "shop"))


@pytest.mark.parametrize(("setting", "left"), [("use_dora", 0), ("use_rslora", 1)])
def test_no_command_is_named_that_would_refuse_or_misread_the_adapter(shop, tmp_path, setting, left):
    copy = Path(shutil.copytree(shop / "adapter", tmp_path / "adapter"))
    config = copy / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{setting}": false', f'"{setting}": true'))
    assert len(commands_for(copy, "shop")) == left


def test_a_run_ends_with_commands_that_are_true_for_it(settings):
    told = []
    fitune.train(**settings, export="merged", progress=lambda event: told.append(str(event)))
    (lines,) = [text.splitlines() for text in told if text.startswith("next:")]
    assert "convert_hf_to_gguf" in lines[-1]


def test_what_a_server_cannot_take_names_the_export(shop, model_folder, tmp_path):
    copy = Path(shutil.copytree(shop, tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="transformers' server takes whole models") as caught:
        command(copy, "transformers")
    assert caught.value.hint == f"fitune export {copy} --as merged, and serve {copy / 'merged'}"
    config = copy / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match="vLLM cannot take this adapter as it is: DoRA"):
        command(copy, "vllm")
    fitune.export(shop, tmp_path / "copy" / "merged", kind="merged")
    plan = copy / "plan.json"  # what is merged needs no base
    plan.write_text(plan.read_text().replace(str(model_folder), "/no/longer/there"))
    merged = command(copy, "vllm")
    assert value_of(merged, "--model") == str(copy / "merged")
    assert "--enable-lora" not in merged.argv
    assert command(copy, "transformers").name == str((copy / "merged").resolve())


def test_without_a_server_both_ways_to_one_are_named(model_folder, monkeypatch):
    monkeypatch.setenv("FITUNE_VLLM_PYTHON", "/no/such/python")
    monkeypatch.setattr(serving, "_NEEDED", ("no_such_library",))
    with pytest.raises(RecipeError, match="transformers' own needs no_such_library"):
        command(model_folder, only_print=False)
    assert "serve" in command(model_folder).argv
