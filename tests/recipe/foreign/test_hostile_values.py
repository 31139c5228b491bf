"""Law: whatever stands under a key of another trainer, the answer is a recipe or an error for people."""

from contextlib import suppress

import pytest

from fitune.errors import FituneError
from recipe.foreign.examples import published_examples, read_keys

HOSTILE = ["x", -1, 0, 1e308, float("nan"), True, [[]], [{}], [None], {"a": 1}, {"_component_": 3}, "\ud800"]


@pytest.mark.parametrize("trainer", ["axolotl", "LLaMA-Factory", "torchtune", "TRL"])
def test_no_value_leads_to_a_traceback(trainer):
    seen = set()
    for example in published_examples():
        new = [key for key in example.keys if key not in seen]
        if example.trainer != trainer or not new:
            continue
        seen.update(new)
        for number, key in enumerate(new):
            for value in HOSTILE[number % 4 :: 4]:
                with suppress(FituneError):
                    read_keys({**example.keys, key: value})
    assert len(seen) > 15


def test_the_error_names_the_key_and_its_value():
    keys = {"base_model": "m", "sequence_len": 8, "micro_batch_size": 1, "warmup_steps": "many"}
    with pytest.raises(FituneError, match="warmup_steps = 'many' is not what axolotl takes there"):
        read_keys(keys)
    with pytest.raises(FituneError, match="fsdp_config = '\\$X' is not what axolotl takes there\n"):
        read_keys(keys | {"warmup_steps": 3, "fsdp_config": "$X"})
