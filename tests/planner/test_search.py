"""The planner keeps every pin, decides the rest, and refuses what contradicts itself."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from fitune.errors import HardwareError, NothingFits, RecipeError
from fitune.planner.defaults import with_host_memory
from fitune.planner.explain import memory_sum
from fitune.planner.search import find_plan
from fitune.spec.plan import AdamW, ChunkedLoss, Full, Lora, PlainLoss, Precision, Sgd, Steps
from fitune.spec.serial import from_json, to_json
from fitune.units import GIB
from plans import gpu, known, recipe_of, report_of


def plan_of(model, card, **settings):
    return report_of(model, card, **settings).chosen.plan


def test_an_8b_model_on_a_24_gib_card_gets_lora_and_says_why():
    hardware = with_host_memory(gpu("rtx-4090"))
    report = find_plan(recipe_of("llama-3.1-8b"), model=known("llama-3.1-8b"), hardware=hardware)
    assert isinstance(report.chosen.plan.tuning, Lora)
    assert report.chosen.plan.precision is Precision.BF16_MASTER
    assert report.chosen.plan.attention == "flash"
    assert report.chosen.estimate.fits
    assert {item.what for item in report.rejected} == {"full, bf16-master, AdamW"}
    assert all("short" in item.why and "weights 14.96" in item.why for item in report.rejected)
    assert any(line.startswith("tuning: lora") for line in report.decisions)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b", "llama-2-7b"])
def test_the_terms_of_a_sum_add_up_as_printed(model):
    report = report_of(model, "rtx-4090", tuning="lora")
    terms, _, rest = memory_sum(report.chosen.estimate).replace(",", "").partition(" = ")
    added = sum(float(term.rsplit(" ", 1)[1]) for term in terms.split(" + "))
    assert added == pytest.approx(float(rest.split()[0]), abs=0.011)


def test_a_small_model_is_trained_in_full():
    report = report_of("qwen3-0.6b", "h100")
    assert isinstance(report.chosen.plan.tuning, Full)
    assert report.chosen.plan.recompute.blocks == 0
    assert not report.rejected
    assert len(report.runners_up) == 3
    assert all(runner.estimate.fits for runner in report.runners_up)
    assert len({runner.plan for runner in report.runners_up} | {report.chosen.plan}) == 4


@pytest.mark.parametrize(
    ("card", "precision", "attention"),
    [
        ("v100-32gb", "fp16", "sdpa"),
        ("t4", "fp16", "sdpa"),
        ("a100-40gb", "bf16-master", "flash"),
        ("cpu", "fp32", "sdpa"),
    ],
)
def test_precision_and_attention_follow_the_device(card, precision, attention):
    plan = plan_of("tinyllama", card, tuning="lora", seq_len=256)
    assert (plan.precision, plan.attention) == (precision, attention)


def test_every_pin_is_kept():
    plan = plan_of(
        "llama-3.2-1b", "h100",
        tuning="lora", precision="bf16", lora_r=4, lora_alpha=12, lora_dropout=0.1,
        lora_target_modules=["q_proj", "v_proj"],
        micro_batch_size=3, gradient_accumulation_steps=5, seq_len=777, packing=True,
        optimizer="momentum", momentum=0.8,
        learning_rate=3e-5, gradient_checkpointing=5, loss="chunked", loss_chunk_tokens=123,
        attn_implementation="sdpa",
        max_steps=7, warmup_steps=2, max_grad_norm=0.5, output_dir="somewhere", export="merged", seed=1,
        lr_scheduler="linear",
        data=["a.jsonl#50"], val_fraction=0.1, eval_steps=3, save_steps=4, keep_checkpoints=1,
        report_to=["tensorboard"],
    )  # fmt: skip
    assert plan.tuning == Lora(rank=4, alpha=12, dropout=0.1, targets=("q_proj", "v_proj"))
    assert (plan.precision, plan.optimizer) == (Precision.BF16, Sgd(momentum=0.8))
    assert (plan.batch.micro_batch_size, plan.batch.accumulation, plan.batch.seq_len) == (3, 5, 777)
    assert plan.batch.packing
    assert plan.recompute.blocks == 5
    assert plan.loss == ChunkedLoss(chunk_tokens=123)
    assert plan.attention == "sdpa"
    assert (plan.schedule.learning_rate, plan.schedule.kind, plan.schedule.max_grad_norm) == (
        3e-5,
        "linear",
        0.5,
    )
    assert (plan.schedule.duration, plan.schedule.warmup) == (Steps(count=7), Steps(count=2))
    assert (plan.run.output_dir, plan.run.export, plan.run.seed) == ("somewhere", "merged", 1)
    assert (plan.run.eval_every, plan.run.save_every, plan.run.keep_checkpoints) == (3, 4, 1)
    assert plan.run.report_to == ("tensorboard",)
    assert plan.data.sources[0].path.startswith("a.jsonl")
    assert plan.data.val_fraction == 0.1


@pytest.mark.parametrize(
    ("card", "settings", "beside"),
    [
        ("h100", {"save_steps": 10}, True),
        ("h100", {}, True),  # once an epoch
        ("h100", {"save_steps": 0}, False),  # nothing is saved
        ("h100", {"save_steps": 10, "async_save": False}, False),
        ("cpu", {"save_steps": 10}, False),
        ("cpu", {"save_steps": 10, "async_save": True}, True),
    ],
)
def test_checkpoints_are_written_beside_the_steps_of_a_gpu(card, settings, beside):
    report = report_of("qwen3-0.6b", card, tuning="lora", seq_len=256, **settings)
    assert report.chosen.plan.run.async_save == beside
    told = [line for line in report.decisions if line.startswith("async_save")]
    assert bool(told) == (card == "h100" and settings in ({}, {"save_steps": 10}))


def test_a_host_without_room_for_the_copy_has_the_steps_wait():
    recipe = recipe_of("qwen3-0.6b", tuning="full", precision="bf16-master", save_steps=10)
    pinned = recipe.model_copy(update={"async_save": True})
    hardware = replace(gpu("h100"), host_memory_bytes=8 * GIB)
    report = find_plan(recipe, model=known("qwen3-0.6b"), hardware=hardware)
    assert not report.chosen.plan.run.async_save
    assert any("no room for a copy of" in line for line in report.decisions)
    with pytest.raises(NothingFits, match="checkpoint copy"):
        find_plan(pinned, model=known("qwen3-0.6b"), hardware=hardware)


@pytest.mark.parametrize(
    ("settings", "blocks"), [({"gradient_checkpointing": True}, 16), ({"gradient_checkpointing": False}, 0)]
)
def test_recompute_can_be_pinned_to_all_or_none(settings, blocks):
    assert plan_of("llama-3.2-1b", "h100", tuning="lora", **settings).recompute.blocks == blocks


def test_a_plain_loss_stays_plain():
    assert plan_of("llama-3.2-1b", "h100", loss="plain").loss == PlainLoss()


@pytest.mark.parametrize(
    ("settings", "micro", "steps"),
    [
        ({"micro_batch_size": 4}, 4, 4),
        ({"micro_batch_size": 3}, 3, 5),
        ({"micro_batch_size": 40}, 40, 1),
        ({"gradient_accumulation_steps": 8}, 2, 8),
        ({"micro_batch_size": 2, "global_batch_size": 12}, 2, 6),
        ({"gradient_accumulation_steps": 3, "global_batch_size": 12}, 4, 3),
    ],
)
def test_the_batch_keeps_its_pins(settings, micro, steps):
    batch = plan_of("llama-3.2-1b", "h100", tuning="lora", seq_len=128, **settings).batch
    assert (batch.micro_batch_size, batch.accumulation) == (micro, steps)


@pytest.mark.parametrize("whole", [1, 7, 16, 48, 64])
def test_an_open_split_multiplies_to_the_global_batch(whole):
    assert (
        plan_of("llama-3.2-1b", "h100", tuning="lora", global_batch_size=whole).batch.global_batch_size
        == whole
    )


def test_defaults_are_decided_and_printed():
    report = report_of("llama-3.1-8b", "h100", tuning="lora")
    plan = report.chosen.plan
    assert plan.schedule.learning_rate == 2e-4
    assert plan.tuning.alpha == 32
    assert plan.run.output_dir == "runs/llama-3.1-8b-lora"
    assert plan.run.export == "adapter"
    text = "\n".join(report.decisions)
    for words in (
        "learning rate: 0.0002",
        "lora_alpha: 32",
        "runs/llama-3.1-8b-lora",
        "batch: ",
        "recompute: ",
        "loss: ",
    ):
        assert words in text
    assert plan_of("qwen3-0.6b", "h100", tuning="full").schedule.learning_rate == 2e-5


def test_nothing_is_decided_in_silence_about_what_was_pinned():
    report = report_of("qwen3-0.6b", "h100", tuning="full", precision="bf16-master", learning_rate=1e-5)
    assert not [
        line for line in report.decisions if line.startswith(("tuning", "precision", "learning rate"))
    ]


def test_pure_bf16_comes_with_a_note():
    report = report_of("qwen3-0.6b", "h100", tuning="full", precision="bf16")
    assert any("8 significant bits" in line for line in report.decisions)


def test_a_plan_survives_json():
    plan = plan_of("qwen3-0.6b", "h100")
    assert from_json(type(plan), to_json(plan)) == plan


def test_rank_with_full_is_no_contradiction_but_said_to_do_nothing():
    report = report_of("qwen3-0.6b", "h100", tuning="full", lora_r=8)
    assert isinstance(report.chosen.plan.tuning, Full)
    assert "note on lora_r: it does nothing with the tuning of this plan" in report.decisions


def test_settings_of_another_optimizer_are_said_to_do_nothing():
    decisions = report_of("qwen3-0.6b", "h100", optimizer="sgd", adam_beta2=0.95, momentum=0).decisions
    assert "note on adam_beta2: it does nothing with the optimizer of this plan" in decisions
    decisions = report_of("qwen3-0.6b", "h100", momentum=0.5).decisions
    assert "note on momentum: it does nothing with the optimizer of this plan" in decisions
    assert not [line for line in report_of("qwen3-0.6b", "h100").decisions if "does nothing" in line]


def test_the_reason_of_a_decision_is_the_true_one():
    report = report_of("llama-3.2-1b", "h100", export="adapter", micro_batch_size=2)
    assert any(line.startswith("tuning: lora, because of export: adapter") for line in report.decisions)
    batch = next(line for line in report.decisions if line.startswith("batch:"))
    assert "fastest split" not in batch  # the only one there is


@pytest.mark.parametrize(
    ("card", "settings", "error", "words"),
    [
        (
            "h100",
            {"micro_batch_size": 4, "gradient_accumulation_steps": 3, "global_batch_size": 16},
            RecipeError,
            "4 × .* 3 = 12",
        ),
        ("h100", {"micro_batch_size": 5, "global_batch_size": 16}, RecipeError, r"16 / \(micro_batch_size 5\) = 3.20"),
        ("v100-32gb", {"attn_implementation": "flash"}, HardwareError, "8.0 or newer .* 7.0"),
        ("cpu", {"attn_implementation": "flash"}, HardwareError, "GPUs"),
        ("h100", {"attn_implementation": "flash", "precision": "fp32"}, RecipeError, "16-bit numbers.* fp32"),
        ("t4", {"precision": "bf16"}, HardwareError, "7.5.* no bf16"),
        ("v100-32gb", {"precision": "bf16-master"}, HardwareError, "no bf16"),
        ("cpu", {"precision": "fp16"}, HardwareError, "CPU"),
        ("h100", {"seq_len": 200_000}, RecipeError, "68928 more than the 131072"),
        ("h100", {"gradient_checkpointing": 17}, RecipeError, "17 blocks.* has 16"),
        ("h100", {"loss": "plain", "loss_chunk_tokens": 64}, RecipeError, "chunks"),
        ("h100", {"optimizer": "sgd", "momentum": 0.9}, RecipeError, "no momentum"),
        ("h100", {"val_fraction": 0.1, "eval_data": ["e.jsonl"]}, RecipeError, "holds rows out"),
        ("h100", {"tuning": "full", "export": "adapter"}, RecipeError, "adapter"),
        ("h100", {"lora_target_modules": ["q_prj"], "tuning": "lora"}, RecipeError, "q_proj"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_the_arithmetic(card, settings, error, words):
    with pytest.raises(error, match=words) as caught:
        plan_of("llama-3.2-1b", card, **settings)
    assert caught.value.hint


def test_flash_takes_sliding_windows_and_is_refused_where_the_model_needs_a_mask():
    assert plan_of("mistral-7b", "h100", tuning="lora", seq_len=8192).attention == "flash"
    assert plan_of("mistral-7b", "v100-32gb", tuning="lora", seq_len=8192).attention == "sdpa"
    assert plan_of("mistral-7b", "h100", tuning="lora", seq_len=8192, precision="fp32").attention == "sdpa"
    with pytest.raises(RecipeError, match="mask over the whole stream"):
        plan_of("falcon-7b", "h100", tuning="lora", seq_len=2048, attn_implementation="flash")


def test_attention_beside_a_learned_score_is_said_to_be_written_out():
    found = plan_of("gpt-oss-20b", "h100", tuning="lora", seq_len=2048)
    assert found.attention == "eager"
    with pytest.raises(RecipeError, match="a learned score of each head of .* joins the softmax"):
        plan_of("gpt-oss-20b", "h100", tuning="lora", seq_len=2048, attn_implementation="flash")


def test_nothing_fits_names_the_smallest_memory_the_device_and_the_change():
    with pytest.raises(NothingFits) as caught:
        plan_of("llama-3.1-8b", "rtx-4090", tuning="full", offload_optimizer="device")
    text, hint = caught.value.message, caught.value.hint
    assert "21.81 GiB usable" in text
    assert "smallest memory that is enough: 6" in text
    assert "the smallest known GPU that holds it: h100" in text
    every_weight, *others = hint.split(", or ")
    assert every_weight.startswith("tuning: adalomo, which trains every weight too")
    assert others == ["tuning: lora", "tuning: qlora", "offload_optimizer: cpu"]


def test_a_host_that_is_too_small_is_said_with_its_sum():
    hardware = replace(gpu("rtx-4090"), host_memory_bytes=32 * GIB)
    with pytest.raises(NothingFits) as caught:
        find_plan(
            recipe_of("llama-3.1-8b", tuning="full", offload_optimizer="cpu"),
            model=known("llama-3.1-8b"),
            hardware=hardware,
        )
    assert "it fits the devices but not the host: processes 3.0 + optimizer 89.7" in " ".join(
        caught.value.message.split()
    )
    text = caught.value.message
    assert "28.8 usable" in text
    assert "smallest" not in text
    assert "holds it" not in text
    enough = int(text.rsplit("host_memory: ", 1)[1].split("GiB")[0])
    recipe = recipe_of("llama-3.1-8b", tuning="full", offload_optimizer="cpu", offload_parameters="device")
    for host, fits in ((enough, True), (enough - 1, False)):
        here = replace(hardware, gpu=gpu("h100").gpu, host_memory_bytes=host * GIB)
        with nullcontext() if fits else pytest.raises(NothingFits):
            find_plan(recipe, model=known("llama-3.1-8b"), hardware=here)


def test_nothing_fits_offers_a_shorter_row_that_is_true():
    settings = {"tuning": "lora", "micro_batch_size": 16, "seq_len": 8192, "gradient_accumulation_steps": 1}
    with pytest.raises(NothingFits) as caught:
        plan_of("llama-3.1-8b", "rtx-4090", **settings)
    offered = int(caught.value.hint.rsplit("seq_len: ", 1)[1])
    assert plan_of("llama-3.1-8b", "rtx-4090", **{**settings, "seq_len": offered})
    with pytest.raises(NothingFits):
        plan_of("llama-3.1-8b", "rtx-4090", **{**settings, "seq_len": offered + 64})


def test_seventy_billion_in_full_on_eight_v100_is_explained():
    model = known("llama-2-70b")
    hardware = with_host_memory(gpu("v100-32gb", gpus=8))
    with pytest.raises(NothingFits) as caught:
        find_plan(recipe_of("llama-2-70b", tuning="full"), model=model, hardware=hardware)
    text = str(caught.value)
    for words in (
        "8 × v100-32gb",
        "fp16",
        "it fits the devices but not the host",
        "optimizer 770.9",
        "460.8 usable",
    ):
        assert words in text
    assert "tuning: lora" in caught.value.hint


def test_adam_settings_reach_the_optimizer():
    plan = plan_of("qwen3-0.6b", "h100", adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1)
    assert plan.optimizer == AdamW(beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1)
