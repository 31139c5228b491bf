"""What sending checkpoints to a store costs the loop: a run that saves 1 GB every 50 steps, here and to S3.

    python bench/upload.py --json results/upload.json      two sides in turn: local, s3
    python bench/upload.py --sends 4 --json FILE           core seconds of sending alone, without a run beside it

A Llama of 85 M parameters in fp32 with AdamW on the CPU: 12 bytes a parameter, 1.02 GB a checkpoint. Both sides save
it in the same way; one then sends it to a local S3 server (moto's, a process of its own on the same cores, which needs
10 s of a core for a GB: it runs with niceness 19, so it takes only what nobody else wants). The loop's wall-clock
seconds are those of 50 steps with one save behind the first of them; its CPU seconds are those of this process, and
those of its threads that send. The run is stopped behind the last step that counts, and what was sent until then is
told.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import uuid
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
from async_save import SHAPE
from rows_from_s3 import ENVIRONMENT, s3_server

from fitune.demo.files import pretraining_texts, training_exercises, write_base_model
from fitune.planner.search import find_plan
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.stores import opening
from fitune.stores.writing import Store
from fitune.train.current import Callbacks
from fitune.train.run import run
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, hardware_for
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Plan
from fitune.values.reports import StepReport

BUCKET = "bench"


class Clock:
    """Wall-clock seconds, CPU seconds of this process and of its threads that send, when each step's report came."""

    def __init__(self) -> None:
        self.at: dict[int, tuple[float, float, float]] = {}

    def start(self, plan: Plan, name: str) -> None: ...

    def step(self, report: StepReport) -> None:
        self.at[report.step] = time.perf_counter(), time.process_time(), sending_seconds()

    def finish(self, report: object) -> None: ...


def sending_seconds() -> float:
    """CPU seconds of the threads that send: ours, and the one of fsspec."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.ident and thread.name.startswith(("sending", "fsspec"))
    ]
    return sum(map(time.clock_gettime, clocks))


def plan_of(work: Path, tokens: int, steps: int, url: str) -> Plan:
    settings: dict[str, Any] = {
        "model": str(work / "model"), "data": [str(work / "rows.jsonl")], "precision": "fp32", "tuning": "full",
        "seq_len": tokens, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "packing": True,
        "max_steps": 2 * steps, "save_steps": steps, "samples": 0, "keep_checkpoints": 1, "upload_to": url,
        "output_dir": str(work / "run"),
    }  # fmt: skip
    recipe = parse_recipe(canonical_keys(settings, where="bench/upload.py"))
    hardware = hardware_for(
        gpu=cpu_gpu(memory_bytes=12 * GIB, cores=os.cpu_count() or 1), host_memory_bytes=12 * GIB
    )
    return find_plan(recipe, model=load_model_spec(recipe.model), hardware=hardware).chosen.plan


def one_run(work: Path, tokens: int, steps: int, url: str) -> dict[str, float]:
    """Seconds of the loop, bytes of the checkpoint, and bytes of it that the store has when the loop ends."""
    clock, last = Clock(), 2 * steps - 1
    sent: list[int] = []

    def stop() -> bool:
        if last in clock.at and not sent:
            sent.append(bytes_in(url) if url else 0)
        return last in clock.at

    callbacks = Callbacks(
        on_data=lambda data, loader, done: None,
        on_note=print,
        stop_asked=stop,
        answer=lambda model, conversations: ["" for _ in conversations],
    )
    report = run(plan_of(work, tokens, steps, url), callbacks=callbacks, sinks=[clock])
    assert report.status == "interrupted"
    size = sum(file.stat().st_size for file in (work / "run/checkpoints/latest").iterdir())
    shutil.rmtree(work / "run")
    wall_s, cpu_s, sending_cpu_s = (
        end - begin for begin, end in zip(clock.at[steps - 1], clock.at[last], strict=True)
    )
    return {
        "wall_s": wall_s, "cpu_s": cpu_s, "sending_cpu_s": sending_cpu_s, "checkpoint_bytes": size,
        "sent_bytes": sent[0],
    }  # fmt: skip


def bytes_in(url: str) -> int:
    store = Store(url)
    try:
        return sum(int(said["size"]) for said in store.infos("checkpoints").values())
    finally:
        store.close()


def core_seconds(folder: Path, *, is_signed: bool) -> float:
    """Core seconds of this process to send the files of ``folder``. Unsigned is as over https, without the TLS."""
    options = opening.OPTIONS["s3fs"]["config_kwargs"]
    options["s3"] = {"payload_signing_enabled": is_signed}
    store = Store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    begun = time.process_time()
    store.put_folder(folder, "checkpoints/step-1", [file.name for file in folder.iterdir()])
    seconds = time.process_time() - begun
    store.remove(store.infos())
    store.close()
    return seconds


def sends(folder: Path, times: int) -> dict[str, Any]:
    """Core seconds of each sending of 1.02 GB, signed and unsigned in turn, after one of each."""
    folder.mkdir()
    for name, mebibytes in (("model.safetensors", 326), ("optimizer.safetensors", 651)):
        with (folder / name).open("wb") as file:
            for _ in range(mebibytes):
                file.write(os.urandom(2**20))
    found: dict[str, list[float]] = {"signed": [], "unsigned": []}
    for number in range(times + 1):
        for side, seconds in found.items():
            taken = core_seconds(folder, is_signed=side == "signed")
            if number:
                seconds.append(round(taken, 2))
    medians = {side: statistics.median(seconds) for side, seconds in found.items()}
    return {"date": date.today().isoformat(), "bytes": 977 * 2**20, "core_s": found, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50, help="between two saves")
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument(
        "--layers", type=int, default=SHAPE.num_hidden_layers, help="of the model: fewer, smaller"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sends", type=int, default=0, help="only send, so many times; no run")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(wanted.threads)
    found: dict[str, list[dict[str, float]]] = {"local": [], "s3": []}
    with s3_server(niceness=19) as address, tempfile.TemporaryDirectory() as folder:
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=address, FITUNE_CACHE=f"{folder}/cache")
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
        if wanted.sends:
            show(sends(Path(folder, "sent"), wanted.sends), wanted.json)
            return
        work, shape = Path(folder), dataclasses.replace(SHAPE, num_hidden_layers=wanted.layers)
        write_base_model(work / "model", pretraining_texts(50, seed=0), shape=shape, seed=0)
        rows = (json.dumps(each) for each in training_exercises(2_000, seed=0))
        (work / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        for number in range(wanted.rounds):
            for side in list(found) if number % 2 == 0 else list(found)[::-1]:
                url = f"s3://{BUCKET}/{uuid.uuid4().hex}" if side == "s3" else ""
                found[side].append(one_run(work, wanted.tokens, wanted.steps, url))
                print(f"round {number + 1}, {side}: {found[side][-1]}", flush=True)
    result = {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "threads": wanted.threads, "steps": wanted.steps,
        "tokens": wanted.tokens, "layers": wanted.layers, "load_1_min": os.getloadavg()[0], "sides": found,
        "wall_ratio": ratio(found, "wall_s"), "cpu_ratio": ratio(found, "cpu_s"),
    }  # fmt: skip
    show(result, wanted.json)


def show(result: dict[str, Any], file: Path | None) -> None:
    print(json.dumps(result, indent=1))
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def ratio(found: dict[str, list[dict[str, float]]], clock: str) -> float:
    """Seconds of the loop that sends over those of the one that does not, medians of the rounds."""
    local, s3 = (statistics.median(one[clock] for one in found[side]) for side in ("local", "s3"))
    return s3 / local


if __name__ == "__main__":
    main()
