"""What is asked of adapters reaches the plan, is said in words, and contradictions are refused."""

import re
from dataclasses import replace

import pytest

from fitune.errors import RecipeError
from fitune.estimate.parameters import trained_parameters
from fitune.estimate.predict import predict_step_time
from fitune.planner.search import find_plan
from fitune.spec.counts import lora_parameters, model_flops
from fitune.spec.machines.gpus import find_gpu, hardware_for
from fitune.spec.model.model_config import load_model_spec
from fitune.spec.model.model_spec import Dropout
from fitune.spec.plan import Lora
from fitune.spec.predictions import Phase
from fitune.spec.recipe.recipe import canonical_keys, parse_recipe
from plans import recipe_of


def found(**settings):
    recipe = parse_recipe(
        canonical_keys({"model": "llama-3.2-1b", "tuning": "lora", **settings}, where="test")
    )
    model = load_model_spec(recipe.model, offline=True)
    return find_plan(recipe, model=model, hardware=hardware_for(gpu=find_gpu("rtx-4090")))


def test_some_blocks_are_planned_and_said():
    report = found(lora_layers="12-15", rslora=True, lora_r=16)
    plan = report.chosen.plan
    assert plan.tuning == Lora(
        rank=16,
        alpha=32,
        dropout=0.0,
        targets=plan.model.adaptable_names,
        layers=(12, 13, 14, 15),
        rslora=True,
    )
    lines = "\n".join(report.decisions)
    assert "LoRA blocks: 12–15 of 0–15; nothing trains before block 12, so backward ends there" in lines
    assert (
        "rslora: what adapters add is scaled by alpha / √r = 32 / 4 = 8; without it by alpha / r = 2" in lines
    )


def test_a_pattern_is_said_with_what_it_found():
    report = found(lora_target_modules=".*self_attn.*")
    assert "LoRA targets: .*self_attn.* means q_proj, k_proj, v_proj, o_proj" in "\n".join(report.decisions)


def test_rslora_asks_for_adapters():
    assert isinstance(found(tuning=None, rslora=True).chosen.plan.tuning, Lora)
    with pytest.raises(RecipeError, match="rslora is for adapters, and tuning: full trains none"):
        found(tuning="full", rslora=True)


def test_blocks_beyond_the_model_are_refused():
    with pytest.raises(RecipeError, match="there is no block 16; .* has 16, numbered 0 to 15"):
        found(lora_layers=[15, 16])


def test_blocks_that_nothing_goes_back_through_cost_no_backward():
    """Half of the blocks: half of the backward's time, and by hand 2 of 4 FLOPs for each weight of the other half."""
    pins = {"gradient_checkpointing": False, "micro_batch_size": 2}
    whole, half = found(**pins), found(**pins, lora_layers="8-15")
    backward = [predict_step_time(report.chosen.plan).phases[Phase.BACKWARD] for report in (whole, half)]
    assert 0.45 < backward[1] / backward[0] < 0.55
    model, plan = half.chosen.plan.model, half.chosen.plan
    flops = model_flops(model, plan.tuning, row_lengths=[1], supervised_tokens=0)
    base = sum(m.in_features * m.out_features for m in model.linears)
    adapters = sum(16 * (m.in_features + m.out_features) for m in model.linears)
    assert flops == 8 * (4 * base + 6 * adapters + 12 * model.q_dim) + 8 * (2 * base + 4 * model.q_dim)


def test_blocks_that_are_chosen_ask_for_adapters():
    """Full fine-tuning would train every block."""
    report = found(tuning=None, lora_layers="12-15")
    assert isinstance(report.chosen.plan.tuning, Lora)
    assert "because of lora_layers: [12, 13, 14, 15]" in "\n".join(report.decisions)
    with pytest.raises(RecipeError, match="lora_layers is for adapters, and tuning: full trains none"):
        found(tuning="full", lora_layers="12-15")


def test_tables_are_trained_whole_and_what_that_is_said():
    """Llama-3.2-1B's embedding is its head: asked for one, both are trained, 128,256 × 2,048 numbers once."""
    report = found(lora_modules_to_save="lm_head", lora_layers="8-15")
    plan = report.chosen.plan
    assert plan.tuning.modules_to_save == ("embed_tokens", "lm_head")
    assert trained_parameters(plan) == 128_256 * 2_048 + lora_parameters(plan.model, plan.tuning)
    lines = "\n".join(report.decisions)
    assert "embed_tokens and lm_head, one tensor, train whole, 263 M of the 268 M trained parameters" in lines
    assert "backward ends" not in lines


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules_to_save": ["norm"]}, "'norm' is neither the embedding nor the head"),
        ({"lora_modules_to_save": ["embed_tokens", "wte"]}, "names embed_tokens twice"),
        ({"lora_modules_to_save": [""]}, "must not be empty"),
        ({"lora_modules_to_save": ["lm_head"], "tuning": "full"}, "trains none: it trains every weight"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        found(**settings)


def test_what_dropout_costs_is_said():
    lines = "\n".join(found(lora_dropout=0.05).decisions)
    assert re.search(
        r"lora_dropout: 0\.05 keeps .*: [\d.]+ [MG]iB more at the peak .* takes \d+\.\d % longer", lines
    )
    assert "lora_dropout" not in "\n".join(found().decisions)


def test_what_the_dropout_of_the_config_costs_is_said():
    lines = "\n".join(found(model="gpt2").decisions)
    assert re.search(
        r"dropout 0\.1 on attention, residuals and the embedding, from the model's config: "
        r"[\d.]+ [MG]iB more at the peak than without, and a step takes \d+\.\d % longer",
        lines,
    )
    assert "from the model's config" not in "\n".join(found().decisions)


def test_dropout_of_a_traced_model_is_in_its_figures():
    """It was told as 0 B more than without, because nothing was traced without."""
    model = replace(load_model_spec("openai/gpt-oss-20b", offline=True), dropout=Dropout(attention=0.1))
    recipe = recipe_of(model.name, tuning="lora", seq_len=512)
    report = find_plan(recipe, model=model, hardware=hardware_for(gpu=find_gpu("h100")))
    line = "dropout 0.1 on attention, from the model's config, is in these figures"
    assert any(said.startswith(line) for said in report.decisions)
