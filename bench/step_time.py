"""Predicted and measured seconds of fitune's own training step on this machine's processor or first GPU.

    fitune doctor --calibrate && python bench/step_time.py
    python bench/step_time.py --only full --repeats 9 --json results/step_time_cpu.json

Small models with random weights, full rows, the engine that training uses, a fresh process each. The least of several
steps counts, of the time this process ran where it has one thread: others may use the machine at the same time.
Without a calibration the prediction is what the assumed rates say.
"""

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from fitune.engine.protocol import Engine
from fitune.estimate.predict import predict_step_time
from fitune.measure.hardware import calibrated, detect_hardware
from fitune.models.weights import compute_dtype
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.rehearse.step import RowStream, full_stream
from fitune.train.prepare import Prepared, prepare_loaded
from fitune.values.machines.hardware import Hardware
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.model_config import spec_from_config
from fitune.values.plan import Plan

LLAMA_10M = {
    "model_type": "llama", "hidden_size": 320, "intermediate_size": 880, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 4096, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}


QUIET_SECONDS = 3.0
"""So long at least, so that short steps too find a moment when nothing runs beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, ``rows`` of ``seq_len`` tokens in a micro-batch, and what the recipe says beside."""

    name: str
    model: dict[str, Any]
    rows: int
    seq_len: int
    recipe: dict[str, Any] = field(default_factory=dict)


IN_FP32 = (
    Case(name="full, 0.2 M", rows=4, seq_len=64, model={
        **LLAMA_10M, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 600,
    }),
    Case(name="full, 10 M, 1 row", model=LLAMA_10M, rows=1, seq_len=512),
    Case(name="full, 10 M, 16 short rows", model=LLAMA_10M, rows=16, seq_len=64),
    Case(name="full, 10 M, recompute", model=LLAMA_10M, rows=2, seq_len=512, recipe={"gradient_checkpointing": True}),
    Case(name="full, 10 M, a long row", model=LLAMA_10M, rows=1, seq_len=2048),
    Case(name="lora r8, 10 M", model=LLAMA_10M, rows=2, seq_len=512, recipe={"tuning": "lora", "lora_r": 8}),
    Case(name="lora r32, 10 M", model=LLAMA_10M, rows=2, seq_len=512, recipe={"tuning": "lora", "lora_r": 32}),
    Case(name="full, q/k-norm, wide", model={**LLAMA_10M, **WIDE, "model_type": "qwen3", "num_hidden_layers": 2},
         rows=1, seq_len=512),
    Case(name="full, large vocabulary", model={**LLAMA_10M, "vocab_size": 32000, "num_hidden_layers": 3}, rows=1,
         seq_len=512),
)  # fmt: skip
CASES = (
    *IN_FP32,
    *(
        replace(case, name=f"{case.name}, bf16", recipe={**case.recipe, "precision": "bf16-master"})
        for case in IN_FP32
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    hardware = calibrated(detect_hardware())
    print(f"{hardware.gpu.name}, {torch.get_num_threads()} threads, {hardware.rates}")
    print(f"{'':28}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    cases = [case for case in CASES if options.only in case.name]
    rows = []
    for case in cases:
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn")
        ) as fresh:  # malloc remembers earlier models
            rows.append(fresh.submit(compared, case, hardware, options.repeats).result())
    if options.json is not None:
        facts = {
            "benchmark": "bench/step_time.py",
            "date": datetime.date.today().isoformat(),
            "hardware": f"{hardware.cpu_cores} cores, {hardware.gpu.name}, {torch.get_num_threads()} threads",
            "versions": {"torch": torch.__version__},
            "rates": hardware.rates,
        }
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


def compared(case: Case, hardware: Hardware, repeats: int) -> dict[str, Any]:
    """Print one line, and give it back."""
    config = AutoConfig.for_model(**case.model)
    plan = plan_of(case, hardware)
    shape = BatchShape(
        tokens=case.rows * case.seq_len, supervised_tokens=case.rows * (case.seq_len - 1), rows=case.rows
    )
    predicted = predict_step_time(plan, shape).step_seconds
    measured = fastest_step(plan, config, case, repeats)
    print(
        f"{case.name:28}{predicted * 1e3:9.1f} ms{measured * 1e3:9.1f} ms{predicted / measured:8.2f}",
        flush=True,
    )
    return {
        "name": case.name,
        "predicted_s": predicted,
        "measured_s": measured,
        "ratio": predicted / measured,
    }


def plan_of(case: Case, hardware: Hardware) -> Plan:
    wanted = {
        "model": case.name, "data": ["none.jsonl"], "tuning": "full", "precision": "fp32", "seq_len": case.seq_len,
        "micro_batch_size": case.rows, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
        "packing": False, "max_steps": 1, **case.recipe,
    }  # fmt: skip
    model = spec_from_config(case.model, name=case.name)
    return find_plan(parse_recipe(wanted), model=model, hardware=hardware).chosen.plan


def fastest_step(plan: Plan, config: PretrainedConfig, case: Case, repeats: int) -> float:
    prepared, device = prepared_at_random(plan, config)
    stream = random_stream(case, device)
    one_step(prepared.engine, stream, case)  # the optimizer makes its states
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock: Callable[[], float] = time.process_time if alone else time.perf_counter
    least, until = math.inf, time.monotonic() + QUIET_SECONDS
    while repeats > 0 or time.monotonic() < until:
        least = min(least, timed(lambda: one_step(prepared.engine, stream, case), clock, device))
        repeats -= 1
    return least


def prepared_at_random(plan: Plan, config: PretrainedConfig) -> tuple[Prepared, torch.device]:
    torch.manual_seed(0)
    device = torch.device("cpu" if plan.hardware.gpu.is_cpu else "cuda")
    model = AutoModelForCausalLM.from_config(config, dtype=compute_dtype(plan.precision)).to(device)
    return prepare_loaded(model, plan), device


def random_stream(case: Case, device: torch.device) -> RowStream:
    """Full rows of any tokens; the first of each has nothing to be predicted from."""
    stream = full_stream((case.seq_len,) * case.rows)
    ids = torch.randint(0, case.model["vocab_size"], (case.rows, case.seq_len))
    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = -100
    positions = torch.arange(case.seq_len).repeat(case.rows)
    return replace(
        stream,
        input_ids_T=ids.flatten().to(device),
        labels_T=labels.flatten().to(device),
        position_ids_T=positions.to(device),
    )


def one_step(engine: Engine, stream: RowStream, case: Case) -> None:
    supervised = case.rows * (case.seq_len - 1)
    engine.forward_backward(stream, divisor=supervised, enter_phase=lambda phase: None)
    engine.update(learning_rate=1e-5, enter_phase=lambda phase: None)


def timed(work: Callable[[], None], clock: Callable[[], float], device: torch.device) -> float:
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
