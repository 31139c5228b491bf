"""A checkpoint of 1 GB costs the loop so much: written between two steps, and beside the next ones from a copy.

    python bench/async_save.py --json results/async_save.json    three sides in turn: no save, between, beside

A Llama of 85 M parameters in fp32 with AdamW on the CPU: 12 bytes a parameter, 1.02 GB a checkpoint. Every side
trains by fitune's own run; the loop's seconds are those between the end of the 2nd step and that of the 12th, with a
save after the 6th, the first one: its copy makes the room that later ones find. On a GPU the copy goes over PCIe and
the writing takes cores that the steps do not need; here the copy, the hash and the write share the cores and the
memory with the steps.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fitune.demo.files import pretraining_texts, training_exercises, write_base_model
from fitune.planner.search import find_plan
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.train.current import Callbacks
from fitune.train.run import run
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Plan
from fitune.values.reports import StepReport

SHAPE = dict(
    vocab_size=512, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
    max_position_embeddings=512,
)  # fmt: skip
BEGIN, SAVE_EVERY, END = 2, 6, 12
SIDES: dict[str, dict[str, Any]] = {
    "none": {"save_steps": 0},
    "between": {"save_steps": SAVE_EVERY, "async_save": False},
    "beside": {"save_steps": SAVE_EVERY, "async_save": True},
}


class Clock:
    """The moment at which each step's report came."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def start(self, plan: Plan, name: str) -> None: ...

    def step(self, report: StepReport) -> None:
        self.at[report.step] = time.perf_counter()

    def finish(self, report: object) -> None: ...

    @property
    def seconds(self) -> float:
        return self.at[END] - self.at[BEGIN]


def plan_of(side: str, work: Path, tokens: int) -> Plan:
    settings = {
        "model": str(work / "model"), "data": [str(work / "rows.jsonl")], "precision": "fp32", "tuning": "full",
        "seq_len": tokens, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "packing": True,
        "max_steps": END + 1, "samples": 0, "keep_checkpoints": 1, "output_dir": str(work / side), **SIDES[side],
    }  # fmt: skip
    recipe = parse_recipe(canonical_keys(settings, where="bench/async_save.py"))
    hardware = hardware_for(
        gpu=cpu_gpu(memory_bytes=12 * GIB, cores=os.cpu_count() or 1), host_memory_bytes=12 * GIB
    )
    return find_plan(recipe, model=load_model_spec(recipe.model), hardware=hardware).chosen.plan


def loop_seconds(side: str, work: Path, tokens: int) -> tuple[float, int]:
    """Seconds of the loop, and bytes of the last checkpoint; the run is stopped behind the last step that counts."""
    clock = Clock()
    callbacks = Callbacks(
        on_data=lambda data, loader, done: None,
        on_note=lambda note: None,
        stop_asked=lambda: END in clock.at,
        answer=lambda model, conversations: ["" for _ in conversations],
    )
    report = run(plan_of(side, work, tokens), callbacks=callbacks, sinks=[clock])
    assert report.status == "interrupted"
    saved = work / side / "checkpoints/latest"
    size = sum(file.stat().st_size for file in saved.iterdir())
    shutil.rmtree(work / side)
    return clock.seconds, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(wanted.threads)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    size = 0
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        work = Path(folder)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        write_base_model(work / "model", pretraining_texts(50, seed=0), shape=SHAPE, seed=0)
        rows = (json.dumps(each) for each in training_exercises(2_000, seed=0))
        (work / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        for number in range(wanted.rounds):
            order = list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]
            for side in order:
                took, size = loop_seconds(side, work, wanted.tokens)
                seconds[side].append(took)
                print(f"round {number + 1}, {side}: {took:.2f} s", flush=True)
    result = figures(seconds, size)
    words = {"date": date.today().isoformat(), "cores": os.cpu_count(), "threads": wanted.threads}
    print(json.dumps({**words, "tokens": wanted.tokens, **result}, indent=1))
    if wanted.json is not None:
        wanted.json.write_text(json.dumps({**words, "tokens": wanted.tokens, **result}, indent=1) + "\n")


def figures(seconds: dict[str, list[float]], checkpoint_bytes: int) -> dict[str, Any]:
    """What the saves cost the loop: seconds a save, share of the loop, and the two ways' ratio."""
    none, between, beside = (statistics.median(seconds[side]) for side in SIDES)
    saves = len(range(SAVE_EVERY, END, SAVE_EVERY))
    return {
        "checkpoint_bytes": checkpoint_bytes,
        "seconds": seconds,
        "step_seconds": none / (END - BEGIN),
        "seconds_a_save_between": (between - none) / saves,
        "seconds_a_save_beside": (beside - none) / saves,
        "share_of_loop_between": between / none - 1,
        "share_of_loop_beside": beside / none - 1,
        "beside_to_between": (beside - none) / (between - none),
    }


if __name__ == "__main__":
    main()
