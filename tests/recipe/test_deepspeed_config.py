"""The ds_config.json of a plan, and a user's one as settings of a recipe."""

import pytest

from fitune.errors import RecipeError
from fitune.values.deepspeed import (
    BUCKET_ELEMENTS,
    deepspeed_config,
    sub_groups,
)
from fitune.values.plan import Offload, Precision, Zero
from plans import gpu, known, plan_for, recipe_of


def plan(**choices):
    chosen = {"sharding": Zero(stage=3, backend="deepspeed"), "hardware": gpu("h100", gpus=8), **choices}
    return plan_for(known("llama-3.1-8b"), **chosen)


def zero_of(**choices):
    return deepspeed_config(plan(**choices))["zero_optimization"]


def test_buckets_are_chosen_and_never_larger_than_what_is_trained_unless_asked_for():
    lora = {"tuning": "lora", "rank": 1, "targets": ("q_proj",)}
    asked = {"sharding": Zero(stage=2, backend="deepspeed", settings=(("reduce_bucket_size", 7),))}
    sizes = [zero_of(**choices)["reduce_bucket_size"] for choices in ({}, lora, asked)]
    assert sizes == [BUCKET_ELEMENTS, 32 * (4096 + 4096), 7]


def test_fitune_divides_the_loss_and_deepspeed_divides_by_nothing():
    config = deepspeed_config(plan())
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == plan().schedule.max_grad_norm


def test_precision_and_places_of_the_plan_are_deepspeeds():
    assert deepspeed_config(plan(precision=Precision.BF16_MASTER))["bf16"]["enabled"]
    assert deepspeed_config(plan(precision=Precision.FP16))["fp16"] == {"enabled": True, "loss_scale": 1.0}
    away = Offload(parameters="nvme", optimizer="nvme", nvme_path="/mnt/nvme")
    zero = zero_of(offload=away)
    parameters = zero["offload_param"]
    assert parameters.pop("nvme_path").startswith("/mnt/nvme/fitune-")
    assert parameters.pop("buffer_count") >= 2
    assert parameters.pop("buffer_size") == 128256 * 4096 // 8  # of the embedding
    assert parameters == {"device": "nvme", "pin_memory": True, "max_in_cpu": 0}
    assert zero["offload_optimizer"]["device"] == "nvme"
    assert zero["stage3_prefetch_bucket_size"] == 0 < zero_of()["stage3_prefetch_bucket_size"]


def test_a_sub_group_ends_with_the_tensor_that_fills_it():
    """Shares of one of eight. With 2^24 elements up ends the first, gate the second, q of the third block the next."""
    q, k, linear, table, norms = 2_097_152, 524_288, 7_340_032, 65_667_072, 65 * 512
    block = [q, k, k, q, linear, linear, linear]
    attention = 2 * (q + k)
    groups = sub_groups(plan(), 1 << 24)
    assert groups[:4] == [table, attention + 2 * linear, linear + attention + linear, 2 * linear + q]
    assert groups[3] == 1 << 24  # filled to the element
    assert groups[-2:] == [2 * linear + table, norms]  # the head ends the last; norms take no decay
    assert sum(groups) == 2 * table + 32 * sum(block) + norms
    assert sub_groups(plan(), 1) == [table, *(32 * block), table, *(65 * [512])]
    assert sub_groups(plan(), 1 << 40) == [2 * table + 32 * sum(block), norms]


def test_shares_are_rounded_up_and_adapters_go_block_by_block():
    """Rank 8 over three: A of q is 8 × 4,096 and B 4,096 × 8, of v B 1,024 × 8. Nothing else is trained."""
    pair = {"tuning": "lora", "rank": 8, "targets": ("q_proj", "v_proj"), "hardware": gpu("h100", gpus=3)}
    assert sub_groups(plan(**pair), 1) == 32 * [10_923, 10_923, 10_923, 2_731]
    assert sub_groups(plan(**pair), 30_000) == [3 * 10_923, *(31 * [2_731 + 3 * 10_923]), 2_731]


def test_a_users_file_becomes_settings_of_the_recipe(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": true, "offload_optimizer": '
        '{"device": "cpu"}}, "bf16": {"enabled": true}, "gradient_clipping": 0.5, "steps_per_print": 10}'
    )
    read = recipe_of("gpt2", deepspeed=str(file))
    assert (read.zero, read.backend, read.offload_optimizer) == (2, "deepspeed", "cpu")
    assert (read.precision, read.max_grad_norm) == ("bf16-master", 0.5)
    assert read.deepspeed == {"reduce_bucket_size": 200_000_000, "overlap_comm": True}
    agreeing = recipe_of("gpt2", deepspeed=str(file), max_grad_norm="5e-1")  # YAML reads it as a text
    assert agreeing.max_grad_norm == 0.5
    assert (
        recipe_of("gpt2", deepspeed=read.deepspeed).deepspeed == read.deepspeed
    )  # read once, it is read again


def test_names_of_optimizers_are_read_in_any_case_and_null_says_nothing():
    """As DeepSpeed reads them."""
    zero = {"stage": 3, "offload_param": None}
    read = recipe_of(
        "gpt2", deepspeed={"optimizer": {"type": "adamw"}, "zero_optimization": zero, "fp16": None}
    )
    assert (read.optimizer, read.zero, read.offload_parameters) == ("adamw", 3, None)


def test_auto_leaves_a_setting_to_fitune():
    read = recipe_of(
        "gpt2",
        "deepspeed: {zero_optimization: {stage: auto, reduce_bucket_size: auto}, train_batch_size: auto, "
        "optimizer: {type: AdamW, params: {lr: auto, betas: auto}}, "
        "scheduler: {type: WarmupLR, params: {warmup_num_steps: auto}}, fp16: {enabled: auto, hysteresis: 2}}",
    )
    assert (read.zero, read.learning_rate, read.precision, read.deepspeed) == (None, None, None, {})


@pytest.mark.parametrize(
    ("content", "settings", "named"),
    [
        ("{zero_optimization: {stage: 3}}", "zero: 2", "zero = 2, and .* zero_optimization.stage = 3"),
        (
            "{gradient_clipping: 0.5}",
            "max_grad_norm: 1.0",
            "max_grad_norm = 1.0, and .* gradient_clipping = 0.5",
        ),
        ("{}", "backend: fsdp", "backend = 'fsdp', and"),
        ("{zero_optimization: {stage: 3, mics_shard_size: 4}}", "", "mics_shard_size = 4 cannot be followed"),
        ("{optimizer: {type: Lamb}}", "", "optimizer.type = 'Lamb' cannot be followed"),
        ("{optimizer: {legacy_fusion: true}}", "", "optimizer.legacy_fusion = True cannot be followed"),
        ("{scheduler: {params: {warmup_num_steps: 9}}}", "", "scheduler = .* cannot be followed"),
        ("{fp16: {enabled: true, hysteresis: 2}}", "", "fp16.hysteresis = 2 cannot be followed"),
        ("/nowhere/ds.json", "", "/nowhere/ds.json: cannot be read: No such file"),
        ("7", "", "deepspeed = 7"),
        (
            f"{{reduce_bucket_size: 1{'0' * 30}}}",
            "",
            "reduce_bucket_size = 1000000000000000000000000000000 is not",
        ),
        ("{zero_optimization: {overlap_comm: 'yes'}}", "", "overlap_comm = 'yes' is not"),
    ],
)
def test_contradictions_and_what_would_have_no_effect_are_refused(content, settings, named):
    with pytest.raises(RecipeError, match=named):
        recipe_of("gpt2", f"deepspeed: {content}, {settings}")
