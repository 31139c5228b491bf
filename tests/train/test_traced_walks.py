"""Small models of the architectures without formulas, from `fitune train` to what PEFT and transformers read."""

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conftest import settings_of
from fitune.recipe.targets import resolve_targets
from fitune.values.model.architectures import SHARED_LINEARS, takes_adapters_on
from fitune.values.model.model_config import load_model_spec
from models.tiny_models import beside_tokenizer
from runs import set_words

QUICK = ("hyperclovax",)
SLOW = ("jamba", "minicpm3", "qwen3_next")
"""Routed experts and states along the row, latent keys, a delta rule."""
WEEKLY = (
    "afmoe", "aria_text", "axk1", "beam", "biogpt", "cohere2_moe", "cwm", "diffllama", "dots1", "exaone4",
    "exaone_moe", "flint", "glm4_moe_lite", "gpt_neox_japanese", "granitemoe_swa", "hy_v3", "kolibri1", "laguna",
    "lfm2_moe", "lfm3", "mimo_v2_flash", "nemotron", "olmo_hybrid", "opt", "qwen3_5_moe_text", "qwen3_5_text",
)  # fmt: skip
WHOLE = ("jamba", "minicpm3")
WHOLE_WEEKLY = ("axk1", "diffllama", "hyperclovax", "lfm2_moe", "qwen3_5_text")
STATEFUL = ("jamba", "lfm2_moe", "lfm3")


def bench():
    """bench/architectures.py, which has the small configs that losses were compared with."""
    file = Path(__file__).parents[2] / "bench/architectures.py"
    spec = importlib.util.spec_from_file_location("bench_architectures", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(model_type, *, tokenizer, folder):
    """A folder with a small random model and the tests' tokenizer."""
    made = bench()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made.small_config(model_type), dtype=torch.float32)
    made._randomise(model)
    return beside_tokenizer(model, tokenizer, folder)


def options(folder, data, run, **others):
    """Words of `fitune train` that all of them take; rows that would see each other go one at a time."""
    separates = load_model_spec(str(folder)).separates_rows
    rows = {} if separates else {"micro_batch_size": 1, "packing": False}
    once = {"gradient_accumulation_steps": 1, "learning_rate": 0.05, **rows, **others}
    return set_words(settings_of(folder, data, run, **once))


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None], use_cache=False).logits


def require_read_by_peft_and_transformers(folder, run):
    """The adapter of a run, which changes the logits, and its merged model answer alike."""
    base = load(folder)
    before = logits_of(base)
    adapted = logits_of(PeftModel.from_pretrained(base, str(run / "adapter")).eval())
    assert (adapted - before).abs().max() > 0.01
    torch.testing.assert_close(logits_of(load(run / "merged")), adapted, rtol=0, atol=1e-4)


def marked(slow, weekly):
    return [
        *(pytest.param(name, marks=pytest.mark.slow) for name in slow),
        *(pytest.param(name, marks=pytest.mark.weekly) for name in weekly),
    ]


@pytest.mark.parametrize("model_type", [*QUICK, *marked(SLOW, WEEKLY)])
def test_adapters_on_all_linears_that_are_taken_are_read_by_peft_as_the_merged_model_by_transformers(
    model_type,
    fitune,
    model_folder,
    data_file,
    tmp_path,
    untraced,
):
    folder = small(model_type, tokenizer=model_folder, folder=tmp_path / "base")
    run = tmp_path / "run"
    words = options(folder, data_file, run, max_steps=3)
    spec = load_model_spec(str(folder))
    targets = resolve_targets(spec, ("all-linear",))
    if not takes_adapters_on(spec, targets):
        code, said = fitune("train", *words)
        assert code == 2
        assert "as adapters on its routed experts" in said
        others = (name for name in targets if name.rpartition(".")[2] not in SHARED_LINEARS)
        words += ["--lora-target-modules", ",".join(others)]
    assert fitune("train", *words)[0] == 0
    assert fitune("export", run)[0] == 0
    require_read_by_peft_and_transformers(folder, run)


@pytest.mark.parametrize("model_type", marked(WHOLE, WHOLE_WEEKLY))
def test_every_weight_is_trained_and_read_by_transformers(
    model_type,
    fitune,
    model_folder,
    data_file,
    tmp_path,
):
    folder = small(model_type, tokenizer=model_folder, folder=tmp_path / "base")
    run = tmp_path / "run"
    assert fitune("train", *options(folder, data_file, run, tuning="full"))[0] == 0
    trained = logits_of(load(run / "model"))
    assert torch.isfinite(trained).all()
    assert (trained - logits_of(load(folder))).abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", STATEFUL)
def test_a_state_along_the_row_takes_one_row_at_a_time(
    model_type,
    fitune,
    model_folder,
    data_file,
    tmp_path,
):
    folder = small(model_type, tokenizer=model_folder, folder=tmp_path / "base")
    assert not load_model_spec(str(folder)).separates_rows
    code, said = fitune("train", *options(folder, data_file, tmp_path / "run", packing=True))
    assert code == 2
    assert "packing: false with micro_batch_size: 1" in said
