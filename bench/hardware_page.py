"""What fits on which cards, and how fast: writes docs/hardware.md from the planner alone.

python bench/hardware_page.py [PAGE.md]
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import NothingFits
from fitune.recipe.recipe import parse_recipe
from fitune.session.planning import plan_for
from fitune.units import format_dollars
from fitune.values.predictions import Priced

MODELS = (
    "Qwen/Qwen2.5-1.5B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-14B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
)
TUNINGS = ("full", "lora", "qlora")


@dataclass(frozen=True)
class Machine:
    title: str
    gpu: str
    gpus: int
    nodes: int = 1


MACHINES = (
    Machine("RTX 3060 12 GB", "rtx-3060", 1),
    Machine("T4 16 GB", "t4", 1),
    Machine("RTX 3090", "rtx-3090", 1),
    Machine("RTX 4090", "rtx-4090", 1),
    Machine("2 × RTX 4090", "rtx-4090", 2),
    Machine("RTX 5090", "rtx-5090", 1),
    Machine("8 × V100 32 GB", "v100-32gb", 8),
    Machine("A100 80 GB", "a100-80gb", 1),
    Machine("H100", "h100", 1),
    Machine("8 × H100", "h100", 8),
    Machine("2 nodes of 8 × H100", "h100", 8, 2),
)
INTRODUCTION = """# Hardware: what fits on which cards, and how fast?

Made by `bench/hardware_page.py` from the planner: rows of 2,048 tokens, every other choice open, the fastest plan that
fits and trains. A cell is tokens/s of all cards together and US dollars for a million tokens, at the prices that
`fitune plan` assumes; speeds come from datasheets and were never measured by fitune on a GPU. `↓` keeps weights or
optimizer in the host's memory, which is taken to be twice that of the cards; `–` does not fit. Qwen2.5-1.5B,
Llama-3.2-3B, 3.1-8B, 3.1-70B and 3.1-405B, Qwen2.5-14B and 32B and Qwen3-30B-A3B were planned; a model without a row
fits by no method.
"""


def planned(model: str, tuning: str, machine: Machine) -> tuple[Priced, float] | None:
    """The plan that fits with its dollars for a GPU-hour."""
    words = {
        "model": model,
        "tuning": tuning,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "nodes": machine.nodes,
        "seq_len": 2048,
    }
    try:
        report = plan_for(parse_recipe(words, where="bench"), purposes=("plan", "train"))
    except NothingFits:
        return None
    return report.chosen, report.price_per_gpu_hour


def cell(found: tuple[Priced, float] | None) -> str:
    if found is None:
        return "–"
    priced, price = found
    plan, speed = priced.plan, priced.estimate.tokens_per_second
    away = "↓ " if plan.offload.parameters != "device" or plan.offload.optimizer != "device" else ""
    cost = f" · {format_dollars(1e6 / speed / 3600 * price * plan.hardware.num_gpus)}" if price else ""
    return f"{away}{speed:,.0f}{cost}"


def main() -> None:
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/hardware.md").absolute()
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FITUNE_CACHE"] = folder  # without what was measured on this machine
        for machine in MACHINES:
            cells = {model: [cell(planned(model, tuning, machine)) for tuning in TUNINGS] for model in MODELS}
            fits = {model: row for model, row in cells.items() if set(row) != {"–"}}
            rows = [f"| {model.partition('/')[2]} | {' | '.join(row)} |" for model, row in fits.items()]
            parts.append(
                "\n".join(
                    [f"## {machine.title}", f"| | {' | '.join(TUNINGS)} |", "|---|---:|---:|---:|", *rows, ""]
                )
            )
    page.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
