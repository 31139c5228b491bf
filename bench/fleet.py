"""The time to rank a fleet: 12 clusters × 3 recipes, wall clock and processor, from read files to the printed text.

python bench/fleet.py
"""

import resource
import tempfile
import time
from pathlib import Path

from fitune.recipe.recipe import parse_recipe
from fitune.session.clusters.fleet import FleetRequest, plan_on_fleet
from fitune.session.results import text_of

CLUSTERS = [
    ("v100-32gb", 8, 1), ("v100-16gb", 8, 1), ("a100-40gb", 8, 1), ("a100-80gb", 8, 1), ("a100-80gb", 8, 2),
    ("h100", 8, 1), ("h100", 8, 2), ("h200", 8, 1), ("l40s", 4, 1), ("a10g", 4, 1), ("rtx-4090", 2, 1), ("l4", 4, 1),
]  # fmt: skip
RECIPES = [
    {"model": "meta-llama/Llama-3.1-8B", "tuning": "lora"},
    {"model": "meta-llama/Llama-3.1-70B", "tuning": "lora"},
    {"model": "meta-llama/Llama-3.1-70B", "tuning": "qlora"},
]
MOST_SECONDS = 3.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.yaml"
        lines = [
            f"  - {{name: c{number}, gpu: {gpu}, gpus: {gpus}, nodes: {nodes}, price: {1 + number / 10}}}\n"
            for number, (gpu, gpus, nodes) in enumerate(CLUSTERS)
        ]
        file.write_text("clusters:\n" + "".join(lines))
        began, used = time.perf_counter(), processor_seconds()
        for settings in RECIPES:
            recipe = parse_recipe({**settings, "seq_len": 4096, "packing": True})
            one = time.perf_counter()
            text = text_of(plan_on_fleet(recipe, FleetRequest(file, rows=50_000)))
            seconds, lines = time.perf_counter() - one, len(text.splitlines())
            print(f"{settings['model']} {settings['tuning']}: {seconds:.2f} s, {lines} lines")
        wall = time.perf_counter() - began
        print(
            f"{len(CLUSTERS)} clusters × {len(RECIPES)} recipes: {wall:.2f} s, {processor_seconds() - used:.2f} s of "
            f"processors; wanted: {MOST_SECONDS:g} s"
        )


def processor_seconds() -> float:
    """Of this process and of those it started."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


if __name__ == "__main__":
    main()
