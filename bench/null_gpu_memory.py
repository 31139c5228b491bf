"""Predicted, rehearsed, allocated and reserved bytes of plans' real steps on the null GPU (tests/null_gpu/README.md).

    python bench/null_gpu_memory.py --out results                 every method, model and card
    python bench/null_gpu_memory.py --slack --out results         60 micro-batches of equal and of mixed lengths
    python bench/null_gpu_memory.py --ranks 2 --cards 90 --shapes 8b-4 --out results                   by FSDP2
    tests/null_gpu/run.sh python bench/null_gpu_memory.py --here --cards 90 --shapes 8b --cases lora --out seen

The models stand whole, at their real widths and depths: device memory is address space, kernels do nothing. Every card
is given 1 TiB, so that each method runs on each; what fits where is for a plan to say. Kernels that do nothing leave
what they should have counted as it was: the number of supervised tokens is put in the place of ``nonzero``.
"""

import argparse
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import torch.distributed as dist
from cpu_memory import random_rows
from gpu_cases import CASES, SHAPES, Case, Shape, config_of, plan_of, versions
from gpu_memory import measure
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fitune.engine.fsdp import mesh_of
from fitune.errors import TrainingFailed
from fitune.estimate.division import uses_deepspeed
from fitune.estimate.predict import predict_memory
from fitune.models.language_model import blocks_of
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.readers import empty_model
from fitune.models.weights import compute_dtype
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import peaks_by_kind, reserved_peak
from fitune.train.prepare import Prepared, prepare_loaded
from fitune.units import GIB, MIB
from fitune.values.machines.environment import has_growing_segments
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.machines.hardware import Gpu
from fitune.values.plan import Backend, Dense, Offload, Plan, Precision, Zero, base_of
from fitune.values.predictions import Phase
from fitune.values.rules import adds_gradients_up

