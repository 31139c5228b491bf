"""Steps of tiny plans that offload, on the card of this process and on its CPU: their losses, as JSON.

    python offload_steps.py [--mutants] [--sanitizer] [--only NAME …]

A mutant is a fault that is put into the program's source before it is loaded: a wait left out, memory freed early.
With --sanitizer torch's CUDA sanitizer watches, and the result is its first complaint or null. Every case is a process
of its own, forked when the libraries are loaded.
"""

import argparse
import importlib
import json
import sys
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

HOST, OFFLOAD, OPTIMIZER = "fitune.engine.host", "fitune.engine.offload", "fitune.engine.host_optimizer"
WEIGHTS, COPIES = "fitune.engine.streamed_weights", "fitune.train.saving"


@dataclass(frozen=True, slots=True)
class Mutant:
    case: str
    """The case of CASES that shows it."""
    module: str
    old: str
    new: str


MUTANTS = {
    "weights are used before they are there": Mutant(
        "full weights away", WEIGHTS, "self._arrival.wait()\n        for slot", "for slot"
    ),
    "room of weights that were fetched in vain is free at once": Mutant(
        "weights fetched in vain",
        WEIGHTS,
        "self._arrival.wait()  # its memory",
        "self._arrival  # not waited for: its memory",
    ),
    "activations are freed before they left": Mutant(
        "full activations away",
        OFFLOAD,
        "self.arrival.wait()\n            self.flat = None",
        "self.flat = None",
    ),
    "activations are used before they are back": Mutant(
        "full activations away",
        OFFLOAD,
        "self.arrival.wait()\n            self.flat, self",
        "self.flat, self",
    ),
    "gradients are freed before they left": Mutant(
        "optimizer away, its thread late",
        OPTIMIZER,
        "self._leaving = gradients, arrival",
        "self._leaving = (), arrival",
    ),
    "gradients are added up before they are there": Mutant(
        "full optimizer away", OPTIMIZER, "arrival.block()\n    for total", "for total"
    ),
    "new weights are used before they are there": Mutant(
        "full optimizer away",
        OPTIMIZER,
        "sent[1].block()\n        self._summed",
        "pass\n        self._summed",
    ),
    "a checkpoint is written before it is copied": Mutant(
        "checkpoint", COPIES, "return copy, done.synchronize", "return copy, lambda: None"
    ),
    "copies begin before what they copy is computed": Mutant(
        "full optimizer away", HOST, "stream.wait_stream(", "str("
    ),
}


def put_in(mutant):
    assert mutant.module not in sys.modules, "others may hold what it defines"
    module = importlib.import_module(mutant.module)
    source = Path(module.__file__).read_text()
    if source.count(mutant.old) != 1:
        sys.exit(
            f"{mutant.module} has {source.count(mutant.old)} times {mutant.old!r}: write the mutant anew"
        )
    exec(compile(source.replace(mutant.old, mutant.new), module.__file__, "exec"), module.__dict__)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--sanitizer", action="store_true")
    parser.add_argument("--only", nargs="+")
    asked = parser.parse_args()
    names = asked.only or list(MUTANTS if asked.mutants else CASES)
    for library in ("peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(library)  # once, for all processes that are forked

    print(json.dumps({name: _forked(name, asked.sanitizer) for name in names}))


def _forked(name, watched):
    """What ``_run`` gives, in a process forked from this thread: operations are computed for its likes only."""
    fork = get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: there.send(_run(name, watched)))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return {"complaint": "the process died"}
    finally:
        process.join()


def _run(name, watched):
    import nullcuda
    import torch

    torch.cuda._is_in_bad_fork = lambda: False  # this card forks as memory does
    if float(torch.ones(2, device="cuda").sum()) != 2:  # the mode was left behind
        importlib.import_module("compute").begin()
    if name in MUTANTS:
        put_in(MUTANTS[name])
    case = CASES[MUTANTS[name].case if name in MUTANTS else name]
    try:
        return case(watched) | {"overwritten": nullcuda.overwritten()}
    except Exception as error:  # whatever a mutant breaks is its complaint; a case without one fails by it
        return {"complaint": f"{type(error).__name__}: {error}"[:300]}


