"""What is asked of adapters reaches the plan and is said in words; contradictions are in test_refusals.py."""

import re
from dataclasses import replace

from fitune.estimate.parameters import trained_parameters
from fitune.estimate.predict import predict_step_time
from fitune.planner.search import find_plan
from fitune.values.counts import lora_parameters, model_flops
from fitune.values.model.model_spec import Dropout
from fitune.values.plan import Lora
from fitune.values.predictions import Phase
from plans import gpu, known, recipe_of, report_of

LLAMA = "llama-3.2-1b"


def found(settings="tuning: lora", model=LLAMA):
    """The plan, and all that was decided."""
    report = report_of(model, "rtx-4090", settings)
    return report.chosen.plan, "\n".join(report.decisions)


def test_some_blocks_and_linears_are_planned_and_said():
    plan, said = found("tuning: lora, lora_layers: 12-15, rslora: true, lora_target_modules: .*self_attn.*")
    assert plan.tuning == Lora(
        rank=16, alpha=32, dropout=0.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"), layers=(12, 13, 14, 15),
        rslora=True,
    )  # fmt: skip
    assert "LoRA targets: .*self_attn.* means q_proj, k_proj, v_proj, o_proj" in said
    assert "LoRA blocks: 12–15 of 0–15; nothing trains before block 12, so backward ends there" in said
    assert "alpha / √r = 32 / 4 = 8; without it by alpha / r = 2" in said


def test_what_full_fine_tuning_has_no_use_for_asks_for_adapters():
    plan, said = found("lora_layers: 12-15")
    assert isinstance(plan.tuning, Lora)
    assert "because of lora_layers: [12, 13, 14, 15]" in said


def test_blocks_that_nothing_goes_back_through_cost_no_backward():
    """Half of the blocks: half of the backward's time, and by hand 2 of 4 FLOPs for each weight of the other half."""
    pins = "tuning: lora, gradient_checkpointing: false, micro_batch_size: 2"
    whole, half = found(pins)[0], found(f"{pins}, lora_layers: 8-15")[0]
    backward = [predict_step_time(plan).phases[Phase.BACKWARD] for plan in (whole, half)]
    assert 0.45 < backward[1] / backward[0] < 0.55
    model = half.model
    flops = model_flops(model, half.tuning, row_lengths=[1], supervised_tokens=0)
    base = sum(m.in_features * m.out_features for m in model.linears)
    adapters = sum(16 * (m.in_features + m.out_features) for m in model.linears)
    assert flops == 8 * (4 * base + 6 * adapters + 12 * model.q_dim) + 8 * (2 * base + 4 * model.q_dim)


def test_tables_are_trained_whole_and_what_that_is_said():
    """Llama-3.2-1B's embedding is its head: asked for one, both are trained, 128,256 × 2,048 numbers once."""
    plan, said = found("tuning: lora, lora_modules_to_save: lm_head, lora_layers: 8-15")
    assert plan.tuning.modules_to_save == ("embed_tokens", "lm_head")
    assert trained_parameters(plan) == 128_256 * 2_048 + lora_parameters(plan.model, plan.tuning)
    assert "embed_tokens and lm_head, one tensor, train whole, 263 M of the 268 M trained parameters" in said
    assert "backward ends" not in said


def test_what_dropout_costs_is_said():
    """Asked for, and of the model's config."""
    costs = r"[\d.]+ [MG]iB more at the peak .* takes? \d+\.\d % longer"
    _, asked = found("tuning: lora, lora_dropout: 0.05")
    assert re.search(rf"lora_dropout: 0\.05 keeps .*: {costs}", asked)
    _, config = found(model="gpt2")
    start = r"dropout 0\.1 on attention, residuals and the embedding, from the model's config: "
    assert re.search(start + costs, config)
    assert "dropout" not in found()[1]


def test_dropout_of_a_traced_model_is_in_its_figures():
    """It was told as 0 B more than without, because nothing was traced without."""
    model = replace(known("openai/gpt-oss-20b"), dropout=Dropout(attention=0.1))
    report = find_plan(recipe_of(model.name, "tuning: lora, seq_len: 512"), model=model, hardware=gpu("h100"))
    line = "dropout 0.1 on attention, from the model's config, is in these figures"
    assert any(said.startswith(line) for said in report.decisions)
