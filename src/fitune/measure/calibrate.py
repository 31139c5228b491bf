"""Measure what this machine's device does, in under a minute: the rates that the estimate of time is made of."""

import datetime
import itertools

import torch

from fitune.measure.calibrations import device_key
from fitune.measure.device_rates import (
    FLOPS_PER_PAIR,
    Samples,
    attention_samples,
    cpu_adam_samples,
    host_samples,
    launch_samples,
    product_samples,
    traffic_samples,
)
from fitune.measure.ranks import collective_rates
from fitune.spec.calibration import AttentionRate, Calibration, Numbers, Rate, Traffic
from fitune.spec.hardware import Hardware

DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS = 2
"""What disturbs a machine for a second or two spoils one of them."""


def calibrate(hardware: Hardware) -> Calibration:
    """Measure one device of ``hardware``, this machine's.

    Among ranks of torch.distributed every rank must call it, and collectives are measured too.
    """
    on_cpu = hardware.gpu.is_cpu
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    numbers: list[Numbers] = [name for name in DTYPES if on_cpu or name != "bf16" or hardware.gpu.has_bf16]
    rounds = [measured(device, numbers) for _ in range(ROUNDS)]
    best = {name: _least([each[name] for each in rounds]) for name in rounds[0]}
    forward, both = best["launch"]
    return Calibration(
        device=device_key(hardware.gpu, cores=hardware.cpu_cores),
        date=datetime.date.today().isoformat(),
        threads=torch.get_num_threads(),
        products=tuple(product_rate(name, best[f"products {name}"]) for name in numbers),
        attention=tuple(attention_rate(name, best[f"attention {name}"]) for name in numbers),
        traffic=tuple(
            Traffic(tensor_bytes=int(moved) // 3, bandwidth=moved / seconds)
            for moved, seconds in best["traffic"]
        ),
        forward_launch_seconds=forward[1] / forward[0],
        backward_launch_seconds=max(0.0, both[1] - forward[1]) / (both[0] - forward[0]),
        host_bandwidth=min((size / seconds for size, seconds in best.get("host", [])), default=0.0),
        cpu_adam=best["adam"][0][0] / best["adam"][0][1],
        collectives=collective_rates(device),
    )


def measured(device: torch.device, numbers: list[Numbers]) -> dict[str, Samples]:
    """Everything once."""
    samples = {
        "launch": launch_samples(device),
        "traffic": traffic_samples(device),
        "adam": cpu_adam_samples(),
    }
    for name in numbers:
        samples[f"products {name}"] = product_samples(device, DTYPES[name])
        samples[f"attention {name}"] = attention_samples(device, DTYPES[name])
    return samples if device.type == "cpu" else {**samples, "host": host_samples(device)}


def _least(rounds: list[Samples]) -> Samples:
    """Of every amount the least seconds; a slow round may have tried fewer sizes."""
    found: dict[tuple[int, float], list[float]] = {}
    for place, (work, seconds) in itertools.chain.from_iterable(enumerate(samples) for samples in rounds):
        found.setdefault((place, work), []).append(seconds)
    return [(work, min(times)) for (_, work), times in sorted(found.items())]


def product_rate(numbers: Numbers, samples: Samples) -> Rate:
    """start + FLOPs / rate; ``samples`` are (FLOPs, seconds)."""
    per_flop, start = fitted([(flops, 1.0, seconds) for flops, seconds in samples])
    return Rate(numbers=numbers, flops=1 / per_flop, start_seconds=start)


def attention_rate(numbers: Numbers, samples: Samples) -> AttentionRate:
    """(n² + row_tokens · n) / 2 pairs; ``samples`` are (tokens, seconds)."""
    per_square, per_token = fitted([(n * n, n, seconds) for n, seconds in samples])
    return AttentionRate(
        numbers=numbers, flops=FLOPS_PER_PAIR / 2 / per_square, row_tokens=per_token / per_square
    )


def fitted(samples: list[tuple[float, float, float]]) -> tuple[float, float]:
    """a and b of seconds = a · u + b · v with the least squares of relative errors; ``samples`` are (u, v, seconds).

    A b below zero is noise: then a alone is fitted.
    """
    x, y = [u / s for u, _, s in samples], [v / s for _, v, s in samples]  # so that a · x + b · y = 1
    xx, xy, yy = (sum(p * q for p, q in zip(*each, strict=True)) for each in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    if len(samples) > 1 and determinant > 0:
        a, b = (yy * sum(x) - xy * sum(y)) / determinant, (xx * sum(y) - xy * sum(x)) / determinant
        if a > 0 and b >= 0:
            return a, b
    return sum(x) / xx, 0.0
