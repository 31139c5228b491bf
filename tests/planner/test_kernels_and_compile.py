"""Liger's kernels and compiled blocks are planned when they are asked for, and refused with the reason."""

import pytest

from fitune.errors import HardwareError, NothingFits, RecipeError
from fitune.report.plan_words import sentences
from fitune.spec.choices import Offload
from fitune.spec.plan import Plan, updates_in_backward
from fitune.spec.recipe.recipe import canonical_keys
from fitune.spec.serial import from_data, from_json, to_data, to_json
from fitune.spec.words import describe_plan
from plans import report_of


def lora_report(model, card, **settings):
    return report_of(model, card, **{"tuning": "lora", **settings})


def test_neither_is_taken_unless_asked_for():
    plan = lora_report("llama-3.2-1b", "rtx-4090").chosen.plan
    assert (plan.kernels, plan.compile_blocks) == ("torch", False)


def test_a_plan_from_before_they_were_can_be_read():
    plan = lora_report("llama-3.2-1b", "rtx-4090").chosen.plan
    old = {
        name: value
        for name, value in to_data(plan).items()
        if name not in ("kernels", "compile_blocks", "tf32")
    }
    assert from_data(Plan, old) == plan


def test_liger_is_planned_smaller_and_faster():
    settings = {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "loss_chunk_tokens": 1024,
    }
    without, chosen = (
        lora_report("llama-3.2-1b", "h100", kernels=kernels, **settings).chosen
        for kernels in ("torch", "liger")
    )
    assert chosen.plan.kernels == "liger"
    assert chosen.estimate.peak_bytes < without.estimate.peak_bytes
    assert chosen.estimate.tokens_per_second > without.estimate.tokens_per_second
    assert "Liger's kernels" in describe_plan(chosen.plan)
    assert any("Liger" in sentence for sentence in sentences(chosen.plan))
    assert from_json(Plan, to_json(chosen.plan)) == chosen.plan


def test_compiled_blocks_are_planned_with_what_is_not_known():
    plain, report = (lora_report("llama-3.2-1b", "rtx-4090", torch_compile=on) for on in (False, True))
    assert report.chosen.plan.compile_blocks
    assert report.chosen.estimate == plain.chosen.estimate
    assert any(
        line.startswith("note on torch_compile") and "not estimated" in line for line in report.decisions
    )
    assert "compiled blocks" in describe_plan(report.chosen.plan)


@pytest.mark.parametrize(
    ("model", "tuning"),
    [("llama-3.2-1b", None), ("llama-3.2-1b", "full"), ("llama-3.1-8b", None), ("llama-3.1-8b", "qlora")],
)
def test_what_compiled_blocks_forbid_is_not_chosen_for_them_either(model, tuning):
    """``train`` would refuse what ``plan`` shows."""
    report = lora_report(model, "rtx-4090", tuning=tuning, torch_compile=True)
    for priced in (report.chosen, *report.runners_up):
        assert priced.plan.offload == Offload()
        assert not updates_in_backward(priced.plan.tuning)


def test_compiled_blocks_that_fit_only_from_the_host_do_not_fit():
    assert lora_report("llama-3.1-8b", "rtx-4090", tuning="full").chosen.plan.offload != Offload()
    with pytest.raises(NothingFits):
        lora_report("llama-3.1-8b", "rtx-4090", tuning="full", torch_compile=True)


@pytest.mark.parametrize(
    ("model", "card", "settings", "error", "words"),
    [
        ("llama-3.2-1b", "cpu", {"kernels": "liger"}, HardwareError, "7.0 and newer, not on a CPU"),
        ("falcon-7b", "h100", {"kernels": "liger"}, RecipeError, r"\(falcon\) has others"),
        ("gpt2", "h100", {"kernels": "liger"}, RecipeError, r"\(gpt2\) has others"),
        ("llama-3.2-1b", "h100", {"kernels": "liger", "torch_compile": True}, RecipeError, "overwrite saved"),
        ("llama-3.2-1b", "h100", {"tuning": "lomo", "torch_compile": True}, RecipeError, "all of its gradients"),
        ("llama-3.2-1b", "h100", {"offload_activations": "cpu", "torch_compile": True}, RecipeError, "moves them"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(model, card, settings, error, words):
    with pytest.raises(error, match=words) as caught:
        lora_report(model, card, **settings)
    assert caught.value.hint


@pytest.mark.parametrize("key", ["liger_rms_norm", "liger_glu_activation", "plugins"])
def test_switches_for_single_kernels_are_refused_with_ours(key):
    with pytest.raises(RecipeError) as caught:
        canonical_keys({key: True}, where="test")
    assert "kernels: liger" in str(caught.value)


def test_liger_is_proposed_where_it_makes_room():
    settings = {
        "precision": "bf16-master",
        "seq_len": 4096,
        "micro_batch_size": 1,
        "gradient_checkpointing": 0,
        "gradient_accumulation_steps": 1,
        "loss_chunk_tokens": 256,
        "offload_activations": "device",
        "offload_parameters": "device",
    }
    with pytest.raises(NothingFits) as caught:
        lora_report("llama-3.1-8b", "a100-40gb", **settings)
    assert "kernels: liger (pip install 'fitune[liger]')" in str(caught.value.hint)
    assert lora_report("llama-3.1-8b", "a100-40gb", kernels="liger", **settings).chosen.estimate.fits


def test_liger_is_not_proposed_where_it_cannot_be_trained():
    """Clipped by norm, LOMO goes back twice; by value once."""
    settings = {
        "precision": "bf16", "seq_len": 4096, "micro_batch_size": 1, "gradient_checkpointing": 0,
        "loss_chunk_tokens": 256, "offload_activations": "device", "offload_parameters": "device",
    }  # fmt: skip
    hints = []
    for clip in ({"max_grad_norm": 1.0}, {"max_grad_value": 1.0}):
        with pytest.raises(NothingFits) as caught:
            lora_report("llama-3.1-8b", "a100-40gb", tuning="lomo", **clip, **settings)
        hints.append("kernels: liger" in str(caught.value.hint))
    assert hints == [False, True]


@pytest.mark.parametrize(
    ("card", "precision", "planned", "said"),
    [
        ("a100-80gb", "fp32", True, "seconds are estimated for fp32 products"),
        ("a100-80gb", "bf16", False, "precision bf16 has no fp32 products"),
        ("t4", "fp32", False, "t4 has none; Ampere"),
        ("cpu", "fp32", False, "has none; Ampere"),
    ],
)
def test_tf32_is_planned_where_it_has_an_effect_and_said_where_not(card, precision, planned, said):
    plain, report = (lora_report("llama-3.2-1b", card, precision=precision, tf32=on) for on in (False, True))
    assert not plain.chosen.plan.tf32
    assert report.chosen.plan.tf32 is planned
    assert ("TF32" in describe_plan(report.chosen.plan)) is planned
    [note] = [line for line in report.decisions if line.startswith("note on tf32")]
    assert said in note
    assert not any("tf32" in line for line in plain.decisions)
