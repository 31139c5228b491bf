"""Liger's kernels and compiled blocks are planned when they are asked for."""

import pytest

from fitune.errors import NothingFits
from fitune.report.plan_words import sentences
from fitune.values.choices import Offload
from fitune.values.plan import updates_in_backward
from fitune.values.words import describe_plan
from plans import lines_of, plan_of, report_of

SMALL, LARGE = "llama-3.2-1b", "llama-3.1-8b"
ONE_ROW = (
    "seq_len: 4096, micro_batch_size: 1, gradient_checkpointing: 0, loss_chunk_tokens: 256, "
    "offload_activations: device, offload_parameters: device"
)


def test_neither_is_taken_unless_asked_for():
    plan = plan_of(SMALL, "rtx-4090", "tuning: lora")
    assert (plan.kernels, plan.compile_blocks) == ("torch", False)


def test_liger_is_planned_smaller_and_faster():
    settings = (
        "tuning: lora, micro_batch_size: 8, gradient_accumulation_steps: 1, gradient_checkpointing: false"
    )
    without, chosen = (
        report_of(SMALL, "h100", f"{settings}, loss_chunk_tokens: 1024", kernels=kernels).chosen
        for kernels in ("torch", "liger")
    )
    plan = chosen.plan
    assert plan.kernels == "liger"
    assert chosen.estimate.peak_bytes < without.estimate.peak_bytes
    assert chosen.estimate.tokens_per_second > without.estimate.tokens_per_second
    assert "Liger's kernels" in describe_plan(plan)
    assert any("Liger" in sentence for sentence in sentences(plan, total=None))


def test_compiled_blocks_are_planned_with_what_is_not_known():
    plain, report = (report_of(SMALL, "rtx-4090", tuning="lora", torch_compile=on) for on in (False, True))
    assert report.chosen.plan.compile_blocks
    assert report.chosen.estimate == plain.chosen.estimate
    [note] = lines_of(report, "note on torch_compile")
    assert "not estimated" in note
    assert "compiled blocks" in describe_plan(report.chosen.plan)


@pytest.mark.parametrize(
    ("model", "settings"), [(SMALL, "tuning: full"), (LARGE, ""), (LARGE, "tuning: qlora")]
)
def test_what_compiled_blocks_forbid_is_not_chosen_for_them_either(model, settings):
    """``train`` would refuse what ``plan`` shows."""
    report = report_of(model, "rtx-4090", settings, torch_compile=True)
    for priced in (report.chosen, *report.runners_up):
        assert priced.plan.offload == Offload()
        assert not updates_in_backward(priced.plan.tuning)


def test_compiled_blocks_that_fit_only_from_the_host_do_not_fit():
    assert plan_of(LARGE, "rtx-4090", "tuning: full").offload != Offload()
    with pytest.raises(NothingFits):
        report_of(LARGE, "rtx-4090", "tuning: full, torch_compile: true")


def hint_of(settings):
    with pytest.raises(NothingFits) as caught:
        report_of(LARGE, "a100-40gb", f"{settings}, {ONE_ROW}")
    return str(caught.value.hint)


def test_liger_is_proposed_where_it_makes_room():
    settings = "tuning: lora, precision: bf16-master, gradient_accumulation_steps: 1"
    assert "kernels: liger (pip install 'fitune[liger]')" in hint_of(settings)
    assert report_of(LARGE, "a100-40gb", f"{settings}, {ONE_ROW}, kernels: liger").chosen.estimate.fits


@pytest.mark.parametrize(("clip", "offered"), [("max_grad_norm", False), ("max_grad_value", True)])
def test_liger_is_not_proposed_where_it_cannot_be_trained(clip, offered):
    """Clipped by norm, LOMO goes back twice; by value once."""
    assert ("kernels: liger" in hint_of(f"tuning: lomo, precision: bf16, {clip}: 1.0")) is offered


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
    settings = f"tuning: lora, seq_len: 512, precision: {precision}"
    plain, report = (report_of(SMALL, card, settings, tf32=on) for on in (False, True))
    plan = report.chosen.plan
    assert (plain.chosen.plan.tf32, plan.tf32, "TF32" in describe_plan(plan)) == (False, planned, planned)
    [note] = lines_of(report, "note on tf32")
    assert said in note
    assert not any("tf32" in line for line in plain.decisions)
