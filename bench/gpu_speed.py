"""Tokens/s, MFU and peak bytes of fitune and of plain transformers + PEFT + bitsandbytes on one GPU, in one run.

    python bench/gpu_speed.py --out results                            Llama-3.1-8B shapes, rows of 4096, four methods
    python bench/gpu_speed.py --cases qlora --profile --out results    one of them, and where its time goes
    python bench/gpu_speed.py --kernels liger --out results            with Liger's kernels on fitune's side
    python bench/gpu_speed.py --shape tiny --seconds 3 --out seen      proves the script; also on a CPU

Weights are random and drawn on the device. Both sides have the same shapes, rows, trained weights and number of tokens;
each runs in a process of its own, one after the other, case by case: two warm-up steps, one for the peak by phase, then
whole steps for --seconds. fitune recomputes as few blocks as its estimate says, with --spare-gib to spare; the
peer none, or all when memory runs out. MFU is values/counts.py's for both: recompute is not counted as work.

A process that takes longer than --limit is ended, and its row says so; after --total no other begins. Needs what
gpu_cases.py says. Figures of a CPU are no figures of a GPU (its peak of bf16 is assumed, so its MFU says nothing): the
file says where they are from.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_cases import (
    CASES,
    SHAPES,
    config_of,
    fewest_recomputed,
    full_rows,
    hardware_here,
    plan_of,
    random_model,
    synchronise,
    where_and_when,
)

from fitune.errors import MissingExtra
from fitune.estimate.predict import predict
from fitune.measure.memory import memory_meter
from fitune.train.prepare import prepare_loaded, training_device
from fitune.units import GIB, format_bytes
from fitune.values.counts import achieved_mfu
from fitune.values.plan import Lomo, Plan
from fitune.values.words import describe_plan

DEFAULT_CASES = ("lora", "qlora", "lomo", "full-8bit-in-backward")
WARM_UP = 2
LEAST_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8b", choices=[*SHAPES])
    parser.add_argument("--cases", nargs="+", default=[*DEFAULT_CASES], choices=[*CASES])
    parser.add_argument("--sides", nargs="+", default=["fitune", "peer"], choices=["fitune", "peer"])
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--seconds", type=float, default=20, help="timed steps, each case and side")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one whole process")
    parser.add_argument("--total", type=float, default=500, help="seconds after which no process begins")
    parser.add_argument("--spare-gib", type=float, default=4, help="what fitune's estimate leaves free")
    parser.add_argument("--kernels", default="torch", choices=["torch", "liger"], help="of fitune's side")
    parser.add_argument("--compile", action="store_true", help="compile fitune's blocks")
    parser.add_argument("--profile", action="store_true", help="write the operations of one step of fitune's")
    parser.add_argument("--out", type=Path, required=True, help="the folder for gpu_speed.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker is not None:
        warnings.filterwarnings("ignore")
        print(json.dumps(work(options, *options.worker.split("/"))))
        return 0
    rows = all_sides(options)
    content = {"benchmark": "bench/gpu_speed.py", **where_and_when(hardware_here()), "rows": rows}
    (options.out / "gpu_speed.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in rows))


def all_sides(options: argparse.Namespace) -> list[dict[str, Any]]:
    began, rows = time.perf_counter(), []
    for case in options.cases:
        for side in options.sides:
            words = {"case": case, "side": side, "shape": options.shape}
            late = time.perf_counter() - began > options.total
            found = {"not_run": "no time left"} if late else in_a_process(options, case, side)
            rows.append({**words, **found})
            print(line_of(rows[-1]), flush=True)
    return rows


def in_a_process(options: argparse.Namespace, case: str, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", f"{case}/{side}"]
    try:
        done = subprocess.run(command, timeout=options.limit, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.limit:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(options: argparse.Namespace, name: str, side: str) -> dict[str, Any]:
    case, shape = CASES[name], SHAPES[options.shape]
    plan = plan_of(case, shape, hardware=hardware_here(), rows=options.rows)
    plan = replace(plan, kernels=options.kernels, compile_blocks=options.compile)
    plan = fewest_recomputed(plan, spare_bytes=int(options.spare_gib * GIB))
    try:
        return {"fitune": run_fitune, "peer": run_peer}[side](options, name, plan)
    except (MissingExtra, ImportError) as error:
        return {"not_run": str(error)}


def run_fitune(options: argparse.Namespace, name: str, plan: Plan) -> dict[str, Any]:
    device = training_device(plan)
    model = random_model(plan, config_of(SHAPES[options.shape]), device)
    prepared = prepare_loaded(model, plan, device=device)
    rows, meter = full_rows(plan), memory_meter(device)

    def step() -> float:
        loss = prepared.engine.forward_backward(rows, divisor=rows.supervised_tokens, enter_phase=meter.enter)
        prepared.engine.update(learning_rate=plan.schedule.learning_rate, enter_phase=meter.enter)
        return loss.item() / rows.supervised_tokens

    estimate = predict(plan)
    found = timed(options, plan, step, lambda: meter.measuring(prepared.resident_tensors, prepared.host))
    phases = meter.take_peaks()
    if options.profile:
        write_profile(options.out / f"gpu_profile_{name}.txt", step, device)
    return {
        **found,
        "peak_bytes": max(phases.values()),
        "phases": {phase.value: size for phase, size in phases.items()},
        "predicted_bytes": estimate.memory.tensor_peak_bytes,
        "predicted_tokens_per_second": estimate.tokens_per_second,
        "recomputed": plan.recompute.blocks,
        "plan": describe_plan(plan),
    }


def run_peer(options: argparse.Namespace, name: str, plan: Plan) -> dict[str, Any]:
    from gpu_peer import NONE

    if isinstance(plan.tuning, Lomo):
        return {"not_run": NONE}
    try:
        return _peer(options, name, plan, recompute=False)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return _peer(options, name, plan, recompute=True)


def _peer(options: argparse.Namespace, name: str, plan: Plan, *, recompute: bool) -> dict[str, Any]:
    from gpu_peer import peer_of

    device = training_device(plan)
    peer = peer_of(CASES[name], SHAPES[options.shape], plan, device, recompute=recompute)
    meter = memory_meter(device)
    found = timed(options, plan, peer.step, lambda: meter.measuring(peer.resident))
    return {
        **found,
        "peak_bytes": max(meter.take_peaks().values()),
        "recomputed": plan.model.num_layers if recompute else 0,
    }


def timed(
    options: argparse.Namespace, plan: Plan, step: Callable[[], float], measuring: Callable[[], Any]
) -> dict[str, Any]:
    """Warm up, measure one step, then time whole steps; the losses show that both sides train."""
    device = training_device(plan)
    losses = [step() for _ in range(WARM_UP)]
    with measuring():
        losses.append(step())
        synchronise(device)
    synchronise(device)
    began, steps = time.perf_counter(), 0
    while steps < LEAST_STEPS or time.perf_counter() - began < options.seconds:
        losses.append(step())
        steps += 1
    synchronise(device)
    seconds = (time.perf_counter() - began) / steps
    lengths = (plan.batch.seq_len,) * plan.batch.micro_batch_size
    supervised = sum(lengths) - len(lengths)
    return {
        "tokens_per_second": sum(lengths) / seconds,
        "step_seconds": seconds,
        "mfu": achieved_mfu(plan, lengths, supervised, seconds=seconds),
        "steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    }


def write_profile(file: Path, step: Callable[[], float], device: torch.device) -> None:
    """One step by operations, those that take longest on the device first."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        step()
        synchronise(device)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    file.write_text(seen.key_averages().table(sort_by=order, row_limit=40), encoding="utf-8")


def line_of(row: dict[str, Any]) -> str:
    name = f"{row['shape']:5} {row['case']:12} {row['side']:7}"
    if "tokens_per_second" not in row:
        return f"{name} {row.get('not_run') or row['error']}"
    speed = f"{row['tokens_per_second']:10,.0f} tokens/s  MFU {row['mfu']:.1%}"
    memory = f"peak {format_bytes(row['peak_bytes'])}  {row['recomputed']} recomputed"
    return f"{name} {speed}  {memory}  loss {row['first_loss']:.4f} → {row['last_loss']:.4f}"


if __name__ == "__main__":
    sys.exit(main())
