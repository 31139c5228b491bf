"""Every method by the ordinary loop: it learns, a run that was stopped ends bit for bit like one that was not, and what
it merges answers as PEFT does."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fitune.values.plan import AdamW8bit
from optional_libraries import NEEDS_BITSANDBYTES
from runs import assert_merged, losses, same_weights, stopped_and_resumed, trained

FULL = {"tuning": "full"}
AT_ONCE = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
QLORA = {"tuning": "qlora", "lora_dropout": 0.1}
TABLES = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
WORDS = {"added_tokens": ["<think>", "</think>"]}
METHODS = {
    "adapters with dropout, on packed rows": (
        {"packing": True, "micro_batch_size": 1, "seq_len": 100, "lora_dropout": 0.1}, 0.98,
    ),
    "all weights, with masters": ({**FULL, "precision": "bf16-master", "optimizer": "adamw"}, 0.8),
    "8-bit AdamW": (FULL, 0.8),
    "AdamW in backward": ({**FULL, **AT_ONCE, "optimizer_in_backward": True, "max_grad_norm": 1.0}, 0.8),
    "LOMO": ({**AT_ONCE, "tuning": "lomo", "precision": "bf16", "learning_rate": 0.3, "max_grad_norm": 1.0}, 0.8),
    "AdaLomo": ({**AT_ONCE, "tuning": "adalomo", "learning_rate": 0.1, "max_grad_value": 1.0}, 0.9),
    "adapters on NF4": ({**QLORA, "precision": "bf16-master"}, 0.98),
    "adapters on HQQ": ({**QLORA, "quantization": "hqq"}, 0.98),
    "DoRA on NF4": ({**QLORA, "dora": True}, 0.98),
    "adapters and tables": ({**TABLES, "precision": "bf16-master", "lora_layers": [1]}, 0.8),
    "added tokens": (WORDS, 0.8),
}  # fmt: skip
"""Name -> settings, and the most of the first loss that ten steps leave: adapters on a random frozen base cannot learn
much."""


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("DoRA" in name)) for name in METHODS]
)
def test_it_learns_and_a_run_that_was_interrupted_mid_epoch_ends_bit_for_bit_the_same(
    make_plan, tmp_path, name
):
    """An epoch is seven steps: the run is saved after four of them and stopped after five."""
    settings, share = METHODS[name]
    plans = [
        make_plan(**{"max_steps": 10, "save_steps": 4, **settings}, output_dir=str(tmp_path / each))
        for each in ("straight", "broken")
    ]
    if name == "8-bit AdamW":  # no recipe says it on a CPU, where it is slow
        plans = [replace(plan, optimizer=AdamW8bit()) for plan in plans]
    report = stopped_and_resumed(*plans, stop_after=5)
    assert report.final_loss < share * report.first_loss


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("method", [{"dora": True}, {"tuning": "qlora"}], ids=["DoRA", "NF4"])
def test_merged_it_is_the_16_bit_base_and_the_adapter(make_plan, method):
    """Without any packing."""
    assert_merged(make_plan(**method, max_steps=5, learning_rate=5e-2))


@NEEDS_BITSANDBYTES
def test_tables_are_merged_into_a_base_that_is_not_packed(make_plan):
    plan = make_plan(**TABLES, tuning="qlora", max_steps=3, export="merged", learning_rate=5e-2)
    report = trained(plan)
    merged = load_file(Path(report.exported) / "model.safetensors")
    base = load_file(Path(plan.model_path) / "model.safetensors")
    assert merged.keys() == base.keys()
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    assert tables < {name for name in base if not base[name].equal(merged[name])}
    frozen = sum(tensor.numel() for name, tensor in base.items() if name not in tables)
    assert report.total_parameters - report.trainable_parameters == frozen


def test_a_run_of_the_plain_engine_goes_on_in_backward(make_plan, tmp_path):
    """What to try when memory runs out: unclipped, and without accumulation, they are the same to the bit."""
    common = {**FULL, **AT_ONCE, "max_steps": 6, "save_steps": 2, "max_grad_norm": 0, "weight_decay": 0.1}
    straight, broken = (
        make_plan(**common, output_dir=str(tmp_path / name)) for name in ("straight", "broken")
    )
    inside = make_plan(**common, optimizer_in_backward=True, output_dir=str(tmp_path / "broken"))
    one = trained(straight)
    trained(broken, stop_after=3)
    two = trained(inside, resume=True)
    assert losses(straight) == losses(inside)
    assert same_weights(one.exported, two.exported)
