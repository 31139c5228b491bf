"""Experts packed and adapted: a small mixture's peak predicted and measured, and the plans of two large ones.

    python bench/experts.py

Measured like bench/cpu_memory.py: a real step on the CPU, every live tensor counted. 4 blocks, 4 rows of 64 to 128
tokens, bf16, NF4 with double quantisation; adapters of rank 8 on attention, or on attention and the experts.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
import cpu_memory as bench

from fitune.estimate.predict import predict_memory
from fitune.measure.memory import LiveTensors
from fitune.models.weights import compute_dtype
from fitune.planner.search import find_plan
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.rehearse.profile import TransformersTracer
from fitune.train.prepare import prepare_loaded
from fitune.units import format_bytes
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.model.model_config import load_model_spec, spec_from_config
from fitune.values.model.tracer import trace_with
from fitune.values.plan import Nf4, Plan

_SHARED = {
    "vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "intermediate_size": 192,
}  # fmt: skip
TWINS = {
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def twin(family: str, *, recompute: int, adapted: bool) -> tuple[int, int]:
    """Predicted and measured peak bytes."""
    config = AutoConfig.for_model(family, **{**_SHARED, **TWINS[family]})
    spec = spec_from_config({**config.to_dict(), "dtype": None, "torch_dtype": None}, name=family)
    plan = bench.plan_of(spec, tuning="lora", precision="bf16", recompute=recompute, chunked=True)
    targets = (*plan.tuning.targets, *(STACKS if adapted else ()))
    plan = replace(plan, tuning=replace(plan.tuning, base=Nf4(), targets=targets))
    rows = bench.random_rows(bench.ROW_LENGTHS, vocab_size=spec.vocab_size)
    return max(bench.predicted_peaks(plan, rows).values()), measured(config, plan, rows)


def measured(config: object, plan: Plan, rows: bench.RowStream) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(compute_dtype(plan.precision))
    engine = (prepared := prepare_loaded(model, plan)).engine

    def step(enter) -> None:
        engine.forward_backward(rows, divisor=rows.supervised_tokens, enter_phase=enter)
        engine.update(learning_rate=1e-4, enter_phase=enter)

    step(lambda phase: None)
    tracker = LiveTensors(prepared.resident_tensors())
    with tracker:
        step(tracker.enter)
    return max(tracker.peaks.values())


def planned(model: str, targets: list[str]) -> str:
    recipe = parse_recipe(
        canonical_keys(
            {"model": model, "tuning": "qlora", "lora_target_modules": targets, "lora_r": 8}, where="bench"
        )
    )
    hardware = hardware_for(gpu=find_gpu("4090"))
    plan = find_plan(recipe, model=load_model_spec(model), hardware=hardware).chosen.plan
    memory = predict_memory(plan)
    weights = next(iter(memory.phases.values()))["weights"]
    return f"{format_bytes(weights)} of weights on it, {format_bytes(memory.peak_bytes)} at the peak"


def main() -> None:
    trace_with(TransformersTracer)
    print("twin       recomputed  adapters on         predicted  measured")
    for family in TWINS:
        for recompute in (0, 4):
            for adapted in (False, True):
                predicted, found = twin(family, recompute=recompute, adapted=adapted)
                where = "attention, experts" if adapted else "attention"
                print(
                    f"{family:10} {recompute:>10}  {where:18} {predicted:>10,} {found:>10,}  "
                    f"{predicted / found - 1:+.2%}"
                )
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        for targets in (["all-linear"], ["all-linear", "experts"]):
            print(f"{model} QLoRA r8 on one 4090, {' and '.join(targets)}: {planned(model, targets)}")


if __name__ == "__main__":
    main()
