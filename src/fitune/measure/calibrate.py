"""Measure what this machine's device does, in under a minute: the rates that the estimate of time is made of."""

import datetime
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fitune.measure.calibrations import device_key
from fitune.measure.device_rates import (
    FLOPS_PER_PAIR,
    HEAD_SIZE,
    HEADS,
    Samples,
    attention_samples,
    cpu_adam_samples,
    host_samples,
    launch_samples,
    product_samples,
    traffic_samples,
)
from fitune.measure.ranks import collective_rates
from fitune.spec.hardware import AttentionRate, Calibration, Hardware, Numbers, Rate, Traffic

DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NARROW_HEAD = 64
"""Half of HEAD_SIZE: between the two, what hangs on the width of a head and what does not come apart."""
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
        attention=tuple(
            attention_rate(name, best[f"attention {name}"], best.get(f"narrow attention {name}", []))
            for name in numbers
        ),
        traffic=tuple(
            Traffic(tensor_bytes=int(size), bandwidth=1 / seconds, numbers=name)
            for name in numbers
            for size, seconds in best.get(f"traffic {name}", [])
        ),
        forward_launch_seconds=forward[1] / forward[0],
        backward_launch_seconds=max(0.0, both[1] - forward[1]) / (both[0] - forward[0]),
        host_bandwidth=min((size / seconds for size, seconds in best.get("host", [])), default=0.0),
        cpu_adam=best["adam"][0][0] / best["adam"][0][1],
        collectives=collective_rates(device),
    )


def measured(device: torch.device, numbers: list[Numbers]) -> dict[str, Samples]:
    """Everything once; on a processor, whose operations cost more than bytes and FLOPs, also what they cost beside.

    It trains in no fp16.
    """
    on_cpu = device.type == "cpu"
    samples = {"launch": launch_samples(device), "adam": cpu_adam_samples()}
    operations, seconds = samples["launch"][-1]
    for name in numbers:
        dtype = DTYPES[name]
        samples[f"products {name}"] = product_samples(device, dtype)
        samples[f"attention {name}"] = attention_samples(device, dtype)
        if on_cpu and name != "fp16":
            narrow = attention_samples(device, dtype, head_size=NARROW_HEAD)
            samples[f"narrow attention {name}"] = narrow
        if name == numbers[0] or (on_cpu and name != "fp16"):
            launch = seconds / operations
            samples[f"traffic {name}"] = traffic_samples(device, dtype, launch_seconds=launch)
    return samples if on_cpu else {**samples, "host": host_samples(device)}


def _least(rounds: list[Samples]) -> Samples:
    """Of every amount the least seconds; a slow round may have tried fewer sizes."""
    found: dict[tuple[int, float], list[float]] = {}
    for place, (work, seconds) in itertools.chain.from_iterable(enumerate(samples) for samples in rounds):
        found.setdefault((place, work), []).append(seconds)
    return [(work, min(times)) for (_, work), times in sorted(found.items())]


def product_rate(numbers: Numbers, samples: Samples) -> Rate:
    """start + FLOPs / rate; ``samples`` are (FLOPs, seconds)."""
    per_flop, start = fitted([(flops, 1.0) for flops, _ in samples], [seconds for _, seconds in samples])
    return Rate(numbers=numbers, flops=1 / per_flop, start_seconds=start)


def attention_rate(numbers: Numbers, samples: Samples, narrow: Samples = ()) -> AttentionRate:
    """d · (n² + row_tokens · n) / 2 pairs of heads d wide; ``samples`` are (tokens, seconds) at HEAD_SIZE.

    With those of ``narrow`` heads, too: what a score costs whatever the width, and what a head costs to start.
    """
    sizes = [(HEAD_SIZE, n) for n, _ in samples] + [(NARROW_HEAD, n) for n, _ in narrow]
    terms: list[tuple[float, ...]] = [(d * n * n, d * n) for d, n in sizes]
    if narrow:
        terms = [(*two, n * n, 1.0) for two, (_, n) in zip(terms, sizes, strict=True)]
    fit = fitted(terms, [seconds / HEADS for _, seconds in (*samples, *narrow)])
    per_square, per_token, per_score, start = (*fit, 0.0, 0.0)[:4]
    return AttentionRate(
        numbers=numbers,
        flops=FLOPS_PER_PAIR / (HEADS * HEAD_SIZE) / 2 / per_square,
        row_tokens=per_token / per_square,
        score_columns=per_score / per_square,
        start_seconds=start,
    )


def fitted(terms: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Factors of the terms, none below zero and the first above, with the least squares of relative errors.

    A factor below zero is noise: the best fit without its term counts. No more terms than samples are fitted.
    """
    relative = np.array(terms) / np.array(seconds)[:, None]  # so that their weighted sum should be 1
    count = relative.shape[1]
    best, least = np.zeros(count), np.inf
    for taken in _subsets(count, most=len(seconds)):
        columns = relative[:, taken]
        scale = columns.max(axis=0)
        factors = np.linalg.lstsq(columns / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        error = float(np.square(columns @ factors - 1).sum())
        if factors[0] > 0 and (factors >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[taken] = factors
    return tuple(best.tolist())


def _subsets(count: int, *, most: int) -> Iterator[list[int]]:
    """Places of terms to fit together, the first always among them."""
    for size in range(min(count, most)):
        for others in itertools.combinations(range(1, count), size):
            yield [0, *others]
