"""Predicted against measured peak of live tensors: real steps of a small Llama on the CPU.

    python bench/cpu_memory.py            24 plans: full and LoRA × recompute none, half, all × plain and chunked
                                          loss × fp32 and bf16, several rows of different lengths

Measured by fitune's own meter (measure/memory.py) around fitune's own step; predicted by estimate/memory.py from
the shapes alone. The meter counts every tensor storage alive, whatever made it.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.engine.protocol import EnterPhase
from fitune.estimate.predict import predict_memory
from fitune.measure.memory import LiveTensors
from fitune.models.weights import compute_dtype
from fitune.session.proving.steps import RowStream, random_rows
from fitune.train.prepare import Prepared, prepare_loaded
from fitune.units import GIB, format_bytes
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.model_config import spec_from_config
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import (
    AdamW,
    Batch,
    ChunkedLoss,
    Full,
    Lora,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Single,
    Steps,
)
from fitune.values.predictions import Phase

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROW_LENGTHS = (96, 64, 128, 80)
LAYERS = 6
CHUNK_TOKENS = 64
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(
    model: ModelSpec, *, tuning: str, precision: str, recompute: int, chunked: bool, accumulation: int = 1
) -> Plan:
    lora = Lora(rank=8, alpha=16, dropout=0.0, targets=model.adaptable_names)
    return Plan(
        model=model,
        model_path=model.name,
        hardware=hardware_for(gpu=cpu_gpu(memory_bytes=8 * GIB, cores=1)),
        tuning=Full() if tuning == "full" else lora,
        precision=Precision(precision),
        optimizer=AdamW(),
        sharding=Single(),
        recompute=Recompute(blocks=recompute),
        attention="sdpa",
        loss=ChunkedLoss(chunk_tokens=CHUNK_TOKENS) if chunked else PlainLoss(),
        batch=Batch(
            micro_batch_size=len(ROW_LENGTHS),
            accumulation=accumulation,
            seq_len=max(ROW_LENGTHS),
            packing=False,
        ),
        schedule=Schedule(
            learning_rate=1e-4,
            kind="constant",
            warmup=Steps(count=0),
            duration=Steps(count=2),
            max_grad_norm=1.0,
        ),
        run=RunPlan(output_dir="runs/bench"),
    )


def plans(model: ModelSpec) -> Iterator[Plan]:
    for precision, tuning, recompute, chunked in itertools.product(
        ("fp32", "bf16"), ("full", "lora"), (0, LAYERS // 2, LAYERS), (False, True)
    ):
        yield plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=chunked)


def measured_peaks(plan: Plan, rows: RowStream, *, mesh: "DeviceMesh | None" = None) -> dict[Phase, int]:
    """Live tensor bytes by phase of a step of a freshly made model, on this rank of ``mesh``: the second; with others
    the third."""
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = LlamaForCausalLM(config).to(compute_dtype(plan.precision))
    # optimizer states appear, then DDP's buckets find their order
    return peaks_of_step(prepare_loaded(model, plan, mesh=mesh), plan, rows, before=1 if mesh is None else 2)


def peaks_of_step(prepared: Prepared, plan: Plan, rows: RowStream, *, before: int = 1) -> dict[Phase, int]:
    """Live tensor bytes by phase of a step after ``before`` others."""

    def step(enter: EnterPhase) -> None:
        for number in range(plan.batch.accumulation):
            last = number == plan.batch.accumulation - 1
            prepared.engine.forward_backward(
                rows, divisor=rows.supervised_tokens, enter_phase=enter, last=last
            )
        prepared.engine.update(learning_rate=1e-4, enter_phase=enter)

    for _ in range(before):
        step(lambda phase: None)
    tracker = LiveTensors(prepared.resident_tensors(), prepared.host)
    with tracker:
        step(tracker.enter)
    return tracker.peaks


def predicted_peaks(plan: Plan, rows: RowStream) -> dict[Phase, int]:
    shape = BatchShape(
        tokens=len(rows.input_ids_T),
        supervised_tokens=rows.supervised_tokens,
        rows=len(rows.sequence_lengths),
        longest_row=max(rows.sequence_lengths),
    )
    return {phase: sum(terms.values()) for phase, terms in predict_memory(plan, shape).phases.items()}


def peak_error(plan: Plan, rows: RowStream) -> tuple[int, int, float]:
    """Predicted and measured peak of the whole step, and (predicted − measured) / measured."""
    predicted, measured = max(predicted_peaks(plan, rows).values()), max(measured_peaks(plan, rows).values())
    return predicted, measured, predicted / measured - 1


def small_model() -> ModelSpec:
    return spec_from_config(CONFIG, name="bench/llama")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=0.03, help="largest |error| that is not a failure")
    tolerance = parser.parse_args().tolerance
    torch.set_num_threads(1)
    model = small_model()
    rows = random_rows(ROW_LENGTHS, vocab_size=model.vocab_size)
    errors = []
    print(f"{'plan':44} {'predicted':>11} {'measured':>11} {'error':>8}")
    for plan in plans(model):
        predicted, measured, error = peak_error(plan, rows)
        errors.append(abs(error))
        tuning = "full" if isinstance(plan.tuning, Full) else "lora"
        loss = "chunked" if isinstance(plan.loss, ChunkedLoss) else "plain"
        name = f"{plan.precision.value} {tuning}, {plan.recompute.blocks} of {LAYERS} recomputed, {loss} loss"
        print(
            f"{name:44} {format_bytes(predicted):>11} {format_bytes(measured):>11} {error:>+8.2%}",
            flush=True,
        )
    mean, worst = sum(errors) / len(errors), max(errors)
    print(f"{len(errors)} plans: mean |error| {mean:.2%}, worst {worst:.2%}, tolerance {tolerance:.0%}")
    return 0 if worst <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
