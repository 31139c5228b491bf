"""Whatever stands in a recipe, the refusal is a RecipeError that names the place, or the setting and its limit."""

import pytest

from fitune.errors import RecipeError
from fitune.files import path_fault
from fitune.recipe.recipe import Recipe, SourceRecipe, dump_recipe, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.recipe.types import MOST
from fitune.session.recipes.reading import read_any_recipe

_TAGS = [
    "!!map [1, 2]", '!!timestamp "x"', '!!int ""', "!!set {a: b}", "!!str 1", "! 1", "!own 1", "!!python/none x",
]  # fmt: skip
_PLAIN = [
    "0x" + "f" * 5000, "2024-99-99", "0x_", "9" * 5000, "{<<: x}", "{? [a] : b}", "{null: 1}", "{2024-01-01: 1}",
    "[" * 100 + "]" * 100,
    "{a: " * 100 + "}" * 100, "[" * 100_000, "[a", "a: b: c", "&a [*a]", "*a", "a\0b", "a\x1bb", "a\ud800b", "@x",
]  # fmt: skip


@pytest.mark.parametrize("value", _TAGS, ids=ascii)
def test_tags_are_refused_with_their_line_and_column(value):
    with pytest.raises(RecipeError, match=r"^recipe.yaml:3:3: tags \("):
        parse_value(f"model: gpt2\nsystem:\n  {value}", where="recipe.yaml")


@pytest.mark.parametrize("value", _PLAIN, ids=lambda value: ascii(value[:24]))
def test_what_cannot_be_read_is_refused_with_its_line_and_column(value):
    with pytest.raises(RecipeError, match=r"^recipe.yaml:2:\d+: "):
        parse_value(f"model: gpt2\nsystem: {value}", where="recipe.yaml")


@pytest.mark.parametrize("value", ["010", "+0_7", "-00"])
def test_a_leading_zero_is_refused_where_yaml_counts_in_eights(value):
    with pytest.raises(RecipeError, match=r"^recipe.yaml:2:12: .* counts in eights.*leave the 0 out"):
        parse_value(f"model: gpt2\nmax_steps: {value}", where="recipe.yaml")
    assert parse_value("[0, -0, 10, 0x1F, 0.5, 08, '010']", where="") == [0, 0, 10, 31, 0.5, "08", "010"]


def test_a_recipe_of_a_megabyte_is_not_read(tmp_path):
    (tmp_path / "recipe.yaml").write_text("# \n" * 100_000)
    with pytest.raises(RecipeError, match=r"larger than 256.0 KiB"):
        read_any_recipe(tmp_path / "recipe.yaml")


_PATHS = ["output_dir", "model", "chat_template", "cache_dir", "nvme_path", "resume", "data", "eval_data"]


@pytest.mark.parametrize("setting", _PATHS)
@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("a\0b", "control character (U+0000)"),
        ("a\x1b[2Jb", "control character (U+001B)"),
        ("a\ud800b", "unpaired surrogate"),
        ("é" * 128, "has 256 bytes, at most 255"),
        ("x/" * 2100, "has 4200 bytes, at most 4095"),
        ("s3:/bucket/x", "looks like a URL whose '://' is not whole: s3://bucket/x, or ./s3:/bucket/x"),
    ],
    ids=ascii,
)
def test_a_path_that_no_file_can_have_is_refused_by_name(setting, path, cause):
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"model": "gpt2", setting: path})
    assert setting in caught.value.message
    assert cause in caught.value.message
    str(caught.value).encode()


@pytest.mark.parametrize("path", ["", "a", "/a/é/…", "a" * 255, "~/x", "s3://b/k", "a b", "a\u200bb"])
def test_other_paths_are_names(path):
    assert path_fault(path) is None


def _numbers(model, *kinds):
    return {
        name
        for name, field in model.model_fields.items()
        if any(kind in str(field.annotation) for kind in kinds)
    }


def test_every_whole_number_of_a_recipe_has_a_largest_value():
    few = {"quantization_bits", "zero", "seed", "lora_layers", "deepspeed"}
    assert _numbers(Recipe, "int") | _numbers(SourceRecipe, "int") <= set(MOST) | few


def _with_limits():
    shares = {
        "lora_dropout",
        "val_fraction",
        "warmup_ratio",
        "min_lr_ratio",
        "adam_beta1",
        "adam_beta2",
        "momentum",
    }
    floats = _numbers(Recipe, "float") | _numbers(SourceRecipe, "float")
    return {**dict.fromkeys(floats - shares, 3.4e38), **MOST}


def test_a_number_is_taken_up_to_its_limit_and_refused_with_it_above():
    for name, most in _with_limits().items():

        def read(value, name=name):
            inside = {"data": [{"path": "a", name: value}]} if name in ("sample", "weight") else {name: value}
            return parse_recipe({"model": "gpt2", **inside})

        dump_recipe(read(most))
        for value, said in ((2 * int(most), "must be at most"), (10**400, name), (f"1{'0' * 300}", name)):
            with pytest.raises(RecipeError, match=said) as caught:
                read(value)
            assert name in caught.value.message
            assert len(caught.value.message) < 2000


@pytest.mark.parametrize("size", [24.0, "24"])
def test_a_size_without_its_unit_is_refused(size):
    with pytest.raises(RecipeError, match="24 bytes are less than 1 MiB; write the unit, e.g. 24GiB"):
        parse_recipe({"model": "m", "gpu_memory": size})


@pytest.mark.parametrize("setting", ["gpu", "lora_target_modules"])
def test_a_text_with_an_unpaired_surrogate_is_refused(setting):
    with pytest.raises(RecipeError, match=f"{setting}.* = .*unpaired surrogate") as caught:
        parse_recipe({"model": "gpt2", setting: "a\ud800"})
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("added_tokens", ["hf_" + "a1" * 18]), ("columns", {"prompt": "s3://me:secret@host/x"})],
)
def test_a_credential_in_a_list_or_a_mapping_is_refused(setting, value):
    with pytest.raises(RecipeError, match="settings are saved and shown"):
        parse_recipe({"model": "gpt2", setting: value})
