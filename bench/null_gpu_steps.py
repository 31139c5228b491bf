"""Launches, synchronisations, allocations and host time of one step, counted on a GPU whose kernels do nothing.

    tests/null_gpu/run.sh python bench/null_gpu_steps.py lora                 8 B, two micro-batches of one row a step
    tests/null_gpu/run.sh python bench/null_gpu_steps.py lora full --shape 8b-4    four of its blocks, by two methods

Prints one line of JSON for each. ``host_ms`` is the least processor time of the counted steps, all threads together:
what Python and torch need to launch a step, whatever else the machine does. A micro-batch that synchronises is an
error.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import gpu_cases
import nullcuda
import torch

from fitune.measure.memory import memory_meter
from fitune.models.readers import empty_model
from fitune.models.weights import compute_dtype
from fitune.train.prepare import Prepared, prepare_loaded
from fitune.units import GIB
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Plan

COUNTED = 4
"""Steps after the second one, from which on nothing new is allocated."""


def plan_of(case: str, shape: str) -> Plan:
    hardware = hardware_for(gpu=find_gpu("h100"), gpus=1, host_memory_bytes=200 * GIB, cpu_cores=2)
    return gpu_cases.plan_of(gpu_cases.CASES[case], gpu_cases.SHAPES[shape], hardware=hardware, rows=1)


def prepared_for(plan: Plan, shape: gpu_cases.Shape) -> Prepared:
    """The plan's model with weights of no content, packed where the plan says so."""
    device = torch.device("cuda", 0)
    with torch.device("meta"):
        model = empty_model(gpu_cases.config_of(shape), compute_dtype(plan.precision))
    on = torch.device("cpu") if plan.offload.parameters == "cpu" else device
    return prepare_loaded(model.to_empty(device=on), plan, device=device)


def counted_steps(
    plan: Plan, prepared: Prepared, *, micro_batches: int, strict: bool
) -> list[dict[str, Any]]:
    """Counts of each step after the second; ``strict``: torch refuses to synchronise in a micro-batch."""
    rows = gpu_cases.full_rows(replace(plan, batch=replace(plan.batch, accumulation=micro_batches)))
    supervised, enter = rows.supervised_tokens * micro_batches, memory_meter(torch.device("cuda", 0)).enter
    found = []
    for step in range(2 + COUNTED):
        before, began = nullcuda.counts(), time.process_time()
        torch.cuda.set_sync_debug_mode("error" if strict and step >= 2 else "default")
        for number in range(micro_batches):
            prepared.engine.forward_backward(
                rows, divisor=supervised, enter_phase=enter, last=number == micro_batches - 1
            )
        torch.cuda.set_sync_debug_mode("default")
        passes, middle, updating = nullcuda.since(before), nullcuda.counts(), time.process_time()
        prepared.engine.update(learning_rate=1e-5, enter_phase=enter)
        update, ended = nullcuda.since(middle), time.process_time()
        found.append(
            {
                "launches": passes["launches"] + update["launches"],
                "launches_of_update": update["launches"],
                "synchronisations_in_micro_batches": passes["syncs"],
                "synchronisations_of_update": update["syncs"],
                "mallocs": passes["mallocs"] + update["mallocs"],
                "host_ms": 1e3 * (ended - began),
                "host_ms_of_update": 1e3 * (ended - updating),
            }
        )
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=gpu_cases.CASES)
    parser.add_argument("--shape", choices=gpu_cases.SHAPES, default="8b")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument(
        "--lenient", action="store_true", help="count synchronisations instead of refusing them"
    )
    options = parser.parse_args()
    for case in options.cases:
        print(json.dumps({"case": case, **counted(case, options), "torch": torch.__version__}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def counted(case: str, options: argparse.Namespace) -> dict[str, Any]:
    plan = plan_of(case, options.shape)
    prepared = prepared_for(plan, gpu_cases.SHAPES[options.shape])
    steps = counted_steps(plan, prepared, micro_batches=options.micro_batches, strict=not options.lenient)
    most = {name: max(step[name] for step in steps) for name in steps[0] if not name.startswith("host_ms")}
    least = {
        name: round(min(step[name] for step in steps), 1) for name in steps[0] if name.startswith("host_ms")
    }
    settings = {"shape": options.shape, "micro_batches": options.micro_batches}
    return {**settings, "trained_tensors": len(prepared.model.trained), **most, **least}


if __name__ == "__main__":
    main()
