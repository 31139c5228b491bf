"""What the benchmarks for a GPU have in common; their plans are those of ``fitune doctor --prove``.

Needs torch, transformers, peft, psutil and pydantic; bitsandbytes for NF4 and 8-bit AdamW, hqq for HQQ.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from typing import Any

import torch

from fitune.estimate.predict import predict
from fitune.measure.hardware import detect_hardware
from fitune.session.proving import steps
from fitune.session.proving.steps import (
    CLIP,
    TINY,
    Case,
    Shape,
    config_of,
    full_rows,
    plan_of,
    random_model,
    synchronise,
)
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.machines.hardware import Hardware
from fitune.values.plan import AdamW8bit, Full, Lomo, Plan, Recompute, Sgd

__all__ = [
    "CASES", "SHAPES", "Case", "Shape", "config_of", "fewest_recomputed", "full_rows", "hardware_here", "plan_of",
    "random_model", "synchronise", "where_and_when",
]  # fmt: skip
SHAPES = {
    "tiny": TINY,
    "8b-4": Shape(model="llama-3.1-8b", layers=4, seq_len=2048, chunk_tokens=1024),
    "1b": Shape(model="llama-3.2-1b", layers=16, seq_len=2048, chunk_tokens=1024),
    "8b": Shape(model="llama-3.1-8b", layers=32, seq_len=4096, chunk_tokens=1024),
    "moe": Shape(model="qwen3-30b-a3b", layers=48, seq_len=2048, chunk_tokens=1024),
    "gemma": Shape(model="gemma-2-9b", layers=42, seq_len=2048, chunk_tokens=512),
}
CASES = {
    **steps.CASES,
    "full-8bit": Case(tuning=Full(), optimizer=AdamW8bit()),
    "adalomo": Case(tuning=Lomo(adaptive=True, clip=CLIP), optimizer=Sgd()),
}
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "hqq", "trl")


def hardware_here() -> Hardware:
    if torch.cuda.is_available():
        return detect_hardware()
    return hardware_for(gpu=cpu_gpu(memory_bytes=8 * GIB, cores=1))


def fewest_recomputed(plan: Plan, *, spare_bytes: int) -> Plan:
    """The plan with as few blocks recomputed as leave ``spare_bytes`` free; with all when none do."""
    plans = list(_by_recompute(plan))
    for candidate in plans:
        estimate = predict(candidate)
        if estimate.peak_bytes + spare_bytes <= estimate.usable_bytes:
            return candidate
    return plans[-1]


def _by_recompute(plan: Plan) -> Iterator[Plan]:
    for blocks in range(plan.model.num_layers + 1):
        yield replace(plan, recompute=Recompute(blocks=blocks))


def where_and_when(hardware: Hardware) -> dict[str, Any]:
    """What every file of results begins with."""
    return {
        "date": date.today().isoformat(),
        "device": hardware.gpu.name,
        "device_memory_bytes": hardware.gpu.memory_bytes,
        "versions": versions(),
        "is_gpu": not hardware.gpu.is_cpu,
    }


def versions() -> dict[str, str]:
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
