"""Measure what this machine's device does, in a minute or two: the rates that the estimate of time is made of."""

import datetime
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fitune.errors import HardwareError
from fitune.measure.device_rates import (
    CPU,
    FLOPS_PER_PAIR,
    HEAD_SIZES_CPU,
    HEADS,
    HURRIED,
    THOROUGH,
    Effort,
    Samples,
    attention_samples,
    cpu_adam_samples,
    head_samples,
    host_samples,
    launch_samples,
    logit_samples,
    measuring_with,
    new_page_samples,
    product_samples,
    traffic_samples,
)
from fitune.measure.hardware import detect_hardware, has_bf16_products
from fitune.measure.measurements import device_key
from fitune.units import MIB
from fitune.values.machines.hardware import (
    AttentionRate,
    Calibration,
    Collectives,
    Hardware,
    HeadTime,
    LogitTime,
    Numbers,
    Rate,
    Traffic,
)
from fitune.values.serial import from_json, to_json

DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def calibrate(hardware: Hardware, *, effort: Effort = THOROUGH) -> Calibration:
    """Measure one device of ``hardware``, this machine's.

    ``effort``: HURRIED takes seconds on a processor, and bf16 only where it has instructions for it.
    Among ranks of torch.distributed every rank must call it, and collectives are measured too.
    """
    on_cpu = hardware.gpu.is_cpu
    device = CPU if on_cpu else torch.device("cuda", torch.cuda.current_device())
    unused = "fp16" if on_cpu else "" if hardware.gpu.has_bf16 else "bf16"  # nothing trains in it here
    slow = "bf16" if on_cpu and effort == HURRIED and not has_bf16_products() else ""
    numbers: list[Numbers] = [name for name in DTYPES if name not in (unused, slow)]
    with measuring_with(effort):
        rounds = [measured(device, numbers) for _ in range(effort.rounds)]
    best: dict[str, Samples] = {}
    for name in rounds[0]:
        same = itertools.zip_longest(
            *(each[name] for each in rounds)
        )  # a slow round may have tried fewer sizes
        best[name] = [min(filter(None, samples)) for samples in same]

    def slowest(name: str) -> float:
        """Amount in a second; 0 where it is not measured on this device."""
        return min((amount / seconds for amount, seconds in best.get(name, [])), default=0.0)

    forward_launch, start = launches(*best["launch"][:2])
    _, forward, both = best["launch"]
    beside = dist.get_world_size() if dist.is_initialized() else 1
    return Calibration(
        device=device_key(hardware.gpu, cores=hardware.cpu_cores, processes=beside),
        date=datetime.date.today().isoformat(),
        threads=torch.get_num_threads(),
        products=tuple(product_rate(name, best[f"products {name}"]) for name in numbers),
        attention=tuple(attention_rate(name, best[f"attention {name}"]) for name in numbers),
        traffic=tuple(
            Traffic(tensor_bytes=int(size), bandwidth=1 / seconds, numbers=name)
            for name in numbers
            for size, seconds in best.get(f"traffic {name}", [])
        ),
        forward_launch_seconds=forward_launch,
        forward_start_seconds=start,
        backward_launch_seconds=max(0.0, both[1] - forward[1]) / (both[0] - forward[0]),
        heads=tuple(
            HeadTime(
                numbers=name,
                head_size=size,
                tokens=int(tokens),
                forward_seconds=forward,
                backward_seconds=backward,
            )
            for name, size in itertools.product(numbers, HEAD_SIZES_CPU)
            for tokens, forward, backward in _both_ways(best.get(f"head {size} {name}", []))
        ),
        logits=tuple(
            LogitTime(numbers=name, seconds=seconds / elements)
            for name in numbers
            for elements, seconds in best.get(f"logits {name}", [])
        ),
        new_page_bandwidth=slowest("new pages"),
        host_bandwidth=slowest("host"),
        cpu_adam=slowest("adam"),
        collectives=collective_rates(device),
    )


def measured(device: torch.device, numbers: list[Numbers]) -> dict[str, Samples]:
    """Everything once; on a processor, whose operations cost more than bytes and FLOPs, also what they cost beside."""
    on_cpu = device.type == "cpu"
    samples = {"launch": launch_samples(device), "adam": cpu_adam_samples()}
    few, many, both = samples["launch"]
    launch = (both[1] - launches(few, many)[1]) / both[0]
    for name in numbers:
        dtype = DTYPES[name]
        samples[f"products {name}"] = product_samples(device, dtype)
        if name == numbers[0] or on_cpu:
            samples[f"traffic {name}"] = traffic_samples(device, dtype, launch_seconds=launch)
        if not on_cpu:
            samples[f"attention {name}"] = attention_samples(device, dtype)
            continue
        for size in HEAD_SIZES_CPU:
            samples[f"head {size} {name}"] = heads = head_samples(dtype, size)
        samples[f"attention {name}"] = [
            (n, HEADS * (forward + backward)) for n, forward, backward in _both_ways(heads)
        ]
        samples[f"logits {name}"] = logit_samples(dtype)
    return {**samples, **({"new pages": new_page_samples()} if on_cpu else {"host": host_samples(device)})}


