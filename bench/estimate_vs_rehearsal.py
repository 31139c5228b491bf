"""The arithmetic against the rehearsal: how far the estimated peak of tensors is from that of the plan's own step.

    python bench/estimate_vs_rehearsal.py              132 plans of real shapes: 12 models of 7 families, full and LoRA,
                                                       recompute none, half, all, plain and chunked loss, five devices
    python bench/estimate_vs_rehearsal.py --sharded    24 plans of six models on eight ranks, FSDP2's three stages
    python bench/estimate_vs_rehearsal.py --every 10   each tenth of them

    python bench/estimate_vs_rehearsal.py --json results/estimate_vs_rehearsal.json

The rehearsal runs on fake tensors: no GPU, no weights. Prints every plan, then the worst.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from fitune.estimate.predict import predict_memory
from fitune.recipe.targets import resolve_targets
from fitune.rehearse.step import rehearse
from fitune.units import GIB, format_bytes
from fitune.values.machines.gpus import cpu_gpu, find_gpu, hardware_for
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.traits import flash_refused
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
    Sgd,
    Single,
    Steps,
    Zero,
)
from fitune.values.words import describe_plan

MODELS = (
    "llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "mistral-7b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b",
    "phi-3-mini", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-2b", "gemma-3-1b",
)  # fmt: skip
DEVICES = ("cpu", "h100", "rtx-4090", "a100-80gb", "v100-32gb")
SHAPES = ((1, 512), (1, 2048), (4, 1024), (1, 8192))
"""Rows × tokens of a micro-batch."""


SHARDED_MODELS = (
    "llama-3.1-8b", "qwen3-4b", "mixtral-8x7b", "qwen2.5-7b", "llama-2-70b", "qwen3-30b-a3b",
)  # fmt: skip


def device(name: str, *, gpus: int = 1) -> Hardware:
    gpu = cpu_gpu(memory_bytes=64 * GIB, cores=8) if name == "cpu" else find_gpu(name)
    return hardware_for(gpu=gpu, gpus=gpus)


def plan_of(
    name: str, hardware: Hardware, tuning: str, precision: Precision, share: float, chunk: int,
    accumulation: int, shape: tuple[int, int], momentum: bool, packing: bool,
) -> Plan:  # fmt: skip
    model = load_model_spec(name, offline=True)
    targets = (
        ("all-linear",) if tuning == "lora" else ("q_proj", "v_proj") if "phi" not in name else ("qkv_proj",)
    )
    lora = Lora(rank=16, alpha=32, dropout=0.0, targets=resolve_targets(model, targets))
    return Plan(
        model=model,
        model_path=model.name,
        hardware=hardware,
        tuning=Full() if tuning == "full" else lora,
        precision=precision,
        optimizer=Sgd(momentum=0.9) if momentum else AdamW(),
        sharding=Single(),
        recompute=Recompute(blocks=int(share * model.num_layers)),
        attention="sdpa" if flash_refused(model, hardware.gpu, precision) else "flash",
        loss=ChunkedLoss(chunk_tokens=chunk) if chunk else PlainLoss(),
        batch=Batch(micro_batch_size=shape[0], accumulation=accumulation, seq_len=shape[1], packing=packing),
        schedule=Schedule(
            learning_rate=1e-4,
            kind="constant",
            warmup=Steps(count=0),
            duration=Steps(count=2),
            max_grad_norm=1.0,
        ),
        run=RunPlan(output_dir="runs/bench"),
    )


def plans() -> Iterator[Plan]:
    """11 for each model; every choice meets every other somewhere, by strides that share no divisor."""
    tunings = itertools.cycle(("full", "lora", "lora on two linears"))
    for index, (name, _) in enumerate(itertools.product(MODELS, range(11))):
        hardware = device(DEVICES[index % 5])
        sixteen = Precision.BF16 if hardware.gpu.is_cpu or hardware.gpu.has_bf16 else Precision.FP16
        master = Precision.BF16_MASTER if sixteen is Precision.BF16 else Precision.FP16
        yield plan_of(
            name, hardware, next(tunings),
            (sixteen, master, Precision.FP32)[(index // 3 + index) % 3],
            (0.0, 0.5, 1.0)[(index // 7) % 3],
            (0, 256, 1024)[(index // 2) % 3],
            (1, 4)[(index // 5) % 2],
            SHAPES[(index // 3) % 4],
            index % 13 == 0,
            index % 4 == 0,
        )  # fmt: skip


def sharded_plans() -> Iterator[Plan]:
    """4 for each of six models on eight ranks: FSDP2's three stages, full and LoRA."""
    for index, (name, turn) in enumerate(itertools.product(SHARDED_MODELS, range(4))):
        single = plan_of(
            name, device(("h100", "a100-80gb", "v100-32gb")[index % 3], gpus=8),
            "lora" if (index * 5 // 3) % 2 else "full",
            (Precision.BF16, Precision.BF16_MASTER, Precision.FP16)[index % 3]
            if turn else Precision.FP32,
            (1.0, 0.5, 0.0, 1.0)[(index // 2) % 4],
            (1024, 0, 256)[(index // 3) % 3],
            (1, 4)[(index // 4 + turn) % 2],
            SHAPES[(index + turn) % 3],
            False,
            index % 5 == 0,
        )  # fmt: skip
        yield replace(single, sharding=Zero(stage=(3, 2, 3, 1)[turn], backend="fsdp"))


def compare(plan: Plan) -> dict[str, Any]:
    started = time.perf_counter()
    rehearsed = rehearse(plan).tensor_peak_bytes
    seconds = time.perf_counter() - started
    estimated = predict_memory(plan).tensor_peak_bytes
    where = f"{plan.model.name} on {plan.hardware.gpu.name}, {describe_plan(plan)}"
    error = estimated / rehearsed - 1
    print(f"{error:>+8.3%} {format_bytes(rehearsed):>11} {seconds:5.1f} s  {where}", flush=True)
    return {"error": round(error, 6), "estimated": estimated, "rehearsed": rehearsed, "plan": where}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in found]
    return {
        "plans": len(found),
        "mean_abs_error": round(sum(errors) / len(errors), 6),
        "worst_abs_error": max(errors),
        "worst": sorted(found, key=lambda row: -abs(row["error"]))[:5],
    }


def write(path: Path, section: str, content: dict[str, Any]) -> None:
    """Replace one section of the file; the other one stays as it was measured."""
    known = json.loads(path.read_text()) if path.exists() else {}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
    known[section] = {"date": date.today().isoformat(), "versions": versions, **content}
    path.write_text(json.dumps(known, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharded", action="store_true", help="the 24 plans on eight ranks")
    parser.add_argument("--every", type=int, default=1, help="only each N-th plan")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest |error| that is not a failure")
    parser.add_argument("--json", type=Path, help="write mean and worst into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    chosen = sharded_plans() if arguments.sharded else plans()
    found = [compare(plan) for plan in itertools.islice(chosen, 0, None, arguments.every)]
    result = summary(found)
    print(
        f"{result['plans']} plans: mean |error| {result['mean_abs_error']:.3%}, worst {result['worst_abs_error']:.3%}"
    )
    for row in result["worst"]:
        print(f"  {row['error']:+.3%}: {row['plan']}")
    if arguments.json is not None:
        write(arguments.json, "eight ranks" if arguments.sharded else "one device", result)
    return 0 if result["worst_abs_error"] <= arguments.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
