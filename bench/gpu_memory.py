"""Predicted, rehearsed and measured peaks by phase on a GPU, and what lies outside of the tensors.

    python bench/gpu_memory.py --out results                       all methods on shapes 8b-4 and 1b
    python bench/gpu_memory.py --shapes tiny --out seen            proves the script; also on a CPU

Measured is torch.cuda's peak of allocated bytes in each phase of the third step, less what lies in no tensor of the
program when a step is over (cuBLAS' workspace). Beside the peaks: that workspace, the bytes that the allocator reserved
above its peak (slack), and the context (device memory in use that torch did not reserve, all processes together).

Cases begin until --seconds have passed; the others are named as not run. On a CPU measured are live tensors: no figure
of a GPU. Needs what gpu_cases.py says.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_cases import (
    CASES,
    SHAPES,
    Case,
    Shape,
    config_of,
    full_rows,
    hardware_here,
    plan_of,
    random_model,
    synchronise,
    where_and_when,
)

from fitune.errors import MissingExtra
from fitune.estimate.predict import predict_memory
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import peaks_by_kind
from fitune.session.proving.steps import WARM_UP, measured_step, train_step
from fitune.train.prepare import Prepared, prepare_loaded, training_device
from fitune.units import format_bytes
from fitune.values.machines.hardware import Hardware
from fitune.values.plan import Plan
from fitune.values.predictions import Phase

Phases = dict[Phase, int]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8b-4", "1b"], choices=[*SHAPES])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--seconds", type=float, default=480, help="no case begins after this")
    parser.add_argument("--out", type=Path, required=True, help="the folder for gpu_memory.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hardware = hardware_here()
    found = run_cases(options, hardware)
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": "bench/gpu_memory.py", **where_and_when(hardware), "cases": found}
    (options.out / "gpu_memory.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in case for case in found))


def run_cases(options: argparse.Namespace, hardware: Hardware) -> list[dict[str, Any]]:
    began, found = time.perf_counter(), []
    for shape in options.shapes:
        for name in options.cases:
            for share in (0, 1):  # no block recomputed, then all
                words = {"shape": shape, "case": name, "recompute": share * SHAPES[shape].layers}
                late = time.perf_counter() - began > options.seconds
                result = {"not_run": "no time left"} if late else look_at(words, options.rows, hardware)
                found.append({**words, **result})
                print(line_of(found[-1]), flush=True)
    return found


def look_at(words: dict[str, Any], rows: int, hardware: Hardware) -> dict[str, Any]:
    case, shape = CASES[words["case"]], SHAPES[words["shape"]]
    plan = plan_of(case, shape, hardware=hardware, rows=rows, recompute=words["recompute"])
    try:
        return compared(plan, shape, case)
    except MissingExtra as error:
        return {"not_run": error.message}
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compared(plan: Plan, shape: Shape, case: Case) -> dict[str, Any]:
    config = config_of(shape)
    memory = predict_memory(plan)
    predicted = {phase: sum(terms.values()) for phase, terms in memory.phases.items()}
    trace, _ = trace_plan(plan, config, exact=False)
    by_kind = peaks_by_kind(trace, on_cuda=not plan.hardware.gpu.is_cpu)
    rehearsed = {phase: sum(kinds.values()) for phase, kinds in by_kind.items()}
    device = training_device(plan)
    prepared = prepare_loaded(random_model(plan, config, device), plan, device=device)
    measured, outside = measure(plan, prepared)
    largest = {"predicted": predicted, "rehearsed": rehearsed, "measured": measured}
    return {
        "offload": asdict(case.offload),
        "peak": {side: max(phases.values()) for side, phases in largest.items()},
        "phases": {side: _named(phases) for side, phases in largest.items()},
        "outside_predicted": memory.outside,
        "outside_measured": outside,
    }


def measure(plan: Plan, prepared: Prepared) -> tuple[Phases, dict[str, int]]:
    """Peaks by phase of the third step without the workspace, and what lies outside of them."""
    device, rows = training_device(plan), full_rows(plan)
    for _ in range(WARM_UP):
        train_step(prepared, rows)
    synchronise(device)
    return measured_step(prepared, rows, device)


def _named(phases: Phases) -> dict[str, int]:
    return {phase.value: size for phase, size in phases.items()}


def line_of(found: dict[str, Any]) -> str:
    name = f"{found['shape']:6} {found['case']:24} {found['recompute']:2} recomputed"
    if "peak" not in found:
        return f"{name}  {found.get('not_run') or found['error']}"
    peak = found["peak"]
    sizes = "  ".join(f"{side} {format_bytes(size):>10}" for side, size in peak.items())
    off = (peak[side] / peak["measured"] - 1 for side in ("predicted", "rehearsed"))
    outside = ", ".join(f"{what} {format_bytes(size)}" for what, size in found["outside_measured"].items())
    return f"{name}  {sizes}  " + " ".join(f"{error:+.2%}" for error in off) + f"  {outside}"


if __name__ == "__main__":
    sys.exit(main())
