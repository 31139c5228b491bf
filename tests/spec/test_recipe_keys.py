"""Every key of a recipe has its line for people."""

from fitune.spec.recipe.keys import GROUPS, all_keys, keys_of
from fitune.spec.recipe.recipe import Recipe


def test_every_key_of_a_recipe_is_listed_once() -> None:
    listed = [key.name for key in all_keys()]
    assert sorted(listed) == sorted(Recipe.model_fields)
    assert len(set(listed)) == len(listed)


def test_a_line_names_no_type_and_ends_without_a_full_stop() -> None:
    for key in all_keys():
        assert key.about[0].isupper() or key.about.startswith(("liger", "0 is")), key.name
        assert not key.about.endswith("."), key.name
        assert len(key.about) <= 62, key.name


def test_values_and_defaults_are_those_of_the_recipe() -> None:
    keys = {key.name: key for group in GROUPS for key in keys_of(group)}
    assert keys["tuning"].values == ("full", "lora", "qlora", "lomo", "adalomo")
    assert keys["zero"].values == ("0", "1", "2", "3")
    assert (keys["seq_len"].default, keys["packing"].default, keys["adam_epsilon"].default) == (
        "2048",
        "false",
        "1e-08",
    )
    assert keys["tuning"].default == keys["data"].default == ""
