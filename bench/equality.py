"""Every way of dividing a step over processes trains the model of one: losses, gradient norms and weights side by side.

    python bench/equality.py --json results/equality.json    full, LoRA and QLoRA × DDP, ZeRO-1/2/3, hybrid × 2 and 4
                                                              gloo processes, then runs that go on under another way

A small Llama with tied embeddings in fp32, twelve steps of eight rows, two micro-batches a rank. Each way trains by
fitune's own run, from the plan to the exported weights. The largest difference to one process is written down: of the
loss of a step, of a gradient norm (as a share), of an exported weight.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from safetensors.torch import load_file

from fitune.demo.files import Shape, pretraining_texts, training_exercises, write_base_model
from fitune.engine.ranks import ALONE, Ranks, joined_ranks
from fitune.planner.search import find_plan
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.track.metrics import read_metrics
from fitune.train.current import Callbacks
from fitune.train.run import run
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Ddp, Plan, Sharding, Single, Zero
from fitune.values.reports import StepReport

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
SHAPE = Shape(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=512,
)  # fmt: skip
STEPS, ROWS, STOPPED_AFTER = 12, 8, 4
METHODS: dict[str, dict[str, Any]] = {
    "full": {"tuning": "full", "learning_rate": 1e-3},
    "LoRA": {"tuning": "lora", "learning_rate": 5e-3},
    "QLoRA": {"tuning": "qlora", "learning_rate": 5e-3},
}
ALONE_WORDS = "one process"
STRATEGIES: dict[str, Sharding] = {
    ALONE_WORDS: Single(),
    "DDP": Ddp(),
    "ZeRO-1": Zero(stage=1, backend="fsdp"),
    "ZeRO-2": Zero(stage=2, backend="fsdp"),
    "ZeRO-3": Zero(stage=3, backend="fsdp"),
    "ZeRO-2, hybrid": Zero(stage=2, backend="fsdp", hybrid=True),
    "ZeRO-3, hybrid": Zero(stage=3, backend="fsdp", hybrid=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A run, or the part of one until it is stopped or resumed."""

    method: str
    strategy: str
    world: int
    folder: str
    stop_after: int = 0
    resume: bool = False

    @property
    def words(self) -> str:
        return self.strategy if self.world == 1 else f"{self.strategy} × {self.world}"


CHAINS = (
    (("ZeRO-3", 2), (ALONE_WORDS, 1), ("ZeRO-3", 4)),
    (("ZeRO-3", 2), ("DDP", 2)),
    (("DDP", 2), ("ZeRO-2", 2)),
    (("ZeRO-1", 4), ("ZeRO-3, hybrid", 4)),
    ((ALONE_WORDS, 1), ("DDP", 4)),
)
"""Ways under which one run goes on; each but the last is stopped after four steps more."""


def legs() -> Iterator[Leg]:
    for method in METHODS:
        for strategy, sharding in STRATEGIES.items():
            hybrid = isinstance(sharding, Zero) and sharding.hybrid
            worlds = [1] if isinstance(sharding, Single) else [4] if hybrid else [2, 4]
            for world in worlds:
                yield Leg(
                    method=method, strategy=strategy, world=world, folder=f"{method} {strategy} {world}"
                )


def legs_of_chains(turn: int) -> Iterator[Leg]:
    """The part number ``turn`` of every chain that has so many, for full and LoRA."""
    for method in ("full", "LoRA"):
        for number, chain in enumerate(CHAINS):
            if turn < len(chain):
                strategy, world = chain[turn]
                yield Leg(
                    method=method, strategy=strategy, world=world, folder=f"{method} chain {number}",
                    stop_after=0 if turn == len(chain) - 1 else STOPPED_AFTER, resume=turn > 0,
                )  # fmt: skip


