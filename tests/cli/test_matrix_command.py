"""``fitune matrix`` as a user types it."""

import json
import xml.etree.ElementTree as xml

import pytest

from fitune.errors import RecipeError
from fitune.session.alternatives import full_names, row_lengths

ON_V100 = ["--gpu", "v100-32gb", "--gpus", "8", "--tuning", "lora", "--models"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("llama-2-7b,13b, 70b", "llama-2-7b llama-2-13b llama-2-70b"),
        ("qwen3-0.6b,1.7b,llama-3.1-8b,70b", "qwen3-0.6b qwen3-1.7b llama-3.1-8b llama-3.1-70b"),
        ("llama-2-7b,llama-2-7b", "llama-2-7b"),
    ],
)
def test_a_size_alone_stands_for_the_model_before_it(typed, names):
    assert [*full_names(typed)] == names.split()


@pytest.mark.parametrize("words", [" , ", "13b", "gpt2,13b"])
def test_a_size_without_a_model_is_refused(words):
    with pytest.raises(RecipeError, match="--models"):
        tuple(full_names(words))


@pytest.mark.parametrize("words", ["", "1", "512,abc", "512.5", "100000001", "9" * 5000])
def test_lengths_that_are_no_numbers_of_tokens_are_refused(words):
    with pytest.raises(RecipeError, match="--context") as caught:
        row_lengths(words)
    assert len(caught.value.message) < 200


def cells(call, *words):
    data = json.loads(call("matrix", *words, "--json").ends(0))
    return data["models"], [cell["settings"] for cell in data["cells"]]


def test_table_and_picture(call, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "deep" / "matrix.svg"
    words = (*ON_V100, "llama-2-7b,13b", "--zero", "3", "--context", "512,1024")
    call("matrix", *words, "--picture", picture).ends(0, "Llama-2-13b-hf")
    words_of_picture = "".join(xml.parse(picture).getroot().itertext())
    assert "Llama-2-13b" in words_of_picture
    assert "1,024 tokens" in words_of_picture


def test_each_model_and_length_is_a_cell_and_pins_are_options(call):
    _, settings = cells(call, *ON_V100, "llama-2-7b,13b", "--context", "512,1024", "--zero", "3")
    assert len(settings) == 4
    assert {(each["method"], each["sharding"]) for cell in settings for each in cell} == {("lora", "ZeRO-3")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq-len 512", "seq_len differs from cell to cell"),
        ("--model llama-2-7b", "model differs from cell to cell"),
        ("--picture matrix.png", "must end in .svg"),
        ("--gpuz 8", "unknown key"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, words, message):
    call("matrix", *ON_V100, "llama-2-7b", "--context", "512", *words.split()).ends(2, message)


def test_a_recipe_file_gives_the_pins_and_not_the_model(call, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: llama-2-70b\ntuning: lora\nseq_len: 64\ngpu: v100-32gb\ngpus: 8\n")
    models, (settings,) = cells(call, recipe, "--models", "llama-2-7b", "--context", "512")
    assert models == ["meta-llama/Llama-2-7b-hf"]
    assert {setting["method"] for setting in settings} == {"lora"}
