"""A step under Ray costs so much more than under torchrun: the same plan by two ranks, the sides in turn.

    python bench/ray_overhead.py --apart --json results/ray_overhead_apart.json
    python bench/ray_overhead.py --json results/ray_overhead.json

A Llama of 14 M parameters with LoRA by DDP on the CPU, one thread a rank. A round is one run of each side; its
figures are the ratios of their median steps (``step_seconds`` + ``data_seconds`` in metrics.jsonl, without the first)
and of the core seconds that both ranks took for a step, and the median of the rounds counts: what the machine does
beside slows both sides of a round. What the threads of a rank take that neither train nor send is shown by itself: it
hardly depends on what else runs. The cluster is started once. Where the ranks have all cores, the clock also counts
what Ray's own processes take of them; core seconds of the ranks do not. With ``--apart`` both ranks share the first
core, on both sides, and all other processes have the others, as beside GPUs: then the clock counts what a step waits.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from fitune.demo.files import Shape, pretraining_texts, training_exercises, write_base_model

SHAPE = Shape(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    max_position_embeddings=512,
)  # fmt: skip
FIRST = 5
"""Steps that warm up."""
RANKS = {"torchrun": " go-on ", "ray": "RayTrainWorker"}
"""Side -> what stands in the command line of a rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step of one run, in seconds."""

    median: float
    of_the_cores: float
    """That both ranks took, mean of the steps."""
    beside: float
    """Of those, what other threads took than the one that trains and those of gloo."""


def ranks_of(side: str) -> list[psutil.Process]:
    """Processes of the ranks below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if RANKS[side] in " ".join(process.cmdline()):
                found.append(process)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of a core that the ranks below this process have taken so far."""

    whole: float
    threads: dict[int, dict[int, float]]
    """Of each thread but gloo's, by process and thread."""

    def beside(self, before: "Taken") -> float:
        """Since then, of all threads but the busiest of each process."""
        since = [
            [taken - before.threads.get(process, {}).get(thread, 0.0) for thread, taken in threads.items()]
            for process, threads in self.threads.items()
        ]
        return sum(sum(each) - max(each, default=0.0) for each in since)


def core_seconds(side: str) -> Taken:
    whole, threads = 0.0, {}
    for process in ranks_of(side):
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            whole += times.user + times.system
            threads[process.pid] = {
                thread.id: thread.user_time + thread.system_time
                for thread in process.threads()
                if "gloo" not in Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text()
            }
    return Taken(whole, threads)


def keep_on_first_core(side: str) -> None:
    """Every thread of the ranks; threads that they start later stay there, too."""
    for process in ranks_of(side):
        with suppress(psutil.Error, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {0})


def train(
    side: str, work: Path, number: int, *, steps: int, tokens: int, address: str, is_apart: bool
) -> Step:
    folder = work / f"{side}{number}"
    settings = {
        "model": work / "model", "data": work / "rows.jsonl", "tuning": "lora", "lora_r": 8, "precision": "fp32",
        "gpu": "cpu", "gpus": 2, "zero": 0, "seq_len": tokens, "micro_batch_size": 2, "packing": True,
        "gradient_accumulation_steps": 1, "max_steps": FIRST + steps, "save_steps": 0, "samples": 0,
        "output_dir": folder,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    if side == "ray":
        words += ["--on", "ray", "--ray-address", address, "--workers", "2"]
    running = subprocess.Popen(
        [sys.executable, "-m", "fitune", "train", *words], stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics, taken = folder / "metrics.jsonl", dict[int, Taken]()
    while running.poll() is None:
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if is_apart and done < FIRST:
            keep_on_first_core(side)
        if FIRST <= done < FIRST + steps:  # in the last step a rank may end before it is asked
            taken.setdefault(done, core_seconds(side))
        time.sleep(0.02)
    if running.returncode:
        raise SystemExit(f"{side}: exit code {running.returncode}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = min(taken), max(taken)
    return Step(
        statistics.median(line["step_seconds"] + line["data_seconds"] for line in lines[FIRST:]),
        (taken[last].whole - taken[first].whole) / (last - first),
        taken[last].beside(taken[first]) / (last - first),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that are counted")
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--apart", action="store_true", help="both ranks on the first core, all else on the others"
    )
    wanted = parser.parse_args()
    if wanted.apart:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})  # and of all that is started here
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    from fitune.launch.ray_cluster import loaded_ray

    ray = loaded_ray()
    found: dict[str, list[Step]] = {"torchrun": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        write_base_model(work / "model", pretraining_texts(50, seed=0), shape=SHAPE, seed=0)
        rows = (json.dumps(each) for each in training_exercises(2_000, seed=0))
        (work / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        context = ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20
        )
        try:
            for number in range(wanted.rounds):
                sides = list(found) if number % 2 == 0 else list(found)[::-1]
                for side in sides:
                    took = train(
                        side, work, number, steps=wanted.steps, tokens=wanted.tokens,
                        address=context.address_info["address"], is_apart=wanted.apart,
                    )  # fmt: skip
                    found[side].append(took)
                    print(
                        f"{side:9} {took.median * 1e3:8.1f} ms a step, {took.of_the_cores * 1e3:8.1f} ms of the cores, "
                        f"{took.beside * 1e3:.1f} of them in threads beside the training",
                        flush=True,
                    )
        finally:
            ray.shutdown()
    pairs = list(zip(found["ray"], found["torchrun"], strict=True))
    clock = [mine.median / theirs.median - 1 for mine, theirs in pairs]
    cores = [mine.of_the_cores / theirs.of_the_cores - 1 for mine, theirs in pairs]
    threads = [mine.beside / theirs.of_the_cores for mine, theirs in pairs]
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "ray")},
        "cores": os.cpu_count(),
        "ranks_on_one_core": wanted.apart,
        "seconds_of_a_step": {
            side: [dataclasses.asdict(step) for step in steps] for side, steps in found.items()
        },
        "overhead_of_rounds": {"clock": clock, "core_seconds_of_ranks": cores, "threads_of_ray": threads},
        "overhead": {
            "clock": statistics.median(clock),
            "core_seconds_of_ranks": statistics.median(cores),
            "threads_of_ray": statistics.median(threads),
        },
    }
    print(
        f"Ray over torchrun: {statistics.median(clock):+.1%} by the clock of {os.cpu_count()} cores, ", end=""
    )
    print(
        f"{statistics.median(cores):+.1%} in core seconds of the ranks; threads beside the training take ",
        end="",
    )
    print(f"{statistics.median(threads):.1%} of them")
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