def stepped(case, *, away, precision="fp32", layers=(), watched):
    """Losses of three steps on the CPU without offload and on the card with it; complaints of the sanitizer."""
    import gpu_cases
    import torch

    from fitune.units import GIB
    from fitune.values.machines.gpus import cpu_gpu, find_gpu, hardware_for
    from fitune.values.plan import Lora, Offload, Precision

    on_cpu = hardware_for(gpu=cpu_gpu(memory_bytes=4 * GIB, cores=2), gpus=1)
    on_card = hardware_for(gpu=find_gpu("h100"), gpus=1, host_memory_bytes=16 * GIB)
    settings = replace(gpu_cases.CASES[case], precision=Precision(precision))
    losses = {}
    for device, hardware, offload in (
        ("cpu", on_cpu, Offload()),
        ("cuda", on_card, Offload(**dict.fromkeys(away.split(), "cpu"))),
    ):
        plan = gpu_cases.plan_of(
            replace(settings, offload=offload), shape_of_all(), hardware=hardware, rows=2
        )
        if layers and isinstance(plan.tuning, Lora):
            plan = replace(plan, tuning=replace(plan.tuning, layers=layers))
        if device == "cuda" and watched:
            return _watched(lambda plan=plan: _losses(plan, torch.device("cuda"), steps=2))
        losses[device] = _losses(plan, torch.device(device))
    return losses


def shape_of_all():
    import gpu_cases

    return replace(gpu_cases.SHAPES["tiny"], seq_len=32, chunk_tokens=32)


def _losses(plan, device, *, steps=3):
    import gpu_cases
    import torch

    from fitune.train.prepare import prepare_loaded

    config = gpu_cases.config_of(shape_of_all())
    model = gpu_cases.random_model(plan, config, torch.device("cpu"))
    if plan.offload.parameters != "cpu":
        model = model.to(device)
    engine = prepare_loaded(model, plan, device=device).engine
    found = []
    for _ in range(steps):
        rows = gpu_cases.full_rows(plan)
        loss = engine.forward_backward(rows, divisor=rows.supervised_tokens, enter_phase=lambda phase: None)
        engine.update(learning_rate=1e-2, enter_phase=lambda phase: None)
        found.append(loss.item() / rows.supervised_tokens)
    return found


def _watched(run):
    from torch.cuda._sanitizer import CUDASanitizer

    watch = CUDASanitizer()
    watch.enable()
    run()
    watch.disable()
    return {"complaint": None}


def with_a_late_thread(watched):
    """The host's own thread begins what it is given only when somebody waits for it, so no copy is made by it."""
    from fitune.engine.host import HostMemory

    HostMemory.beside = lambda self, work: work
    return stepped("full", away="optimizer", watched=watched)


def fetched_in_vain(watched):
    """What takes the memory of weights that came and were not asked for, when other weights came after them."""
    import torch
    from torch import nn

    from fitune.engine.host import HostMemory
    from fitune.engine.streamed_weights import StreamedWeights

    def found():
        blocks = nn.ModuleList(nn.Linear(64, size, bias=False) for size in (64, 256))
        weights = StreamedWeights(blocks, HostMemory(torch.device("cuda", 0)), trained=True)
        with torch.no_grad():
            weights.begins(0, shared=set())
            weights._only(-1, -1)  # as behind backward
            other = torch.full((64, 256), 7.0, device="cuda")
            weights.begins(0, shared=set())
            return [other.mean().item()]

    return _watched(found) if watched else {"cpu": [7.0], "cuda": found()}


def checkpoint_copied(watched):
    """A tensor that is copied for a checkpoint, as it is written, after the next step changed it."""
    import torch

    from fitune.checkpoint.slices import Share
    from fitune.train.saving import HostCopies

    weight = torch.full((4096,), 1.0, device="cuda")
    torch.cuda.synchronize()
    share = Share(step=1, files={"weights": {"w": weight}}, slices={}, facts={}, log=b"")
    copied, wait = HostCopies().take(share)
    weight.add_(1.0)
    wait()
    return {"cpu": [1.0], "cuda": [copied.files["weights"]["w"].mean().item()]}


CASES = {
    "full weights away": lambda w: stepped("full", away="parameters optimizer", watched=w),
    "late adapters, weights away": lambda w: stepped("lora", away="parameters", layers=(2, 3), watched=w),
    "full activations away": lambda w: stepped("full", away="activations", watched=w),
    "full optimizer away": lambda w: stepped("full", away="optimizer", watched=w),
    "bf16 optimizer away": lambda w: stepped("full", away="optimizer", precision="bf16-master", watched=w),
    "optimizer away, its thread late": with_a_late_thread,
    "weights fetched in vain": fetched_in_vain,
    "checkpoint": checkpoint_copied,
}

if __name__ == "__main__":
    main()
