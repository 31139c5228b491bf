"""Regular expressions of strangers: what re says of them, or an error, in bounded time and memory."""

import re
import time
from contextlib import suppress

import pytest

from fitune.errors import RecipeError
from fitune.spec.recipe.patterns import Clock
from fitune.spec.recipe.targets import resolve_targets
from plans import small_llama

NAMES = [
    *(f"model.layers.{i}.{m}" for i in (0, 1, 12) for m in ("self_attn.q_proj", "mlp.down_proj")),
    "model.layers.3.mlp.experts.0.w1", "transformer.h.7.attn.c_attn", "lm_head", "model.layers.0." + "a" * 200,
]  # fmt: skip


@pytest.mark.parametrize(
    "expression",
    [
        ".*q_proj",
        r"model\.layers\.(0|1|12)\.self_attn\.[qkv]_proj",
        r"(?:.*\.)?mlp\.(?:up|down)_proj$",
        "lm_head|.*w1",
        r"(\w+\.)*q_proj",
        r"(?P<root>\w+)\.layers\.\d{1,3}\..*(?<!up)_proj",
        r"(?i).*Q_PROJ",
        r".*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?",
        r".*\.[0-9]+\.(?!mlp).*",
        "",
    ],
)
def test_an_expression_means_what_it_means_to_python(expression: str) -> None:
    clock = Clock(left=600.0)  # about meaning: a slow machine may take its time
    for name in NAMES:
        assert bool(clock.fullmatch(expression, name)) is bool(re.fullmatch(expression, name)), name
        assert bool(clock.match(expression, name)) is bool(re.match(expression, name)), name


BOMBS = {
    "nested repeats": (r"(a+)+$", "a" * 200 + "!"),
    "overlapping choices": (r"(a|aa)+b", "a" * 200),
    "a word again and again": (r"(\w+\.?)+!", NAMES[-1]),
    "a polynomial": (".*" * 12 + "z", "a" * 300),
    "looking ahead": (r"(?=(a|a)+b).*", "a" * 200),
    "counted": (r"(?:x{2147483647})", "x"),
    "counted twice": (r"(?:(?:x{900}){900}){900}", "x"),
    "deep repeats": ("(" * 60 + "a+" + ")+" * 60, "a" * 50),
    "deep groups": ("(" * 3000 + ")" * 3000, "a"),
    "long": ("a|" * 5000, "b"),
    "no expression": ("(", "a"),
    "another dialect": (r"(?R)", "a"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_expression_takes_long_or_much(bomb: str) -> None:
    """Matched, not matched or refused: all three are answers."""
    clock = Clock()
    for _ in range(3):
        with suppress(ValueError):
            clock.fullmatch(*BOMBS[bomb])


def test_time_in_which_the_machine_does_other_work_does_not_count() -> None:
    class Waiting:
        def fullmatch(self, text: str, timeout: float) -> bool:
            time.sleep(2 * timeout)
            return True

    clock = Clock(left=0.05, _compiled={"a": Waiting()})
    assert clock.fullmatch("a", "a")
    assert clock.fullmatch("a", "a")


@pytest.mark.parametrize("pattern", [r"(\w|\w\w|\w.)+!", ".*" * 12 + "!", "(?:x{2147483647})", "(", "(?R)"])
def test_a_recipe_with_such_an_expression_is_refused(pattern: str) -> None:
    with pytest.raises(RecipeError, match="lora_target_modules"):
        resolve_targets(small_llama(), [pattern])
