"""Every key of a recipe has its line for people."""

import datetime

import pytest

from fitune.errors import RecipeError
from fitune.recipe.keys import GROUPS, all_keys, keys_by_group
from fitune.recipe.recipe import Recipe, parse_recipe


def test_every_key_of_a_recipe_is_listed_once():
    assert [key.name for key in all_keys()] == list(Recipe.model_fields)
    assert [keys[0].name for keys in keys_by_group().values()] == list(GROUPS)


def test_values_and_defaults_are_those_of_the_recipe():
    keys = {key.name: key for key in all_keys()}
    assert keys["tuning"].values == ("full", "lora", "qlora", "lomo", "adalomo")
    assert keys["zero"].values == ("0", "1", "2", "3")
    defaults = {"seq_len": "2048", "packing": "false", "adam_epsilon": "1e-08", "tuning": "", "data": ""}
    assert {name: keys[name].default for name in defaults} == defaults


def test_a_date_is_a_day_however_it_is_written():
    keys = {"model": "gpt2"}
    for written in ("2026-01-31", datetime.date(2026, 1, 31)):
        assert parse_recipe({**keys, "chat_template_date": written}).chat_template_date == "2026-01-31"
    assert parse_recipe(keys).chat_template_date == ""
    for written in ("31 Jan 2026", "2026-02-31", "today", 2026):
        with pytest.raises(RecipeError, match=r"chat_template_date = .*: must be a day: 2026-01-31"):
            parse_recipe({**keys, "chat_template_date": written})
