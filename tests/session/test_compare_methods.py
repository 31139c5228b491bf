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


def words_for(model, data, out):
    words = ["--model", str(model), "--data", str(data), "--output-dir", str(out), "--gpu", "cpu"]
    return [*words, "--seq-len", "64", "--max-steps", "2", "--samples", "0", "--val-fraction", "0.2"]


@pytest.mark.pictures
def test_full_and_lora_are_laid_side_by_side(model_folder, data_file, tmp_path, call):
    words = [*words_for(model_folder, data_file, tmp_path / "both"), "--tunings", "full,lora"]
    out = call("compare", *words).ends(0)
    page = (tmp_path / "both" / "compare.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "Training loss at the end" in page
    assert "full" in page
    assert "src=" not in page
    table = out.rsplit("learning rate", 1)[1].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["full", "lora"]
    call("compare", *words).ends(0, "already complete")


def test_an_unknown_method_is_refused(model_folder, data_file, tmp_path, call):
    words = words_for(model_folder, data_file, tmp_path / "none")
    call("compare", *words, "--tunings", "full,lra").ends(2, "did you mean 'lora'")
    assert not (tmp_path / "none").exists()


def test_what_cannot_run_is_left_out_with_its_reason(model_folder, data_file, tmp_path, call):
    words = words_for(model_folder, data_file, tmp_path / "some")
    call("compare", *words, "--tunings", "full,lora", "--precision", "fp32", "--export", "full").ends(0)
    call("compare", *words, "--tunings", "full", "--precision", "fp16").ends(2, "no method could be trained")


def test_each_method_keeps_the_global_batch_and_scales_the_learning_rate(model_folder):
    recipe = parse_recipe(
        {"model": str(model_folder), "tuning": "lora", "learning_rate": 1e-4, "micro_batch_size": 2,
         "gradient_accumulation_steps": 4}
    )  # fmt: skip
    full = method_recipe(recipe, "full", Path("runs"))
    assert full.learning_rate == pytest.approx(1e-5)
    assert (full.micro_batch_size, full.gradient_accumulation_steps) == (2, 4)
    lomo = method_recipe(recipe, "lomo", Path("runs"))
    assert (lomo.micro_batch_size, lomo.gradient_accumulation_steps) == (8, 1)
    assert method_recipe(recipe, "lora", Path("runs")).learning_rate == pytest.approx(1e-4)
    assert method_recipe(recipe, "hqq", Path("runs")).quantization == "hqq"
    with pytest.raises(RecipeError):
        method_recipe(recipe.model_copy(update={"optimizer": "sgd", "momentum": 2}), "full", Path("runs"))


def test_bits_of_a_packed_base_are_for_methods_that_pack_it(model_folder):
    recipe = parse_recipe({"model": str(model_folder), "quantization_bits": 8, "lora_layers": [0]})
    packed = {name: method_recipe(recipe, name, Path("runs")).quantization_is_asked_for for name in METHODS}
    assert packed == {name: name in ("qlora", "hqq") for name in METHODS}


def test_a_retry_that_fails_leaves_the_other_methods(model_folder, tmp_path, monkeypatch):
    """Exit codes of errors, 1 to 4 or a signal's that killed it, come from an attempt in a process of its own."""
    for code in (1, 3, -9):
        monkeypatch.setattr(comparing, "train_program", lambda recipe, _code=code, **how: _code)
        with pytest.raises(RecipeError, match="no method could be trained"):
            compare_methods(
                parse_recipe({"model": str(model_folder), "output_dir": str(tmp_path)}), ["lora", "full"],
                score_data="", overwrite=False, emit=(told := []).append,
            )  # fmt: skip
        assert [f"{name} failed" in str(told) for name in ("lora", "full")] == [True, True]
    monkeypatch.setattr(comparing, "train_program", lambda recipe, **how: 130)
    recipe = parse_recipe({"model": str(model_folder), "output_dir": str(tmp_path)})
    assert compare_methods(recipe, ["lora", "full"], score_data="", overwrite=False, emit=print) == 130


@pytest.mark.parametrize("name", ["full", "lomo", "adalomo"])
def test_what_is_said_of_adapters_does_not_keep_other_methods_out(model_folder, name):
    said = {"rslora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    recipe = parse_recipe({"model": str(model_folder), **said})
    without, adapters = (method_recipe(recipe, method, Path("runs")) for method in (name, "lora"))
    assert (without.rslora, without.lora_modules_to_save) == (False, [])
    assert (adapters.rslora, adapters.lora_modules_to_save) == (True, said["lora_modules_to_save"])


def test_overwriting_a_comparison_scores_the_new_models(model_folder, data_file, tmp_path, monkeypatch, call):
    """Answers of the earlier model are no answers of the new one: scoring would refuse to go on from them."""
    monkeypatch.setattr(comparing, "score_recipe", partial(score_recipe, max_new_tokens=2))
    words = [*words_for(model_folder, data_file, tmp_path / "both"), "--tunings", "lora"]
    words += ["--score-data", f"{data_file}#2"]
    call("compare", *words).ends(0)
    call("compare", *words, "--learning-rate", "1e-3", "--overwrite").ends(0)


def test_a_method_that_fails_does_not_lose_the_others(model_folder, data_file, tmp_path, monkeypatch, call):
    def failing(recipe, **how):
        if recipe.tuning == "lomo":
            raise TrainingFailed("the loss is inf; nothing was updated")
        return train_program(recipe, **how)

    monkeypatch.setattr(comparing, "train_program", failing)
    words = [*words_for(model_folder, data_file, tmp_path / "two"), "--tunings", "lomo,lora"]
    code, out, _ = call("compare", *words)
    assert code == 1
    assert "lomo failed: the loss is inf" in out
    assert "lomo: the loss is inf" in (tmp_path / "two" / "compare.html").read_text(encoding="utf-8")
    table = out.rsplit("learning rate", 1)[1].splitlines()
    assert table[1].split()[0] == "lora"
