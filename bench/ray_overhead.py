"""A step under Ray costs so much more than under torchrun: the same plan by two ranks, the sides in turn.

    python bench/ray_overhead.py --json results/ray_overhead.json

A Llama of 14 M parameters with LoRA by DDP on the CPU, one thread a rank. A round is one run of each side; its
figure is the ratio of their median steps (``step_seconds`` + ``data_seconds`` in metrics.jsonl, without the first), and
the median of the rounds counts: what the machine does beside slows both sides of a round. The cluster is started once.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fitune.demo.files import Shape, write_base_model
from fitune.demo.text import pretraining_texts, training_exercises

SHAPE = Shape(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    max_position_embeddings=512,
)  # fmt: skip
FIRST = 5
"""Steps that warm up."""


def train(side: str, work: Path, number: int, *, steps: int, tokens: int, address: str) -> float:
    """The median step of one run, in seconds."""
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
    subprocess.run(
        [sys.executable, "-m", "fitune", "train", *words], check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_seconds"] + line["data_seconds"] for line in lines[FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that are counted")
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    from fitune.launch.ray_cluster import loaded_ray

    ray = loaded_ray()
    found: dict[str, list[float]] = {"torchrun": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        write_base_model(work / "model", pretraining_texts(50, seed=0), shape=SHAPE, seed=0)
        rows = (json.dumps(dataclasses.asdict(each)) for each in training_exercises(2_000, seed=0))
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
                        address=context.address_info["address"],
                    )  # fmt: skip
                    found[side].append(took)
                    print(f"{side:9} {took * 1e3:8.1f} ms a step", flush=True)
        finally:
            ray.shutdown()
    ratios = [mine / theirs for mine, theirs in zip(found["ray"], found["torchrun"], strict=True)]
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "ray")},
        "median_step_seconds": found,
        "overhead_of_rounds": [ratio - 1 for ratio in ratios],
        "overhead": statistics.median(ratios) - 1,
    }
    print(f"Ray over torchrun: {result['overhead']:+.1%}")
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
