"""Time of a step and bytes that a rank sends in it, for every strategy on 1, 2 and 4 gloo processes.

    python bench/scaling.py --json results/scaling.json

The small Llama of cpu_memory.py with a vocabulary of 256, full fine-tuning in fp32, the same rows on every rank: more
processes do more rows. Strategies of torch: DeepSpeed's are not among them.
Bytes are counted as torch's collectives run, as a ring sends them, and held against the estimate's. Time is the median
of the steps after those that warm up; a rank's part in collectives is the rest of what it was busy. With more processes
than cores, ranks wait for a core, so their times are no measure of scaling there.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from cpu_memory import CONFIG as LARGER
from cpu_memory import LAYERS, ROW_LENGTHS, plan_of, random_rows
from rank_memory import STRATEGIES
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.engine.fsdp import mesh_of
from fitune.engine.ranks import Ranks
from fitune.estimate.transfers import communication_of
from fitune.measure.communication import waits_measured
from fitune.train.prepare import prepare_loaded
from fitune.units import MIB
from fitune.values.model.model_config import spec_from_config
from fitune.values.plan import Ddp, Plan, Zero

STEPS, WARM = 12, 3
CONFIG = {**LARGER, "vocab_size": 256}  # most of it are blocks, as in large models


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Means of the ranks of one strategy; bytes of one rank in one step."""

    strategy: str
    world: int
    step_seconds: float
    collective_seconds: float | None
    counted_bytes: int
    predicted_bytes: int
    calls: dict[str, int]
    load: float
    """Processes that wanted a core when it began, on average over a minute."""

    def __str__(self) -> str:
        waited = (
            "" if self.collective_seconds is None else f", {1e3 * self.collective_seconds:.1f} in collectives"
        )
        sent = f"{self.counted_bytes / MIB:.2f} MiB sent, {self.predicted_bytes / MIB:.2f} predicted"
        return f"{self.strategy:14} × {self.world}  {1e3 * self.step_seconds:7.1f} ms{waited}; {sent}; {self.calls}"


def plan_for(strategy: str, world: int) -> Plan:
    plan = plan_of(
        spec_from_config(CONFIG, name="bench/llama"),
        tuning="full",
        precision="fp32",
        recompute=0,
        chunked=True,
    )
    if world == 1:
        return plan
    sharding = STRATEGIES[strategy]
    nodes = 2 if strategy.startswith("hybrid") else 1
    hardware = replace(plan.hardware, nodes=nodes, gpus_per_node=world // nodes)
    return replace(plan, hardware=hardware, sharding=sharding)


def strategies(world: int) -> Iterator[str]:
    if world == 1:
        yield "one process"
        return
    for strategy, sharding in STRATEGIES.items():
        has_nodes = world >= 4 or not strategy.startswith("hybrid")
        if has_nodes and (isinstance(sharding, Ddp) or getattr(sharding, "backend", "") == "fsdp"):
            yield strategy


def measured(world: int) -> list[Found]:
    """Every strategy on ``world`` processes, which stay the same."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_as_rank, args=(world, folder), nprocs=world)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
        return [Found(**row) for row in rows]


def _as_rank(rank: int, world: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    ranks = Ranks(rank=rank, world=world)
    found = [asdict(_look_at(strategy, ranks)) for strategy in strategies(world)]
    if ranks.is_first:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _look_at(strategy: str, ranks: Ranks) -> Found:
    load = os.getloadavg()[0]
    plan = plan_for(strategy, ranks.world)
    mesh = mesh_of(plan.sharding, plan.hardware, device="cpu") if isinstance(plan.sharding, Zero) else None
    rows = random_rows(ROW_LENGTHS, vocab_size=plan.model.vocab_size)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
    engine = prepare_loaded(model, plan, mesh=mesh).engine
    supervised = rows.supervised_tokens * ranks.world

    def step() -> None:
        engine.forward_backward(rows, divisor=supervised, enter_phase=lambda phase: None)
        engine.update(learning_rate=1e-4, enter_phase=lambda phase: None)

    for _ in range(WARM):
        step()
    with Collectives() as sent:
        step()
    seconds, waited = [], []
    with waits_measured() as waits:
        for _ in range(STEPS):
            ranks.summed([0.0])
            if waits is not None:
                waits.take()
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
            waited.append(0.0 if waits is None else waits.take())
    of_all = ranks.gathered((statistics.median(seconds), statistics.median(waited)))
    return Found(
        strategy=strategy,
        world=ranks.world,
        step_seconds=statistics.fmean(one for one, _ in of_all),
        collective_seconds=None if ranks.is_alone else statistics.fmean(one for _, one in of_all),
        counted_bytes=round(sent.total_bytes),
        predicted_bytes=communication_of(plan).total_bytes,
        calls=dict(sorted(sent.calls.items())),
        load=round(load, 2),
    )


class Collectives(TorchDispatchMode):
    """Counts the collectives of tensors that run inside, by kind: all-reduce, all-gather, reduce-scatter, broadcast;
    and ``total_bytes``, which this rank sends in them as a ring does.

    A ring of n sends (n−1)/n of a buffer to gather or to reduce-scatter it, and twice that to all-reduce it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.total_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        kind = next((kind for sign, kind in KINDS.items() if operation.startswith(sign)), operation)
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        n = dist.ProcessGroup.unbox(group).size()
        tensors = [each for arg in args[:2] for each in (arg if isinstance(arg, list) else [arg])]
        sizes = [t.nbytes for t in tensors if isinstance(t, torch.Tensor)]
        whole = sum(sizes) if kind in ("all-reduce", "broadcast") else max(sizes, default=0)
        self.calls[kind] += 1
        self.total_bytes += whole * (n - 1) / n * (2 if kind == "all-reduce" else 1)


KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
}
"""Beginnings of torch's names."""


def record(found: Sequence[Found]) -> dict[str, Any]:
    """All figures, as results/ keeps them."""
    sent = {(one.strategy, one.world): one.counted_bytes for one in found}
    ratios = {
        world: sent["ZeRO-3", world] / sent["DDP", world]
        for world in {one.world for one in found}
        if world > 1
    }
    return {
        "benchmark": "bench/scaling.py",
        "date": date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "cores": len(os.sched_getaffinity(0)),
        "model": {"blocks": LAYERS, **CONFIG},
        "rows_of_a_rank": list(ROW_LENGTHS),
        "zero3_bytes_by_ddp_bytes": ratios,
        "rows": [asdict(one) for one in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--tolerance", type=float, default=0.01, help="largest error of the bytes predicted")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = []
    for world in options.worlds:
        for one in measured(world):
            found.append(one)
            print(one, flush=True)
    figures = record(found)
    print({name: value for name, value in figures.items() if name != "rows"})
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    errors = [one.predicted_bytes / one.counted_bytes - 1 for one in found if one.counted_bytes]
    return 0 if max(map(abs, errors), default=0.0) <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
