"""Recipes drawn at random: what the planner says of another plan is what asking for that plan gives."""

from random import Random

import pytest

from fitune.errors import FituneError, NothingFits
from fitune.planner.first_screen import other_ways
from fitune.session.planning import plan_for, wanted_hardware
from fitune.session.recipes.reading import recipe_from
from fitune.values.model.model_config import load_model_spec

MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B", "google/gemma-2-9b")
CARDS = ("t4", "rtx-3060-12gb", "rtx-4090", "v100-32gb", "a100-80gb")
OFTEN = {
    "tuning": ("full", "lora", "qlora", "lomo"), "seq_len": (512, 1024, 8192), "host_memory": ("32GiB", "256GiB"),
    "global_batch_size": (4, 64), "micro_batch_size": (1, 2, 8), "packing": (True,), "mean_row_tokens": (100, 300),
    "kernels": ("liger",), "gradient_checkpointing": (True, False), "loss": ("plain", "chunked"), "zero": (0, 2, 3),
    "offload_parameters": ("device", "cpu"), "offload_optimizer": ("device", "cpu"), "backend": ("fsdp", "deepspeed"),
}  # fmt: skip


def recipe_with(settings):
    """The recipe that these settings make, typed as options; None leaves one open."""
    given = {key: value for key, value in settings.items() if value is not None}
    return recipe_from(
        [word for key, value in given.items() for word in (f"--{key}", str(value).lower())], []
    )


def drawn(seed):
    """Settings that do not contradict one another, and what is planned or said of them."""
    random = Random(seed)
    while True:
        settings = {
            "model": random.choice(MODELS),
            "gpu": random.choice(CARDS),
            "gpus": random.choice((1, 1, 2, 4)),
        }
        settings |= {key: random.choice(values) for key, values in OFTEN.items() if random.random() < 0.2}
        try:
            return settings, plan_for(recipe_with(settings))
        except NothingFits as error:
            return settings, error
        except FituneError:
            continue


def shown(settings, found):
    """Yields each plan that is shown beside the recipe's, or in its place: what to set, and its bytes and speed."""
    if isinstance(found, NothingFits):
        for one in found.facts["changes"]:
            yield one["settings"], one["peak_bytes"], one["tokens_per_second"]
        return
    recipe = recipe_with(settings)
    ways = other_ways(recipe, found.taken, model=load_model_spec(recipe.model), machine=wanted_hardware)
    for change, priced in ways.items():
        words, estimate = change.replace("--", "").split(), priced.estimate
        speed = estimate.tokens_per_second if estimate.fits else 0
        yield dict(zip(words[::2], words[1::2], strict=True)), estimate.peak_bytes, speed


def answer_to(settings):
    """Bytes and speed of the plan; of the smallest one bytes alone, where nothing fits."""
    try:
        estimate = plan_for(recipe_with(settings)).taken.estimate
    except NothingFits as error:
        return error.facts["needed_bytes"], 0
    return estimate.peak_bytes, estimate.tokens_per_second


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_is_shown_is_what_asking_for_it_gives(seed):
    settings, found = drawn(seed)
    for change, peak_bytes, speed in shown(settings, found):
        assert answer_to(settings | change) == (peak_bytes, speed), (settings, change)
