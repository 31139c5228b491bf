"""examples/loop.py is the whole idea in one file; it must give the losses that `fitune train` gives."""

import importlib.util
from pathlib import Path

import pytest

from runs import (
    losses,
    trained,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"


def load_example():
    spec = importlib.util.spec_from_file_location("example_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flat_file_gives_the_same_losses(make_plan, model_folder, data_file):
    example = load_example()
    plan = make_plan(
        lora_r=example.RANK, lora_alpha=2 * example.RANK, learning_rate=example.RATE, max_steps=example.STEPS,
        warmup_steps=example.WARMUP, max_grad_norm=example.CLIP, seed=example.SEED, loss="chunked",
        loss_chunk_tokens=example.CHUNK, micro_batch_size=example.ROWS_PER_STEP, gradient_accumulation_steps=1,
    )  # fmt: skip
    trained(plan)
    assert example.main(str(model_folder), str(data_file)) == pytest.approx(losses(plan), rel=1e-5)