CARDS = {"75": "t4", "80": "a100-80gb", "89": "rtx-4090", "90": "h100", "120": "rtx-5090"}
"""Compute capability -> a card that has it."""
MODELS = ("8b", "moe", "gemma")
ON_THE_CARD = tuple(name for name, case in CASES.items() if case.offload == Offload())
"""Methods whose tensors are all there: what waits on the host takes this machine's own memory."""
SPARES = (0.5, 1, 2, 3, 5, 10, 15, 20, 30, 50)
DIALOGSUM = (
    185, 151, 165, 234, 153, 154, 84, 246, 147, 390, 86, 416, 345, 190, 272, 180, 217, 305, 103, 80, 131, 200, 159, 189,
    117, 72, 261, 150, 202, 180, 271, 129, 112, 141, 440, 196, 132, 74, 338, 76, 224, 173, 165, 225, 215, 285, 253, 168,
)  # fmt: skip
"""Tokens of the first rows of dialogsum, at four characters each."""
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda draw: 1 << 30,
    "lognormal": lambda draw: max(16, int(draw.lognormvariate(math.log(800), 0.8))),
    "dialogsum": lambda draw: draw.choice(DIALOGSUM),
}
"""Tokens of a row before it is cut to the plan's seq_len."""
RUN = Path(__file__).parents[1] / "tests" / "null_gpu" / "run.sh"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=[*CARDS], choices=[*CARDS])
    parser.add_argument("--shapes", nargs="+", default=[*MODELS], choices=[*SHAPES])
    parser.add_argument("--cases", nargs="+", default=[*ON_THE_CARD], choices=[*CASES])
    parser.add_argument(
        "--layers", type=int, default=0, help="blocks, where fewer than the model has are enough"
    )
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument(
        "--ranks", type=int, default=1, help="more than one: rank 0 of so many, whose peers send nothing"
    )
    parser.add_argument(
        "--backend", default="fsdp", choices=get_args(Backend), help="what divides over the ranks"
    )
    parser.add_argument(
        "--slack", action="store_true", help="what the allocator loses, and what spare is enough"
    )
    parser.add_argument("--lengths", nargs="+", default=[*LENGTHS], choices=[*LENGTHS])
    parser.add_argument("--micro-batches", type=int, default=60, help="how many run with each spare")
    parser.add_argument("--spares", type=float, nargs="+", default=SPARES, help="percent of what moves")
    parser.add_argument("--here", action="store_true", help="this process runs on the null GPU: one card")
    parser.add_argument("--out", type=Path, required=True, help="the folder for null_gpu.json")
    options = parser.parse_args()
    if options.ranks > 1 and options.backend == "deepspeed" and not options.slack:
        parser.error("a rehearsal runs no DeepSpeed: with --slack alone")
    found = run_cases(options) if options.here else on_every_card(options)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "null_gpu.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content |= {
        "benchmark": "bench/null_gpu_memory.py",
        "date": date.today().isoformat(),
        "versions": versions() if options.here else found.pop(),
    }
    again = {case_of(row) for row in found}
    before = content.get(kind_of(options), [])
    content[kind_of(options)] = [*(row for row in before if case_of(row) not in again), *found]
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def kind_of(options: argparse.Namespace) -> str:
    """The name under which the file has what was found: over several ranks beside those of one."""
    return "slack" if options.slack else "peaks" if options.ranks == 1 else f"peaks of {options.ranks} ranks"


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of the file is about: one that is measured again takes the place of the one before."""
    words = ("capability", "shape", "case", "rows", "recompute", "lengths", "growing")
    return tuple(row.get(word) for word in words)


def card(capability: str) -> Gpu:
    return replace(find_gpu(CARDS[capability]), memory_bytes=1024 * GIB)


def on_every_card(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A process sees the cards and the allocator that it began with, so each has its own. The last entry is their
    versions: they run in an environment of their own."""
    found, their = [], {}
    mine = [word for word in sys.argv[1:] if word != "--here"]
    for number in options.cards:
        for growing in (True, False) if options.slack else (True,):
            with TemporaryDirectory() as folder:
                conf = f"expandable_segments:{growing}"
                given = {"NULLCUDA_CARDS": f"{find_gpu(CARDS[number]).name}|{number}|1024",
                         "PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}  # fmt: skip
                command = [RUN, "python", __file__, *mine, "--here", "--cards", number, "--out", folder]
                subprocess.run(command, check=True, env={**os.environ, **given})
                content = json.loads((Path(folder) / "null_gpu.json").read_text())
                found += content[kind_of(options)]
                their = content["versions"]
    return [*found, their]


def run_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    warnings.filterwarnings("ignore")
    (number,), found = options.cards, []
    for name, case, lengths in itertools.product(
        options.shapes, options.cases, options.lengths if options.slack else [""]
    ):
        shape = replace(SHAPES[name], layers=options.layers) if options.layers else SHAPES[name]
        for recompute in (0, shape.layers):
            words = dict(capability=number, shape=name, case=case, rows=options.rows, recompute=recompute)
            plan = plan_on(number, CASES[case], shape, rows=options.rows, recompute=recompute)
            plan = over_ranks(plan, options.ranks, options.backend)
            began = time.perf_counter()
            if options.slack:
                together = 4 if adds_gradients_up(plan.tuning) else 1
                plan = replace(plan, batch=replace(plan.batch, accumulation=together))
                words |= {"lengths": lengths, "growing": plan.hardware.growing_segments}
                words |= {"micro_batches": options.micro_batches}
                result = slack_of(plan, shape, lengths, options)
            else:
                result = compared(plan, shape)
            found.append({**words, **result})
            print(line_of(found[-1]), f"{time.perf_counter() - began:.1f} s", flush=True)
    return found


@contextmanager
def bare_card() -> Iterator[None]:
    """Take all that a case left on the card, whoever still refers to it, so that the next begins with nothing."""
    try:
        yield
    finally:
        for tensor in [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.is_cuda]:
            with suppress(RuntimeError):  # a DTensor has no storage of its own
                tensor.untyped_storage().resize_(0)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


def plan_on(number: str, case: Case, shape: Shape, *, rows: int, recompute: int) -> Plan:
    """The case's plan in the 16 bit that the card computes with."""
    gpu = card(number)
    if not gpu.has_bf16:
        case = replace(case, precision=Precision.FP16)
    hardware = replace(hardware_for(gpu=gpu, gpus=1), growing_segments=has_growing_segments())
    return plan_of(case, shape, hardware=hardware, rows=rows, recompute=recompute)


def over_ranks(plan: Plan, ranks: int, backend: Backend) -> Plan:
    if ranks == 1:
        return plan
    return replace(
        plan, sharding=Zero(stage=3, backend=backend), hardware=replace(plan.hardware, gpus_per_node=ranks)
    )


def prepared_of(plan: Plan, shape: Shape) -> Prepared:
    """The plan's model and engine on the card; weights are what was there, and collectives between ranks do nothing."""
    device, mesh = torch.device("cuda", 0), None
    if isinstance(plan.sharding, Zero):
        if not dist.is_initialized():  # one for all cases: DeepSpeed remembers the groups of its first
            store = FakeStore()
            dist.init_process_group("fake", rank=0, world_size=plan.hardware.num_gpus, store=store)
        if plan.sharding.backend == "fsdp":
            mesh = mesh_of(plan.sharding, plan.hardware, device="cuda")
    with torch.device("meta"):
        model = empty_model(config_of(shape), compute_dtype(plan.precision))
    on = "cpu" if plan.offload.parameters == "cpu" else device
    # Packed as they arrive, as training does: weights that are packed once all are there leave holes between them.
    for block in blocks_of(model) if base_of(plan) != Dense() else ():
        quantise_blocks(nn.ModuleList([block.to_empty(device=on)]), base_of(plan))
    for module in model.modules():
        if any(
            tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ):
            module.to_empty(device=on, recurse=False)
    model.tie_weights()  # to_empty gives what was shared a memory each
    prepared = prepare_loaded(model, plan, device=device, mesh=mesh)
    if uses_deepspeed(plan):
        believe_in_finite_gradients(prepared.engine.runtime.optimizer)
    torch.cuda.empty_cache()  # dense weights that were quantised or divided
    torch.cuda.reset_peak_memory_stats()
    return prepared


def believe_in_finite_gradients(optimizer: Any) -> None:
    """DeepSpeed steps nothing where a gradient is not finite, and what was never computed may say so."""
    from deepspeed.runtime.zero import stage3

    looked = optimizer.has_overflow
    optimizer.has_overflow = lambda *args, **words: bool(looked(*args, **words)) and False
    stage3.is_invalid_grad_norm = lambda norm: False


def compared(plan: Plan, shape: Shape) -> dict[str, Any]:
    memory = predict_memory(plan)
    if dist.is_initialized():  # by the case before; a rehearsal makes its own group
        dist.destroy_process_group()
    trace, _ = trace_plan(plan, config_of(shape), exact=False)
    rehearsed = {phase: sum(kinds.values()) for phase, kinds in peaks_by_kind(trace, on_cuda=True).items()}
    tokens = plan.batch.micro_batch_tokens - plan.batch.micro_batch_size
    with bare_card(), supervised(tokens):
        measured, outside = measure(plan, prepared_of(plan, shape))
    return {
        "phases": {
            phase.value: {"predicted": sum(terms.values()), "rehearsed": rehearsed[phase],
                          "allocated": measured[phase]}
            for phase, terms in memory.phases.items()
        },
        "workspace": {"predicted": memory.outside["cuBLAS workspace"], "allocated": outside["workspace"]},
        "reserved": {"predicted": memory.tensor_peak_bytes + memory.outside["allocator slack"],
                     "rehearsed": reserved_peak(trace),
                     "reserved": max(measured.values()) + outside["workspace"] + outside["slack"]},
    }  # fmt: skip


def slack_of(plan: Plan, shape: Shape, lengths: str, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes that micro-batches lose with room for all, and the smallest of ``--spares`` with which they run."""
    many = partial(run_many, plan, shape, lengths, options.micro_batches)
    free = many(room=0)
    memory = predict_memory(plan)
    moves = memory.tensor_peak_bytes - sum(memory.phases[Phase.IDLE].values())
    whole = memory.tensor_peak_bytes + memory.outside["cuBLAS workspace"]
    enough = (spare for spare in options.spares if many(room=whole + int(moves * spare / 100)))
    planned = whole + memory.outside["allocator slack"]
    return {**free, "predicted": whole, "moves": moves, "planned": memory.outside["allocator slack"],
            "planned_runs": bool(many(room=planned)),
            "enough_percent": next(enough, None)}  # fmt: skip


@bare_card()
def run_many(plan: Plan, shape: Shape, lengths: str, micro_batches: int, room: int) -> dict[str, int]:
    """Allocated and reserved peak of so many micro-batches; empty if ``room`` bytes are not enough.

    ``room`` 0: as much as there is.
    """
    draw, prepared = random.Random(3), prepared_of(plan, shape)
    if room:
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    length = LENGTHS[lengths]
    batch = plan.batch
    try:
        for number in range(micro_batches):
            full = number == micro_batches * 7 // 10  # what the plan is made for, beside gradients of others
            last = (number + 1) % batch.accumulation == 0
            rows = tuple(
                batch.seq_len if full else min(batch.seq_len, length(draw))
                for _ in range(batch.micro_batch_size)
            )
            stream, tokens = random_rows(rows, vocab_size=plan.model.vocab_size), sum(rows) - len(rows)
            with supervised(tokens):
                prepared.engine.forward_backward(
                    stream, divisor=tokens, enter_phase=lambda phase: None, last=last
                )
            if last:
                # no kernel wrote the gradients, so they may be nan, which is said behind the update
                with suppress(TrainingFailed):
                    prepared.engine.update(learning_rate=1e-6, enter_phase=lambda phase: None)
    except torch.OutOfMemoryError:
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"]}  # fmt: skip


@contextmanager
def supervised(tokens: int) -> Iterator[None]:
    """In the place of a device's nonzero(), which would have to count: so many."""
    nonzero = torch.nonzero
    torch.nonzero = lambda x, *args, **kwargs: (
        torch.empty((tokens, 1), dtype=torch.int64, device=x.device)
        if x.is_cuda
        else nonzero(x, *args, **kwargs)
    )
    try:
        yield
    finally:
        torch.nonzero = nonzero


def line_of(found: dict[str, Any]) -> str:
    name = f"{found['capability']:3} {found['shape']:6} {found['case']:22} {found['recompute']:2}"
    if "moves" in found:
        moves, lost = found["moves"], found["reserved"] - found["allocated"]
        return (
            f"{name} {found['lengths']:9} {'growing' if found['growing'] else 'fixed':8} moves {moves / GIB:.2f} GiB, "
            f"lost {lost / moves:.1%}, enough {found['enough_percent']} %, planned {found['planned'] / moves:.1%} "
            f"runs {found['planned_runs']}, predicted {found['predicted'] / found['allocated'] - 1:+.2%}"
        )
    errors = {
        side: max((sizes[side] / sizes["allocated"] - 1 for sizes in found["phases"].values()), key=abs)
        for side in ("predicted", "rehearsed")
    }
    peak = max(sizes["allocated"] for sizes in found["phases"].values())
    workspace, reserved = found["workspace"], found["reserved"]
    return (
        f"{name} {peak / GIB:7.2f} GiB  "
        + "  ".join(f"{side} {error:+.3%}" for side, error in errors.items())
        + f"  workspace {workspace['allocated'] / MIB:.2f} of {workspace['predicted'] / MIB:.2f} MiB"
        + f"  reserved {reserved['reserved'] / GIB:.2f} of {reserved['predicted'] / GIB:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
