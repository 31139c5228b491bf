"""Laws: nearly all published supervised examples are read; what is refused is refused by the name of the key."""

from collections import Counter
from pathlib import Path

import pytest

from fitune.errors import RecipeError
from fitune.recipe.contradictions import require_consistent
from recipe.foreign.examples import published_examples, read_keys

EXAMPLES = list(published_examples())
LEAST_SHARE = {"axolotl": 0.9, "LLaMA-Factory": 0.95, "torchtune": 0.95, "TRL": 1.0}


def read(example):
    found = read_keys(example.keys, gpus=8)
    require_consistent(found, devices=8)
    return found


def accepted(example):
    try:
        read(example)
    except RecipeError:
        return False
    return True


def test_nine_of_ten_examples_by_full_lora_and_qlora_are_read():
    usual = [example for example in EXAMPLES if not example.other_method]
    counts = Counter(example.trainer for example in usual)
    good = Counter(example.trainer for example in usual if accepted(example))
    for trainer, least in LEAST_SHARE.items():
        assert good[trainer] >= least * counts[trainer], (trainer, good, counts)
    assert sum(good.values()) >= 0.95 * sum(counts.values())


def test_every_other_method_is_refused_by_the_key_that_asks_for_it():
    for example in EXAMPLES:
        if not example.other_method:
            continue
        with pytest.raises(RecipeError, match="would change the result") as refused:
            read(example)
        named = [line.strip().split(":")[0] for line in str(refused.value).splitlines()[1:]]
        asked = {name.split("[")[0] for name in named} & set(example.keys)
        assert asked, (example.name, example.other_method, str(refused.value))


def test_every_key_of_a_read_example_has_a_line():
    from fitune.recipe.foreign import read_foreign

    for example in EXAMPLES:
        reading = read_foreign(example.keys, where=example.name, folder=Path("nowhere"))
        assert reading is not None, example.name
        assert reading.trainer == example.trainer
        named = {line.key.split("[")[0].split(".")[0] for line in reading.lines if line.key}
        assert named == set(example.keys), example.name
