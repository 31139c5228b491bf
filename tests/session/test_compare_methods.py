"""`fitune compare` trains one recipe by several methods and lays them side by side."""

from functools import partial
from pathlib import Path

import pytest

from fitune.errors import RecipeError, TrainingFailed
from fitune.recipe.recipe import parse_recipe
from fitune.recipe.score_recipe import score_recipe
from fitune.session import comparing
from fitune.session.comparing import METHODS, compare_methods, method_recipe
from fitune.session.program import train_program
from runs import set_words


@pytest.fixture
def words(settings, tmp_path):
    """Two steps of each method, with held-out rows."""
    return ["compare", *set_words(settings | {"val_fraction": 0.2, "output_dir": tmp_path / "both"})]


@pytest.fixture
def recipe_with(model_folder, tmp_path):
    def made(**said):
        return parse_recipe({"model": str(model_folder), "output_dir": str(tmp_path), **said})

    return made


def test_full_and_lora_are_laid_side_by_side(words, tmp_path, call):
    out = call(*words, "--tunings", "full,lora").ends(0)
    page = (tmp_path / "both" / "compare.html").read_text(encoding="utf-8")
    assert "Training loss at the end" in page
    assert "src=" not in page
    table = out.rsplit("learning rate", 1)[1].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["full", "lora"]
    call(*words, "--tunings", "full,lora").ends(0, "already complete")


def test_what_is_no_method_is_refused_and_what_cannot_run_is_left_out_with_its_reason(words, tmp_path, call):
    call(*words, "--tunings", "full,lra").ends(2, "did you mean 'lora'")
    assert not (tmp_path / "both").exists()
    ended = call(*words, "--tunings", "full", "--precision", "fp16")
    ended.ends(2, "no method could be trained")
    assert "full is left out: " in ended.out
    out = call(*words, "--tunings", "lomo,lora", "--precision", "bf16-master").ends(0, "lomo is left out: ")
    assert out.rsplit("learning rate", 1)[1].splitlines()[1].split()[0] == "lora"


def test_each_method_keeps_the_global_batch_scales_the_learning_rate_and_is_sent_to_a_place_of_its_own(
    recipe_with,
):
    recipe = recipe_with(tuning="lora", learning_rate=1e-4, micro_batch_size=2, gradient_accumulation_steps=4)
    full, lomo, lora = (method_recipe(recipe, name, Path("runs")) for name in ("full", "lomo", "lora"))
    assert (full.learning_rate, lora.learning_rate) == (pytest.approx(1e-5), pytest.approx(1e-4))
    assert (full.micro_batch_size, full.gradient_accumulation_steps) == (2, 4)
    assert (lomo.micro_batch_size, lomo.gradient_accumulation_steps) == (8, 1)
    assert method_recipe(recipe, "hqq", Path("runs")).quantization == "hqq"
    sent = method_recipe(recipe_with(push_to_hub="me/x", upload_to="s3://runs/x/"), "full", Path("runs"))
    assert (sent.push_to_hub, sent.upload_to) == ("me/x-full", "s3://runs/x/full")
    with pytest.raises(RecipeError):
        method_recipe(recipe.model_copy(update={"optimizer": "sgd", "momentum": 2}), "full", Path("runs"))


@pytest.mark.parametrize("code", [1, 3, -9])
def test_a_retry_that_fails_leaves_the_other_methods(recipe_with, monkeypatch, code):
    """Exit codes of errors, 1 to 4 or a signal's that killed it, come from an attempt in a process of its own."""
    monkeypatch.setattr(comparing, "train_program", lambda recipe, **how: code)
    told = []
    with pytest.raises(RecipeError, match="no method could be trained"):
        compare_methods(recipe_with(), ["lora", "full"], score_data="", overwrite=False, emit=told.append)
    assert [f"{name} failed" in str(told) for name in ("lora", "full")] == [True, True]


def test_a_signal_ends_the_comparison(recipe_with, monkeypatch):
    monkeypatch.setattr(comparing, "train_program", lambda recipe, **how: 130)
    assert compare_methods(recipe_with(), ["lora", "full"], score_data="", overwrite=False, emit=print) == 130


def test_what_is_said_of_adapters_and_of_packed_bases_does_not_keep_other_methods_out(recipe_with):
    recipe = recipe_with(rslora=True, lora_modules_to_save=["embed_tokens", "lm_head"])
    made = {name: method_recipe(recipe, name, Path("runs")) for name in METHODS}
    trains_all = {"full", "lomo", "adalomo"}
    assert {
        name for name, one in made.items() if not one.rslora and not one.lora_modules_to_save
    } == trains_all
    recipe = recipe_with(quantization_bits=8, lora_layers=[0])
    packed = {name for name in METHODS if method_recipe(recipe, name, Path("runs")).quantization_is_asked_for}
    assert packed == {"qlora", "hqq"}
    unknown = recipe_with(lora_modules_to_save=["norm"], lora_target_modules=["no_proj"], learning_rate=1e-4)
    assert method_recipe(unknown, "full", Path("runs")).learning_rate == pytest.approx(1e-5)


def test_overwriting_a_comparison_scores_the_new_models(words, data_file, monkeypatch, call):
    """Answers of the earlier model are no answers of the new one: scoring would refuse to go on from them."""
    monkeypatch.setattr(comparing, "score_recipe", partial(score_recipe, max_new_tokens=2))
    words += ["--tunings", "lora", "--score-data", f"{data_file}#2"]
    call(*words).ends(0)
    call(*words, "--learning-rate", "1e-3", "--overwrite").ends(0)


def test_a_method_that_fails_does_not_lose_the_others(words, tmp_path, monkeypatch, call):
    def failing(recipe, **how):
        if recipe.tuning == "lomo":
            raise TrainingFailed("the loss is inf; nothing was updated")
        return train_program(recipe, **how)

    monkeypatch.setattr(comparing, "train_program", failing)
    ended = call(*words, "--tunings", "lomo,lora")
    assert ended.code == 1
    assert "lomo failed: the loss is inf" in ended.out
    assert "lomo: the loss is inf" in (tmp_path / "both" / "compare.html").read_text(encoding="utf-8")
    table = ended.out.rsplit("learning rate", 1)[1].splitlines()
    assert table[1].split()[0] == "lora"
