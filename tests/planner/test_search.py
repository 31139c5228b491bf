"""The planner keeps every pin, decides the rest, and says what it decided and why nothing fits."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from fitune.errors import NothingFits, RecipeError
from fitune.estimate.overhead import usable_bytes
from fitune.planner.defaults import with_host_memory
from fitune.planner.explain import memory_sum
from fitune.planner.search import find_plan
from fitune.units import GIB, format_bytes
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.plan import ChunkedLoss, Full, Lora, PlainLoss, Precision, Sgd, Steps
from plans import gpu, known, lines_of, plan_of, recipe_of, report_of

LLAMA_1B = "llama-3.2-1b"
LLAMA_8B = "llama-3.1-8b"
QWEN = "qwen3-0.6b"


def test_an_8b_model_on_a_24_gib_card_gets_lora_and_says_why():
    report = report_of(LLAMA_8B, with_host_memory(gpu("rtx-4090")))
    assert isinstance(report.chosen.plan.tuning, Lora)
    assert report.chosen.estimate.fits
    [rejected] = report.rejected
    assert rejected.what == "full, bf16-master, AdamW"
    assert "weights 14.96" in rejected.why
    assert lines_of(report, "tuning: lora")


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN])
def test_the_terms_of_a_sum_add_up_as_printed(model):
    report = report_of(model, "rtx-4090", tuning="lora")
    terms, _, rest = memory_sum(report.chosen.estimate).replace(",", "").partition(" = ")
    added = sum(float(term.rsplit(" ", 1)[1]) for term in terms.split(" + "))
    assert added == pytest.approx(float(rest.split()[0]), abs=0.011)


def test_a_small_model_is_trained_in_full():
    report = report_of(QWEN, "h100")
    plan, others = report.chosen.plan, report.runners_up
    assert isinstance(plan.tuning, Full)
    assert plan.recompute.blocks == 0
    assert plan.schedule.learning_rate == 2e-5
    assert not report.rejected
    assert all(runner.estimate.fits for runner in others)
    assert (len(others), len({plan, *(runner.plan for runner in others)})) == (3, 4)
    assert not any("does nothing" in line for line in report.decisions)


@pytest.mark.parametrize(
    ("model", "card", "settings", "precision", "attention"),
    [
        ("tinyllama", "t4", "seq_len: 256", "fp16", "sdpa"),
        ("tinyllama", "a100-40gb", "seq_len: 256", "bf16-master", "flash"),
        ("tinyllama", "cpu", "seq_len: 256", "fp32", "sdpa"),
        ("mistral-7b", "h100", "seq_len: 8192", "bf16-master", "flash"),  # windows
        ("mistral-7b", "h100", "seq_len: 8192, precision: fp32", "fp32", "sdpa"),
        ("gpt-oss-20b", "h100", "seq_len: 2048", "bf16-master", "eager"),  # a learned score
    ],
)  # fmt: skip
def test_precision_and_attention_follow_the_device_and_the_model(model, card, settings, precision, attention):
    plan = plan_of(model, card, settings, tuning="lora")
    assert (plan.precision, plan.attention) == (precision, attention)


def test_every_pin_is_kept():
    plan = plan_of(
        LLAMA_1B, "h100",
        "tuning: lora, precision: bf16, lora_r: 4, lora_alpha: 12, lora_dropout: 0.1, "
        "lora_target_modules: [q_proj, v_proj], micro_batch_size: 3, gradient_accumulation_steps: 5, seq_len: 777, "
        "packing: true, optimizer: momentum, momentum: 0.8, weight_decay: 0.2, learning_rate: 3e-5, "
        "gradient_checkpointing: 5, loss: chunked, loss_chunk_tokens: 123, attn_implementation: sdpa, max_steps: 7, "
        "warmup_steps: 2, max_grad_norm: 0.5, output_dir: somewhere, export: merged, seed: 1, lr_scheduler: linear, "
        "data: [a.jsonl#50], val_fraction: 0.1, eval_steps: 3, save_steps: 4, keep_checkpoints: 1, "
        "report_to: [tensorboard]",
    )  # fmt: skip
    batch, schedule, run = plan.batch, plan.schedule, plan.run
    assert plan.tuning == Lora(rank=4, alpha=12, dropout=0.1, targets=("q_proj", "v_proj"))
    assert (plan.precision, plan.optimizer, plan.attention) == (
        Precision.BF16,
        Sgd(momentum=0.8, weight_decay=0.2),
        "sdpa",
    )
    assert (batch.micro_batch_size, batch.accumulation, batch.seq_len, batch.packing) == (3, 5, 777, True)
    assert (plan.recompute.blocks, plan.loss) == (5, ChunkedLoss(chunk_tokens=123))
    assert (schedule.learning_rate, schedule.kind, schedule.max_grad_norm) == (3e-5, "linear", 0.5)
    assert (schedule.duration, schedule.warmup) == (Steps(count=7), Steps(count=2))
    assert (run.output_dir, run.export, run.seed, run.report_to) == (
        "somewhere",
        "merged",
        1,
        ("tensorboard",),
    )
    assert (run.eval_every, run.save_every, run.keep_checkpoints) == (3, 4, 1)
    assert (plan.data.sources[0].path, plan.data.val_fraction) == ("a.jsonl#50", 0.1)


@pytest.mark.parametrize(
    ("card", "settings", "beside", "told"),
    [
        ("h100", "save_steps: 10", True, True),
        ("h100", "save_steps: 0", False, False),  # nothing is saved
        ("h100", "save_steps: 10, async_save: false", False, False),
        ("cpu", "save_steps: 10", False, False),
        ("cpu", "save_steps: 10, async_save: true", True, False),
    ],
)
def test_checkpoints_are_written_beside_the_steps_of_a_gpu(card, settings, beside, told):
    report = report_of(QWEN, card, settings, tuning="lora", seq_len=256)
    assert report.chosen.plan.run.async_save == beside
    assert bool(lines_of(report, "async_save")) == told


def test_a_host_without_room_for_the_copy_has_the_steps_wait():
    settings = "tuning: full, precision: bf16-master, save_steps: 10"
    hardware = gpu("h100", host_memory_bytes=8 * GIB)
    report = report_of(QWEN, hardware, settings)
    assert not report.chosen.plan.run.async_save
    assert any("no room for a copy of" in line for line in report.decisions)
    with pytest.raises(NothingFits, match="checkpoint copy"):
        plan_of(QWEN, hardware, settings, async_save=True)


def test_the_copy_of_a_checkpoint_is_not_usable_memory_of_a_processor():
    """The smallest plan has room beside no copy; what is short counts with it."""
    hardware = hardware_for(gpu=cpu_gpu(memory_bytes=16 * GIB, cores=8))
    settings = "tuning: full, objective: least-memory, seq_len: 512, global_batch_size: 1"
    with pytest.raises(NothingFits) as caught:
        plan_of(QWEN, hardware, settings, async_save=True)
    facts = caught.value.facts
    (short,) = facts["short"]
    assert short["usable_bytes"] == facts["usable_bytes"] < facts["needed_bytes"] < usable_bytes(hardware)
    assert f"{format_bytes(facts['needed_bytes'] - facts['usable_bytes'])} short)" in caught.value.message


@pytest.mark.parametrize(("setting", "blocks"), [("true", 16), ("false", 0)])
def test_recompute_can_be_pinned_to_all_or_none(setting, blocks):
    plan = plan_of(LLAMA_1B, "h100", f"tuning: lora, loss: plain, gradient_checkpointing: {setting}")
    assert (plan.recompute.blocks, plan.loss) == (blocks, PlainLoss())


@pytest.mark.parametrize(
    ("settings", "micro", "steps"),
    [
        ("micro_batch_size: 3", 3, 5),
        ("micro_batch_size: 40", 40, 1),
        ("gradient_accumulation_steps: 8", 2, 8),
        ("micro_batch_size: 2, global_batch_size: 12", 2, 6),
    ],
)
def test_the_batch_keeps_its_pins(settings, micro, steps):
    batch = plan_of(LLAMA_1B, "h100", settings, tuning="lora", seq_len=128).batch
    assert (batch.micro_batch_size, batch.accumulation) == (micro, steps)


@pytest.mark.parametrize("whole", [1, 7, 48])
def test_an_open_split_multiplies_to_the_global_batch(whole):
    plan = plan_of(LLAMA_1B, "h100", tuning="lora", global_batch_size=whole)
    assert plan.batch.global_batch_size == whole


def test_defaults_are_decided_and_printed_and_pins_are_not():
    report = report_of(LLAMA_8B, "h100", tuning="lora")
    plan = report.chosen.plan
    assert (plan.schedule.learning_rate, plan.tuning.alpha) == (2e-4, 32)
    assert (plan.run.output_dir, plan.run.export) == ("runs/llama-3.1-8b-lora", "adapter")
    for start in (
        "learning rate: 0.0002",
        "lora_alpha: 32",
        "output: runs/",
        "batch: ",
        "recompute: ",
        "loss: ",
    ):
        assert lines_of(report, start)
    pinned = report_of(QWEN, "h100", tuning="full", precision="bf16", learning_rate=1e-5)
    assert not lines_of(pinned, ("tuning", "precision", "learning rate"))
    assert lines_of(pinned, "note on bf16: with 8 significant bits")


@pytest.mark.parametrize(
    ("settings", "idle", "of"),
    [
        ("tuning: full, lora_r: 8", "lora_r", "tuning"),
        ("optimizer: sgd, adam_beta2: 0.95, momentum: 0", "adam_beta2", "optimizer"),
        ("momentum: 0.5", "momentum", "optimizer"),
        ("tuning: lora, double_quantization: false", "double_quantization", "tuning"),
        ("tuning: qlora, quantization_group_size: 32", "quantization_group_size", "quantization"),
    ],
)
def test_a_setting_without_effect_is_no_contradiction_but_said_to_do_nothing(settings, idle, of):
    report = report_of(QWEN, "h100", settings)
    assert f"note on {idle}: it does nothing with the {of} of this plan" in report.decisions


def test_the_reason_of_a_decision_is_the_true_one():
    report = report_of(LLAMA_1B, "h100", export="adapter", micro_batch_size=2)
    assert lines_of(report, "tuning: lora, because of export: adapter")
    [batch] = lines_of(report, "batch:")
    assert "fastest split" not in batch  # the only one there is


def refused(model, hardware, settings):
    with pytest.raises(NothingFits) as caught:
        plan_of(model, hardware, settings)
    return " ".join(caught.value.message.split()), caught.value.hint


def test_nothing_fits_names_the_smallest_memory_the_device_and_the_change():
    text, hint = refused(LLAMA_8B, "rtx-4090", "tuning: full, offload_optimizer: device")
    assert "21.81 GiB usable" in text
    assert "smallest memory that is enough: 6" in text
    assert "the smallest known GPU that holds it: h100" in text
    every_weight, *others = hint.split(", or ")
    assert every_weight.startswith("tuning: adalomo, which trains every weight too")
    assert others == ["tuning: lora", "tuning: qlora", "offload_optimizer: cpu"]


def test_a_host_that_is_too_small_is_said_with_its_sum():
    settings = "tuning: full, offload_optimizer: cpu"
    text, _ = refused(LLAMA_8B, gpu("rtx-4090", host_memory_bytes=32 * GIB), settings)
    assert "it fits the devices but not the host: processes 3.0 + optimizer 89.7" in text
    assert "28.8 usable" in text
    assert "smallest" not in text
    enough = int(text.rsplit("host_memory: ", 1)[1].split("GiB")[0])
    for host, fits in ((enough, True), (enough - 1, False)):
        here = gpu("h100", host_memory_bytes=host * GIB)
        with nullcontext() if fits else pytest.raises(NothingFits):
            plan_of(LLAMA_8B, here, settings, offload_parameters="device")


def test_a_disk_that_is_too_small_is_not_called_the_host_and_with_it_they_are_enough_only_together():
    settings = "tuning: full, zero: 3, offload_parameters: cpu, offload_optimizer: nvme, nvme_path: /nvme"
    small = gpu("rtx-4090", gpus=2, host_memory_bytes=16 * GIB, nvme_bytes=10 * GIB)
    text, _ = refused(LLAMA_8B, replace(small, host_memory_bytes=500 * GIB), settings)
    assert "it fits the devices but not NVMe: 119.66 GiB a node, 10.00 GiB usable" in text
    text, _ = refused(LLAMA_8B, small, settings)
    host, disk = map(int, re.findall(r"host_memory: (\d+)GiB with nvme_size: (\d+)GiB is enough", text)[0])
    enough = replace(small, host_memory_bytes=host * GIB, nvme_bytes=disk * GIB)
    assert plan_of(LLAMA_8B, enough, settings)


def test_nothing_fits_offers_a_shorter_row_that_is_true():
    settings = "tuning: lora, micro_batch_size: 16, gradient_accumulation_steps: 1, seq_len: {}"
    _, hint = refused(LLAMA_8B, "rtx-4090", settings.format(8192))
    offered = int(hint.rsplit("seq_len: ", 1)[1])
    assert plan_of(LLAMA_8B, "rtx-4090", settings.format(offered))
    refused(LLAMA_8B, "rtx-4090", settings.format(offered + 64))


def test_what_cannot_run_here_is_left_out():
    hardware = with_host_memory(gpu("h100", gpus=2))

    def rehearsed(**settings):
        recipe = recipe_of(QWEN, **settings)
        return find_plan(recipe, model=known(QWEN), hardware=hardware, purposes=("plan", "rehearse"))

    assert rehearsed().chosen.plan.sharding.backend == "fsdp"
    with pytest.raises(RecipeError, match="DeepSpeed does not run on fake tensors"):
        rehearsed(backend="deepspeed")


def test_a_row_is_no_longer_than_the_model_takes_unless_asked():
    report = report_of("gpt2", "t4")
    assert report.chosen.plan.batch.seq_len == 1024
    assert lines_of(report, "seq_len: 1024 (the longest")
