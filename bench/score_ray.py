"""Rows answered in a second by two workers on Ray against one, one thread each; printed with their ratio.

    python bench/score_ray.py [--rows 1024] [--hidden 192] [--new 24] [--rounds 3]

The clock begins when a quarter of the rows is done, so that all workers have loaded the model, and ends with the
last. Sides take turns, and the medians count. Rows a second of the workers' core time are printed, too: on a busy
machine they say what the clock cannot.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from fitune.demo.files import Shape, pretraining_texts, training_exercises, write_base_model
from fitune.launch.ray_cluster import RayPlace, loaded_ray
from fitune.recipe.score_recipe import score_recipe
from fitune.session.events import Event, RowsAnswered
from fitune.session.score.scoring import score_dataset


class Clock:
    """A Tell that notes rows, time and the workers' core time when a quarter is done, and at the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, float, float]] = []

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RowsAnswered):
            return
        if event.done == event.total or (not self.marks and event.done >= event.total // 4):
            self.marks.append((event.done, time.perf_counter(), core_seconds()))

    def rates(self) -> tuple[float, float]:
        """Rows a second, and rows a second of core time."""
        (rows, began, used), (all_rows, ended, used_then) = self.marks[0], self.marks[-1]
        return (all_rows - rows) / (ended - began), (all_rows - rows) / (used_then - used)


def core_seconds() -> float:
    """User and system time of the actors that score."""
    found = (process for process in psutil.process_iter(["name", "cmdline"]))
    times = [
        process.cpu_times()
        for process in found
        if any("ScoringWorker" in word for word in process.info["cmdline"] or [])
    ]
    return sum(each.user + each.system for each in times)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 1024), ("hidden", 192), ("new", 24), ("rounds", 3)):
        words.add_argument(f"--{name}", type=int, default=default)
    asked = words.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    shape = Shape(
        vocab_size=512, hidden_size=asked.hidden, intermediate_size=3 * asked.hidden, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        write_base_model(work / "model", pretraining_texts(50, seed=0), shape=shape, seed=0)
        rows = [
            {"id": number, "prompt": row["prompt"], "completion": row["completion"]}
            for number, row in enumerate(training_exercises(asked.rows, seed=0))
        ]
        (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ray = loaded_ray()
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=80 * 2**20,
        )  # fmt: skip
        try:
            for number in range(asked.rounds):
                for workers in sorted(found, reverse=bool(number % 2)):
                    clock = Clock()
                    score_dataset(
                        score_recipe(
                            model=str(work / "model"),
                            data=str(work / "rows.jsonl"),
                            out=work / f"out{workers}-{number}",
                            graders=["contains"],
                            max_new_tokens=asked.new,
                            batch_size=4,
                        ),
                        emit=clock,
                        place=RayPlace(fewest=workers, most=workers),
                    )
                    found[workers].append(clock.rates())
                    wall, core = found[workers][-1]
                    print(
                        f"{workers} worker(s): {wall:.1f} rows/s, {core:.1f} rows/s of core time", flush=True
                    )
        finally:
            ray.shutdown()
    one, two = (
        [statistics.median(rates) for rates in zip(*found[workers], strict=True)] for workers in (1, 2)
    )
    print(f"two workers against one: {two[0] / one[0]:.2f} by the clock, {two[1] / one[1]:.2f} a core second")


if __name__ == "__main__":
    main()
