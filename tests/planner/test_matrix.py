"""The matrix: its cells are the planner's own answers, its marks obey the arithmetic."""

import json
from dataclasses import replace
from functools import cache

import pytest

from fitune.errors import HardwareError, RecipeError
from fitune.planner.defaults import with_host_memory
from fitune.planner.matrix import card, matrix, taken_words
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.units import GIB
from plans import gpu, known

MODELS = ("llama-2-7b", "llama-2-70b")
LENGTHS = (512, 4096)
V100S = with_host_memory(gpu("v100-32gb", gpus=8))


def recipe_of(**pins):
    return parse_recipe({"model": MODELS[0], **pins})


def matrix_of(model, *lengths, hardware=V100S, **pins):
    return matrix(recipe_of(**pins), models=[known(model)], seq_lens=lengths, hardware=hardware)


@cache
def study():
    return matrix(recipe_of(), models=[known(name) for name in MODELS], seq_lens=LENGTHS, hardware=V100S)


def cell(name, seq_len, of=None):
    return next(c for c in (of or study()).cells if c.model == known(name) and c.seq_len == seq_len)


@pytest.mark.parametrize("name", MODELS)
def test_a_cell_is_what_plan_answers(name):
    recipe = recipe_of(seq_len=4096).model_copy(update={"model": known(name).name})
    assert cell(name, 4096).taken == find_plan(recipe, model=known(name), hardware=V100S).taken


@pytest.mark.parametrize(
    ("sizes", "short"),
    [
        ({"nvme": 10 * GIB, "host": 500 * GIB}, "NVMe −"), ({"nvme": 900 * GIB, "host": 10 * GIB}, "host −"),
    ],
)  # fmt: skip
def test_a_cell_says_what_is_short_of_what(sizes, short):
    hardware = replace(gpu("a100-80gb", gpus=2), nvme_bytes=sizes["nvme"], host_memory_bytes=sizes["host"])
    pins = {"tuning": "full", "zero": 3, "offload_optimizer": "nvme", "nvme_path": "/nvme"}
    (one,) = matrix_of("llama-2-7b", 512, hardware=hardware, **pins).cells
    *_, missing = taken_words(one)
    assert missing.startswith(short)
    assert not missing.removeprefix(short).startswith("-")


def test_switching_something_on_never_takes_room_away():
    for one in study().cells:
        for setting in one.settings:
            if setting.fits:
                assert replace(setting, recompute=True) in one.settings


def test_longer_rows_never_fit_where_shorter_ones_do_not():
    for model in study().models:
        shorter, longer = study().row(model)
        for before, after in zip(shorter.settings, longer.settings, strict=True):
            assert replace(before, fits=True) == replace(after, fits=True)
            assert before.fits or not after.fits


def test_where_no_setting_of_a_method_fits_the_plan_is_of_another():
    large, small = cell("llama-2-70b", 512), cell("llama-2-7b", 512)
    assert not [each for each in large.settings if each.fits and each.method == "full"]
    assert large.taken.plan.tuning.base is not None
    assert small.needs("full", "DDP") is None
    assert small.needs("lora", "DDP") == ()


def test_recompute_is_what_opens_long_rows_to_7b_and_70b():
    """70B to 2,048 tokens: at 4,096 it takes 29.6 GiB, and 29.1 of the card's 32 are planned with."""
    for name, tokens, sharding in (("llama-2-7b", 4096, "ZeRO-2"), ("llama-2-70b", 512, "ZeRO-3")):
        assert cell(name, tokens).needs("lora", sharding) == ("recompute",)
    assert cell("llama-2-70b", 4096).needs("lora", "ZeRO-3") == ("recompute", "offload")


def test_a_row_longer_than_the_model_takes_is_a_cell_without_a_plan():
    falcon = matrix_of("falcon-180b", 4096, 256)
    assert falcon.seq_lens == (256, 4096)
    assert cell("falcon-180b", 4096, falcon).taken is None
    assert "rows of at most 2,048 tokens" in falcon.text()
    assert "2048 positions" in falcon.data()["cells"][1]["why"]


def test_what_does_not_fit_says_how_much_is_missing():
    small = replace(V100S, gpus_per_node=2, host_memory_bytes=8 << 30)
    tight = matrix_of("llama-2-70b", 256, hardware=small, tuning="full")
    taken = cell("llama-2-70b", 256, tight).taken
    assert not taken.estimate.fits
    missing = taken.estimate.peak_bytes - taken.estimate.usable_bytes
    assert f"−{missing / 2**30:,.2f} GiB" in tight.text()
    assert "none" in tight.text()


def test_pins_hold_in_every_cell():
    """Llama-2 has 32,000 rows and no tokenizer is at hand to say that some are spare."""
    pins = {
        "tuning": "lora",
        "zero": 3,
        "gradient_checkpointing": True,
        "added_tokens": ["<think>", "</think>"],
    }
    pinned = matrix_of("llama-2-7b", 512, **pins)
    assert (pinned.methods, pinned.shardings) == (("lora",), ("ZeRO-3",))
    assert {setting.recompute for setting in pinned.cells[0].settings} == {True}
    plan = pinned.cells[0].taken.plan
    assert (plan.recompute.blocks, plan.model.vocab_size, pinned.models[0].vocab_size) == (32, 32_002, 32_002)
    assert pinned.row(pinned.models[0]) == pinned.cells


def test_contradictions_are_refused_as_everywhere():
    with pytest.raises(HardwareError, match="FlashAttention"):
        matrix_of("llama-2-7b", 512, attn_implementation="flash")
    with pytest.raises(RecipeError, match="models and lengths"):
        matrix(recipe_of(), models=[], seq_lens=[512], hardware=V100S)


def test_the_data_holds_every_setting_and_survives_json():
    data = json.loads(json.dumps(study().data()))
    assert data["context"] == list(LENGTHS)
    settings = data["cells"][0]["settings"]
    combinations = {(s["method"], s["sharding"], s["recompute"], s["offload"]) for s in settings}
    assert len(combinations) == len(settings) == 3 * 2 * (1 + 3 * 2)  # DDP offloads nothing
    assert all(cell["estimate"]["peak_bytes"] for cell in data["cells"])


def test_the_table_has_a_line_and_marks_for_every_cell_and_a_card_of_a_picture_says_the_same():
    lines = [line for line in study().text().splitlines() if "GiB" in line and "usable" not in line]
    assert len(lines) == len(MODELS) * len(LENGTHS)
    assert lines[-1].split()[-3:] == ["····", "···b", "···r"]
    title, said, method, filled = card(cell("llama-2-70b", 4096), study())
    assert (title, method) == ("LoRA · ZeRO-3 FSDP2", "lora")
    assert 0.8 < filled <= 1
    assert said[-2:] == ("LoRA    ···b", "QLoRA   ···r")
