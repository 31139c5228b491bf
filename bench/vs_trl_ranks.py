"""fitune against TRL on two gloo processes, ZeRO-3 by FSDP2 and by DeepSpeed: tokens/s, peak memory of a rank, losses.

    python bench/vs_trl_ranks.py --data gsm8k_train.jsonl --json results/vs_trl_ranks_cpu.json

Needs the `bench` and the `deepspeed` extra. The model, the rows, their order and the settings of vs_trl.py, four rows
a rank. accelerate offers FSDP to processes with a GPU alone, so it is told that gloo on a CPU is such a backend
(trl_ranks_side.py); all else is its own way. Speed counts supervised tokens of both ranks by the seconds in which the
two processes had a core; the peak is that of the fuller rank.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import vs_trl
from vs_trl import (
    FIRST_TIMED_STEP,
    MEASURED_STEP,
    largest_difference,
    median,
    one_step_meter,
    read_data,
    write_model,
)

WORLD = 2
ROWS = 4
SIDES = ("fitune", "trl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--backends", nargs="+", default=["fsdp", "deepspeed"], choices=["fsdp", "deepspeed"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare(options)
        return
    worker = {"fitune": run_fitune, "trl": run_trl}[options.side]
    found = worker(options.folder, options.data, options.methods[0], options.backends[0], options.steps)
    (options.folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def compare(options: argparse.Namespace) -> None:
    """Take turns, then print one row per backend and method: both sides and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options.data)
        rows = [
            compare_pair(folder, options, method, backend)
            for backend in options.backends
            for method in options.methods
        ]
    if options.json is not None:
        found = vs_trl.record(options, rows)
        found["benchmark"] = "bench/vs_trl_ranks.py"
        found["settings"] = found["settings"].replace(
            "8 rows a step", f"{WORLD} gloo processes, {ROWS} rows each"
        )
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compare_pair(folder: Path, options: argparse.Namespace, method: str, backend: str) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(options.repeats + 1):
        for side, results in runs.items():
            found = both_ranks(side, folder, options, method, backend)
            if turn > 0:
                results.append(found)
    ours, theirs = runs["fitune"], runs["trl"]
    row = {
        "method": f"{method}, ZeRO-3 by {backend}",
        "fitune": vs_trl.summary(ours),
        "trl": vs_trl.summary(theirs),
        "speed_ratio": median(ours, "speed") / median(theirs, "speed"),
        "cpu_speed_ratio": median(ours, "cpu_speed") / median(theirs, "cpu_speed"),
        "memory_ratio": median(ours, "peak_bytes") / median(theirs, "peak_bytes"),
        "losses_differ_by": largest_difference(ours[-1]["losses"], theirs[-1]["losses"]),
    }
    vs_trl.print_row(row)
    return row


