"""Predicted, rehearsed and measured peak of live tensors for every single-device method, on the CPU.

    python bench/cpu_methods.py           36 plans: QLoRA, HQQ, DoRA, LOMO, AdaLomo, 8-bit AdamW × three settings

The same small Llama, rows and meter as in cpu_memory.py. Measured is a real step, rehearsed the same step on fake
tensors, predicted is arithmetic on the shapes.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from cpu_memory import (
    CONFIG,
    LAYERS,
    ROW_LENGTHS,
    Rows,
    measured_peaks,
    plan_of,
    predicted_peaks,
    random_rows,
    small_model,
)
from transformers import LlamaConfig

from fitune.rehearse.peaks import peaks_by_kind
from fitune.rehearse.step import record_step
from fitune.spec.model import ModelSpec
from fitune.spec.plan import AdamW8bit, ClipByNorm, ClipByValue, Hqq, Lomo, Lora, Nf4, Plan, Sgd
from fitune.units import format_bytes

BASES = {
    "QLoRA, NF4": {"base": Nf4()},
    "QLoRA, NF4, single scales": {"base": Nf4(double_quant=False)},
    "LoRA on HQQ 8 bit": {"base": Hqq(bits=8)},
    "LoRA on HQQ 4 bit": {"base": Hqq(bits=4)},
    "LoRA on HQQ 3 bit": {"base": Hqq(bits=3)},
    "LoRA on HQQ 2 bit": {"base": Hqq(bits=2)},
    "DoRA": {"dora": True},
    "DoRA on NF4": {"dora": True, "base": Nf4()},
}
LOMOS = {
    "LOMO, clipped by value": Lomo(adaptive=False, clip=ClipByValue(value=1.0)),
    "LOMO, clipped by norm": Lomo(adaptive=False, clip=ClipByNorm(max_norm=1.0)),
    "AdaLomo": Lomo(adaptive=True, clip=ClipByValue(value=1.0)),
}
SETTINGS = (("fp32", 0, True), ("bf16", LAYERS // 2, False), ("bf16", LAYERS, True))


def plans(model: ModelSpec) -> Iterator[tuple[str, Plan]]:
    for precision, recompute, chunked in SETTINGS:
        words = f"{precision}, {recompute} recomputed"
        common = {"precision": precision, "recompute": recompute, "chunked": chunked}
        adapters, full = (plan_of(model, tuning=tuning, **common) for tuning in ("lora", "full"))
        assert isinstance(adapters.tuning, Lora)
        for name, choice in BASES.items():
            yield f"{name}, {words}", replace(adapters, tuning=replace(adapters.tuning, **choice))
        for name, lomo in LOMOS.items():
            yield f"{name}, {words}", replace(full, tuning=lomo, optimizer=Sgd())
        yield f"full, 8-bit AdamW, {words}", replace(full, optimizer=AdamW8bit())


def rehearsed_peak(plan: Plan, rows: Rows) -> int:
    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    trace = record_step(plan, config, rows=rows.sequence_lengths, labels=rows.supervised_tokens)
    return max(sum(kinds.values()) for kinds in peaks_by_kind(trace, on_cuda=False).values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest |error| that is not a failure")
    tolerance = parser.parse_args().tolerance
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = small_model()
    rows = random_rows(ROW_LENGTHS, vocab_size=model.vocab_size)
    errors = []
    print(f"{'plan':52} {'predicted':>11} {'rehearsed':>11} {'measured':>11} {'errors':>16}")
    for name, plan in plans(model):
        measured = max(measured_peaks(plan, rows).values())
        predicted, rehearsed = max(predicted_peaks(plan, rows).values()), rehearsed_peak(plan, rows)
        off = predicted / measured - 1, rehearsed / measured - 1
        errors.append(max(map(abs, off)))
        sizes = "".join(f" {format_bytes(size):>11}" for size in (predicted, rehearsed, measured))
        print(f"{name:52}{sizes} {off[0]:>+8.2%} {off[1]:>+7.2%}", flush=True)
    print(f"{len(errors)} plans: worst |error| {max(errors):.2%}, tolerance {tolerance:.0%}")
    return 0 if max(errors) <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
