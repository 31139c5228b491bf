"""One table says what goes together: whatever is asked for, no plan that breaks a rule is proposed."""

from itertools import islice, product

import pytest

from fitune.errors import FituneError, NothingFits
from fitune.planner.search import find_plan
from fitune.recipe.recipe import Recipe, parse_recipe
from fitune.values.rules import RULES, broken_rules
from plans import CPU, gpu, known

HARDWARE = {
    "cpu": CPU,
    "v100-32gb": gpu("v100-32gb"),
    "rtx-4090": gpu("rtx-4090"),
    "2 × h100": gpu("h100", gpus=2),
}
CHOICES = {
    "tuning": (None, "full", "lora", "qlora", "lomo", "adalomo"),
    "optimizer": (None, "adamw-8bit", "sgd"),
    "optimizer_in_backward": (None, True),
    "max_grad_value": (None, 1.0),
    "gradient_accumulation_steps": (None, 2),
    "kernels": (None, "liger"),
    "torch_compile": (None, True),
    "precision": (None, "fp32", "fp16", "bf16-master"),
    "offload": ((), ("parameters",), ("optimizer",), ("activations",), ("parameters", "optimizer")),
    "zero": (None, 0, 2, 3),
    "backend": (None, "deepspeed"),
}


def recipes():
    """Every product of the choices as settings of a recipe; None is not set."""
    for values in product(*CHOICES.values()):
        settings = dict(zip(CHOICES, values, strict=True))
        away = {f"offload_{what}": "cpu" for what in settings.pop("offload")}
        asked = {key: value for key, value in settings.items() if value is not None}
        yield {"model": "qwen3-0.6b", "seq_len": 256, "micro_batch_size": 1, **asked, **away}


def walk(settings_of_all, name):
    """Plans proposed, and recipes refused with what to do instead."""
    planned = refused = 0
    for settings in settings_of_all:
        recipe = parse_recipe(settings)
        try:
            report = find_plan(recipe, model=known("qwen3-0.6b"), hardware=HARDWARE[name])
        except NothingFits:
            continue
        except FituneError as error:
            refused += bool(error.hint)
            continue
        for priced in (report.chosen, *report.runners_up):
            assert not broken_rules(priced.plan, "plan"), settings
            planned += 1
    return planned, refused


@pytest.mark.parametrize("stride", [1999, pytest.param(101, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HARDWARE)
def test_no_plan_breaks_a_rule(name, stride):
    """Of 92,160 by steps that divide none of the choices."""
    planned, refused = walk(islice(recipes(), 0, None, stride), name)
    assert planned
    assert refused


def test_every_rule_says_what_to_do_and_names_settings_that_there_are():
    for rule in RULES:
        assert rule.instead
        assert rule.binds
        assert set(rule.settings) <= set(Recipe.model_fields)


def test_an_attention_that_a_models_own_blocks_would_ignore_is_refused():
    recipe = parse_recipe({"model": "falcon-7b", "attn_implementation": "eager", "tuning": "lora"})
    with pytest.raises(FituneError, match="falcon bring an attention of their own"):
        find_plan(recipe, model=known("falcon-7b"), hardware=HARDWARE["2 × h100"])