def both_ranks(
    side: str, folder: Path, options: argparse.Namespace, method: str, backend: str
) -> dict[str, Any]:
    """One side's training on two processes; figures of both together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(WORLD)}
    words = ["--side", side, "--folder", str(folder), "--data", options.data, "--steps", str(options.steps)]
    words += ["--methods", method, "--backends", backend]
    log = folder / f"{side}.log"
    with log.open("w") as output:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *words], stdout=output, stderr=subprocess.STDOUT,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{side} ended with {codes}:\n{log.read_text()[-4000:]}")
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    return {
        "speed": found[0]["tokens"] / max(each["seconds"] for each in found),
        "cpu_speed": found[0]["tokens"] / sum(each["cpu_seconds"] for each in found),
        "peak_bytes": max(each["peak_bytes"] for each in found),
        "process_bytes": max(each["process_bytes"] for each in found),
        "first_loss": found[0]["losses"][0],
        "last_losses": statistics.fmean(found[0]["losses"][-5:]),
        "losses": found[0]["losses"],
    }


def plan_of(folder: Path, data: str, method: str, backend: str, steps: int) -> Any:
    """The planner's own choice for everything but what the comparison holds equal."""
    from fitune.planner.search import find_plan
    from fitune.recipe.recipe import canonical_keys, parse_recipe
    from fitune.units import GIB
    from fitune.values.machines.gpus import cpu_gpu, hardware_for
    from fitune.values.model.model_config import load_model_spec

    settings = {
        "model": str(folder / "model"), "tuning": method, "precision": "fp32", "data": [data],
        "seq_len": vs_trl.SEQ_LEN, "micro_batch_size": ROWS, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "learning_rate": vs_trl.RATES[method], "lr_scheduler": "constant",
        "warmup_steps": 0, "max_steps": steps, "output_dir": str(folder / "run"), "zero": 3, "backend": backend,
        "samples": 0,
    }  # fmt: skip
    recipe = parse_recipe(canonical_keys(settings, where="bench/vs_trl_ranks.py"))
    hardware = hardware_for(gpu=cpu_gpu(memory_bytes=4 * GIB, cores=1), host_memory_bytes=12 * GIB)
    hardware = replace(hardware, gpus_per_node=WORLD)
    return find_plan(recipe, model=load_model_spec(recipe.model), hardware=hardware).chosen.plan


def run_fitune(folder: Path, data: str, method: str, backend: str, steps: int) -> dict[str, Any]:
    from fitune.data.loader import Loader
    from fitune.engine.ranks import joined_ranks
    from fitune.train.loop import train
    from fitune.train.prepare import prepare

    plan = plan_of(folder, data, method, backend, steps)
    _, dataset, _ = read_data(plan)
    with joined_ranks() as ranks:
        loader = Loader(dataset, plan.batch, seed=plan.run.seed, rank=ranks.rank, world_size=ranks.world)
        meter = one_step_meter()
        ends, reports = [], []
        for report in train(plan, prepare(plan, ranks=ranks), loader, meter=meter, ranks=ranks):
            ends.append((time.perf_counter(), time.process_time()))
            reports.append(report)
            meter.wanted = report.step == MEASURED_STEP - 1
    peak = max(reports[MEASURED_STEP - 1].memory_bytes.values())
    return result(
        ends, [report.supervised_tokens for report in reports], [report.loss for report in reports], peak
    )


def run_trl(folder: Path, data: str, method: str, backend: str, steps: int) -> dict[str, Any]:
    from trl_ranks_side import train_on_ranks

    from fitune.data.loader import Loader, LoaderState

    plan = plan_of(folder, data, method, backend, steps)
    tokenizer, dataset, _ = read_data(plan)
    loaders = [
        Loader(dataset, plan.batch, seed=plan.run.seed, rank=rank, world_size=WORLD) for rank in range(WORLD)
    ]
    state, rows, tokens = LoaderState(epoch=0, position=0), [], []
    for _ in range(steps):
        batches = [loader.batch_at(state) for loader in loaders]
        tokens.append(batches[0].supervised_tokens)
        # accelerate gives whole batches to the ranks in turn
        rows += [row for batch in batches for micro in batch.micro_batches for row in micro.row_ids]
        state = loaders[0].after(state)
    examples = [dataset.row(row) for row in rows]
    watch, losses = train_on_ranks(
        plan, tokenizer, examples, folder, backend=backend, steps=steps, measured_step=MEASURED_STEP
    )
    return result(watch.ends, tokens, losses, watch.peak)


def result(
    ends: list[tuple[float, float]], tokens: list[int], losses: list[float], peak: int
) -> dict[str, Any]:
    """Figures of one rank; ``tokens`` of both."""
    import resource

    (start, start_cpu), (end, end_cpu) = ends[FIRST_TIMED_STEP - 1], ends[-1]
    return {
        "tokens": sum(tokens[FIRST_TIMED_STEP:]),
        "seconds": end - start,
        "cpu_seconds": end_cpu - start_cpu,
        "peak_bytes": peak,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
