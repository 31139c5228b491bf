"""Predicted, rehearsed and measured peak of live tensors of one rank, for every way of dividing a step over processes.

    python bench/rank_memory.py --json results/rank_memory.json     162 plans on 2 and 4 gloo processes, 54 by DeepSpeed
    python bench/rank_memory.py --worlds 2 --methods LoRA           those whose name has one of these words; with --json
                                                                    the others stay as they were seen the same day

The same small Llama, rows and meter as in cpu_memory.py, all rows on every rank. Measured is a real step, the largest
of the ranks; rehearsed the first rank's step on fake tensors and a fake group; predicted is arithmetic on the shapes.
DDP fills its buckets in C++, which fake tensors do not reach, so it is not rehearsed.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from cpu_memory import LAYERS, ROW_LENGTHS, measured_peaks, plan_of, predicted_peaks, random_rows, small_model
from cpu_methods import rehearsed_peak

from fitune.engine.fsdp import mesh_of
from fitune.engine.ranks import Ranks
from fitune.units import format_bytes
from fitune.values.plan import Ddp, Lora, Nf4, Plan, Sharding, Zero
from fitune.values.rules import keeps_rules

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
STRATEGIES: dict[str, Sharding] = {
    "DDP": Ddp(),
    "ZeRO-1": Zero(stage=1, backend="fsdp"),
    "ZeRO-2": Zero(stage=2, backend="fsdp"),
    "ZeRO-3": Zero(stage=3, backend="fsdp"),
    "hybrid ZeRO-3": Zero(stage=3, backend="fsdp", hybrid=True),
    "ZeRO-1 by DeepSpeed": Zero(stage=1, backend="deepspeed"),
    "ZeRO-2 by DeepSpeed": Zero(stage=2, backend="deepspeed"),
    "ZeRO-3 by DeepSpeed": Zero(stage=3, backend="deepspeed"),
}
METHODS: dict[str, dict[str, Any]] = {
    "full, fp32": {"tuning": "full", "precision": "fp32"},
    "full, bf16-master, 2 micro-batches": {"tuning": "full", "precision": "bf16-master", "accumulation": 2},
    "LoRA, bf16": {"tuning": "lora", "precision": "bf16"},
    "QLoRA, bf16": {"tuning": "lora", "precision": "bf16", "base": Nf4()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan and the words of its row."""

    method: str
    strategy: str
    world: int
    recomputed: int

    @property
    def plan(self) -> Plan:
        settings = dict(METHODS[self.method])
        base = settings.pop("base", None)
        plan = plan_of(small_model(), recompute=self.recomputed, chunked=True, **settings)
        if base is not None and isinstance(plan.tuning, Lora):
            plan = replace(plan, tuning=replace(plan.tuning, base=base))
        sharding = STRATEGIES[self.strategy]
        nodes = 2 if _is_hybrid(sharding) else 1
        hardware = replace(plan.hardware, nodes=nodes, gpus_per_node=self.world // nodes)
        return replace(plan, hardware=hardware, sharding=sharding)


def is_fsdp(sharding: Sharding) -> TypeGuard[Zero]:
    return isinstance(sharding, Zero) and sharding.backend == "fsdp"


def _is_hybrid(sharding: Sharding) -> bool:
    return isinstance(sharding, Zero) and sharding.hybrid


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Peaks of one plan, bytes of a rank; ``rehearsed`` None for what is not rehearsed."""

    case: Case
    predicted: int
    rehearsed: int | None
    measured: int

    @property
    def predicted_error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def rehearsed_error(self) -> float:
        return 0.0 if self.rehearsed is None else self.rehearsed / self.measured - 1


def cases(worlds: Sequence[int], words: Sequence[str]) -> Iterator[Case]:
    for world in worlds:
        for method in METHODS:
            for strategy, sharding in STRATEGIES.items():
                if _is_hybrid(sharding) and world < 4:
                    continue
                for recomputed in (0, LAYERS // 2, LAYERS):
                    case = Case(method=method, strategy=strategy, world=world, recomputed=recomputed)
                    if keeps_rules(case.plan, "train") and any(
                        word in f"{method} {strategy}" for word in words
                    ):
                        yield case


def measured_on_ranks(chosen: Sequence[Case], world: int) -> list[int]:
    """The largest peak of any rank, for every case: one group of processes measures all."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_as_rank, args=(world, list(chosen), folder), nprocs=world)
        measured: list[int] = json.loads((Path(folder) / "measured.json").read_text())
        return measured


def _as_rank(rank: int, world: int, chosen: Sequence[Case], folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    ranks = Ranks(rank=rank, world=world)
    measured = []
    for case in chosen:
        plan = case.plan
        mesh = mesh_of(plan.sharding, plan.hardware, device="cpu") if is_fsdp(plan.sharding) else None
        rows = random_rows(ROW_LENGTHS, vocab_size=plan.model.vocab_size)
        peaks = ranks.gathered(max(measured_peaks(plan, rows, mesh=mesh).values()))
        measured.append(max(peaks))
    if ranks.is_first:
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def look_at(case: Case, measured: int) -> Found:
    plan = case.plan
    rows = random_rows(ROW_LENGTHS, vocab_size=plan.model.vocab_size)
    return Found(
        case=case,
        predicted=max(predicted_peaks(plan, rows).values()),
        rehearsed=rehearsed_peak(plan, rows) if is_fsdp(plan.sharding) else None,
        measured=measured,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest |error| that is not a failure")
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="numbers of processes")
    parser.add_argument("--methods", nargs="+", default=[""], help="words of the methods and strategies")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = []
    for world in options.worlds:
        chosen = list(cases([world], options.methods))
        for case, measured in zip(chosen, measured_on_ranks(chosen, world), strict=True):
            found.append(look_at(case, measured))
            print(line_of(found[-1]), flush=True)
    figures = record(found, earlier=options.json)
    print({name: value for name, value in figures.items() if name != "rows"})
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["worst_abs_error_predicted"] <= options.tolerance else 1


def line_of(found: Found) -> str:
    case = found.case
    name = f"{case.method}, {case.strategy} × {case.world}, {case.recomputed} of {LAYERS} recomputed"
    rehearsed = "-" if found.rehearsed is None else format_bytes(found.rehearsed)
    sizes = f"{format_bytes(found.predicted):>11} {rehearsed:>11} {format_bytes(found.measured):>11}"
    return f"{name:70} {sizes} {found.predicted_error:>+8.2%} {found.rehearsed_error:>+7.2%}"


def record(found: Sequence[Found], *, earlier: Path | None) -> dict[str, Any]:
    """All figures, as results/ keeps them; plans that were not run now as they were seen ``earlier``."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    found = [*found, *_others(earlier, versions, but={one.case for one in found})]
    found.sort(key=lambda one: _ORDER.index(one.case))
    predicted = [abs(one.predicted_error) for one in found]
    rehearsed = [abs(one.rehearsed_error) for one in found if one.rehearsed is not None] or [0.0]
    return {
        "benchmark": "bench/rank_memory.py",
        "date": date.today().isoformat(),
        "versions": versions,
        "plans": len(found),
        "rehearsed": sum(one.rehearsed is not None for one in found),
        "worst_abs_error_predicted": max(predicted),
        "mean_abs_error_predicted": sum(predicted) / len(predicted),
        "worst_abs_error_rehearsed": max(rehearsed),
        "mean_abs_error_rehearsed": sum(rehearsed) / len(rehearsed),
        "rows": [
            {
                **asdict(one.case),
                "predicted": one.predicted,
                "rehearsed": one.rehearsed,
                "measured": one.measured,
            }
            for one in found
        ],
    }


_ORDER = list(cases([2, 4], [""]))


def _others(earlier: Path | None, versions: dict[str, str], *, but: set[Case]) -> list[Found]:
    """Rows of a file of the same day and libraries: figures of others do not go into one table."""
    if earlier is None or not earlier.is_file():
        return []
    content = json.loads(earlier.read_text(encoding="utf-8"))
    if content["versions"] != versions or content["date"] != date.today().isoformat():
        return []
    figures = ("predicted", "rehearsed", "measured")
    rows = [
        Found(case=Case(**{k: v for k, v in row.items() if k not in figures}), **{k: row[k] for k in figures})
        for row in content["rows"]
    ]
    return [row for row in rows if row.case not in but]


if __name__ == "__main__":
    sys.exit(main())