def plan_of(leg: Leg, work: Path) -> Plan:
    """The recipe's plan for one process, divided over ``leg``'s: as many rows in a step."""
    settings = {
        "model": str(work / "model"), "data": [str(work / "rows.jsonl")], "precision": "fp32", "lora_r": 8,
        "seq_len": 128, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS, "samples": 0,
        "val_fraction": 0.05, "eval_steps": STEPS, "output_dir": str(work / leg.folder), **METHODS[leg.method],
    }  # fmt: skip
    recipe = parse_recipe(canonical_keys(settings, where="bench/equality.py"))
    hardware = hardware_for(gpu=cpu_gpu(memory_bytes=4 * GIB, cores=1), host_memory_bytes=4 * GIB)
    plan = find_plan(recipe, model=load_model_spec(recipe.model), hardware=hardware).chosen.plan
    sharding = STRATEGIES[leg.strategy]
    nodes = 2 if isinstance(sharding, Zero) and sharding.hybrid else 1
    return replace(
        plan,
        sharding=sharding,
        hardware=replace(hardware, nodes=nodes, gpus_per_node=leg.world // nodes),
        batch=replace(plan.batch, micro_batch_size=ROWS // leg.world // 2, accumulation=2),
    )


def write_inputs(work: Path) -> None:
    write_base_model(work / "model", pretraining_texts(600, seed=0), shape=SHAPE, seed=0)
    rows = (json.dumps(each) for each in training_exercises(120, seed=0))
    (work / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def train_all(chosen: Sequence[Leg], work: Path) -> None:
    """One group of processes for each world size, smallest first, trains its legs one after the other."""
    for world in sorted({leg.world for leg in chosen}):
        mine = [leg for leg in chosen if leg.world == world]
        print(f"{len(mine)} runs by {world}", flush=True)
        if world == 1:
            _train_each(mine, work, ALONE)
        else:
            processes.spawn(_as_rank, args=(world, mine, work), nprocs=world)


def _as_rank(rank: int, world: int, mine: Sequence[Leg], work: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_PORT + world),
    )  # fmt: skip
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with joined_ranks() as ranks:
        _train_each(mine, work, ranks)


_PORT = 29_610


def _train_each(mine: Sequence[Leg], work: Path, ranks: Ranks) -> None:
    for leg in mine:
        report = run(
            plan_of(leg, work), callbacks=_callbacks(leg.stop_after), resume=leg.resume, overwrite=not leg.resume,
            ranks=ranks,
        )  # fmt: skip
        expected = "interrupted" if leg.stop_after else "complete"
        assert report.status == expected, f"{leg.folder}: {report.status}, {report.reason}"


def _callbacks(stop_after: int) -> Callbacks:
    asked = [0]

    def stop_asked() -> bool:
        asked[0] += 1
        return asked[0] == stop_after

    return Callbacks(
        on_data=lambda data, loader, done: None,
        on_note=lambda note: None,
        stop_asked=stop_asked,
        answer=lambda model, conversations: ["" for _ in conversations],
    )


def compared(folder: Path, alone: Path) -> dict[str, float]:
    """The largest difference of any step's loss (nats), of any gradient norm (a share), of any exported weight."""
    ours, theirs = (list(read_metrics(each / "metrics.jsonl")) for each in (folder, alone))
    assert [step.step for step in ours] == [step.step for step in theirs] == list(range(1, STEPS + 1))
    return {
        "loss": max(abs(a.loss - b.loss) for a, b in zip(ours, theirs, strict=True)),
        "gradient_norm": max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(ours, theirs, strict=True)),
        "held_out_loss": abs(_held_out(ours) - _held_out(theirs)),
        "weight": _weights_apart(folder, alone),
    }


def _held_out(steps: Sequence[StepReport]) -> float:
    loss = steps[-1].eval_loss
    assert loss is not None
    return loss


def _weights_apart(folder: Path, alone: Path) -> float:
    [file] = [*alone.glob("adapter/*.safetensors"), *alone.glob("model/*.safetensors")]
    theirs, ours = load_file(file), load_file(folder / file.relative_to(alone))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def table(work: Path) -> list[dict[str, Any]]:
    rows = []
    for leg in legs():
        if leg.world > 1:
            found = compared(work / leg.folder, work / f"{leg.method} {ALONE_WORDS} 1")
            rows.append({"method": leg.method, "strategy": leg.strategy, "world": leg.world, **found})
    return rows


def table_of_chains(work: Path) -> list[dict[str, Any]]:
    rows = []
    for method in ("full", "LoRA"):
        for number, chain in enumerate(CHAINS):
            words = [
                Leg(method=method, strategy=strategy, world=world, folder="").words
                for strategy, world in chain
            ]
            found = compared(work / f"{method} chain {number}", work / f"{method} {ALONE_WORDS} 1")
            rows.append({"method": method, "chain": words, **found})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference of a loss, nats")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        write_inputs(work)
        train_all(list(legs()), work)
        for turn in range(max(map(len, CHAINS))):
            train_all(list(legs_of_chains(turn)), work)
        strategies, chains = table(work), table_of_chains(work)
    figures = {
        "benchmark": "bench/equality.py",
        "date": date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "steps": STEPS,
        "largest_loss_difference": max(row["loss"] for row in [*strategies, *chains]),
        "strategies": strategies,
        "resumed": chains,
    }
    for row in [*strategies, *chains]:
        print(row)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["largest_loss_difference"] <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