def _both_ways(heads: Samples) -> Iterator[tuple[float, float, float]]:
    """Tokens, seconds forward and seconds backward of each row."""
    for (tokens, forward), (_, backward) in zip(heads[::2], heads[1::2], strict=True):
        yield tokens, forward, backward


def launches(few: tuple[float, float], many: tuple[float, float]) -> tuple[float, float]:
    """Seconds of one operation and of a pass beside them, from two passes of (operations, seconds)."""
    each = max((many[1] - few[1]) / (many[0] - few[0]), few[1] / few[0] / 10)
    return each, max(0.0, few[1] - few[0] * each)


def product_rate(numbers: Numbers, samples: Samples) -> Rate:
    """start + FLOPs / rate; ``samples`` are (FLOPs, seconds)."""
    per_flop, start = fitted([(flops, 1.0) for flops, _ in samples], [seconds for _, seconds in samples])
    return Rate(numbers=numbers, flops=1 / per_flop, start_seconds=start)


def attention_rate(numbers: Numbers, samples: Samples) -> AttentionRate:
    """HEADS · d · (n² + row_tokens · n) / 2 pairs; ``samples`` are (tokens, seconds) of HEADS heads of HEAD_SIZE."""
    per_square, per_token = fitted([(n * n, n) for n, _ in samples], [seconds for _, seconds in samples])
    return AttentionRate(
        numbers=numbers, flops=FLOPS_PER_PAIR / 2 / per_square, row_tokens=per_token / per_square
    )


def fitted(terms: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Factors of two terms, the first above zero and the second not below, with the least squares of relative errors.

    A second factor below zero is noise: then the first is fitted alone, as for one sample.
    """
    relative = np.array(terms) / np.array(seconds)[:, None]  # so that their weighted sum should be 1
    scale, best = relative.max(axis=0), (0.0, 0.0)
    for count in range(1, 1 + min(2, len(seconds))):
        columns = relative[:, :count] / scale[:count]
        factors = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0] / scale[:count]
        if factors[0] > 0 and (factors >= 0).all():
            best = (factors[0].item(), factors[1].item() if count > 1 else 0.0)
    return best


_SUMMED_BYTES = {"cpu": 32 * MIB, "cuda": 256 * MIB}
_ALL_REDUCES = 5


def collective_rates(device: torch.device) -> Collectives | None:
    """All-reduce of one number and of a large buffer; None for a rank alone.

    A ring sends 2 (n−1)/n of a buffer from every rank. On a busy machine the one number may take as long as the buffer:
    a tenth of the buffer's time at least is that of its bytes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ranks = dist.get_world_size()
    size = _SUMMED_BYTES[device.type]  # ranks with GPUs have gloo for their processors, too
    small, large = (_all_reduce_seconds(device, elements) for elements in (1, size // 4))
    sent = 2 * (ranks - 1) / ranks * size
    return Collectives(ranks=ranks, start_seconds=small, bandwidth=sent / max(large - small, large / 10))


def _all_reduce_seconds(device: torch.device, elements: int) -> float:
    """The least of a few, the same number on every rank: a rank that calls once more would wait for ever."""
    buffer = torch.zeros(elements, device=device)
    times = []
    for _ in range(_ALL_REDUCES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(min(times[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


_SECONDS = 120
"""Starting torch is most of it."""
_FOUND = "found.json"


def calibrate_together(hardware: Hardware, *, effort: Effort) -> Calibration:
    """Measure one of the ``hardware.gpus_per_node`` processes on this machine's processor, and their collectives.

    All of them work meanwhile: alone, one finds the memory, the caches and the clock of all.

    Raises HardwareError where one of the processes ends badly or does not end.
    """
    processes = hardware.gpus_per_node
    environment = {**os.environ, "OMP_NUM_THREADS": str(hardware.threads_per_process)}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, folder, str(rank), str(processes), to_json(effort)],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(processes)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=_SECONDS)[1] for process in started]
        except subprocess.TimeoutExpired:
            raise HardwareError(
                f"{processes} processes did not measure this processor in {_SECONDS} s",
                hint="FITUNE_CALIBRATE=0 trains without",
            ) from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        for process, words in zip(started, said, strict=True):
            if process.returncode:
                last = (words.strip().splitlines() or ["nothing"])[-1]
                raise HardwareError(
                    f"a process that measures this processor ended with {process.returncode} and said: {last}",
                    hint="FITUNE_CALIBRATE=0 trains without",
                )
        return from_json(Calibration, (Path(folder) / _FOUND).read_text(encoding="utf-8"))


def main(folder: Path, rank: int, processes: int, effort: Effort) -> None:
    """Measure as one of the processes: ``python -m fitune.measure.calibrate FOLDER RANK PROCESSES EFFORT``; the first
    writes what it found."""
    dist.init_process_group(
        "gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )  # fmt: skip
    found = calibrate(detect_hardware(use_gpus=False), effort=effort)
    if rank == 0:
        (folder / _FOUND).write_text(to_json(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), from_json(Effort, sys.argv[4]))
