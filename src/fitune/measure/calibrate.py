"""Measure what this machine's device does, in under a minute: the rates that the estimate of time is made of."""

import datetime
from collections.abc import Sequence

import torch

from fitune.measure.calibrations import device_key
from fitune.measure.device_rates import (
    attention_samples,
    cpu_adam_rate,
    host_bandwidth,
    launch_seconds,
    product_samples,
    traffic,
)
from fitune.measure.ranks import collective_rates
from fitune.spec.calibration import Calibration, Numbers, Rate
from fitune.spec.hardware import Hardware

DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def calibrate(hardware: Hardware) -> Calibration:
    """Measure one device of ``hardware``, this machine's; the least of several times counts.

    Among ranks of torch.distributed every rank must call it, and collectives are measured too.
    """
    on_cpu = hardware.gpu.is_cpu
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    types = {
        name: dtype for name, dtype in DTYPES.items() if on_cpu or name != "bf16" or hardware.gpu.has_bf16
    }
    forward, backward = launch_seconds(device)
    return Calibration(
        device=device_key(hardware.gpu, cores=hardware.cpu_cores),
        date=datetime.date.today().isoformat(),
        threads=torch.get_num_threads(),
        products=tuple(fitted(name, product_samples(device, dtype)) for name, dtype in types.items()),
        attention=tuple(
            proportional(name, attention_samples(device, dtype)) for name, dtype in types.items()
        ),
        traffic=traffic(device),
        forward_launch_seconds=forward,
        backward_launch_seconds=backward,
        host_bandwidth=0.0 if on_cpu else host_bandwidth(device),
        cpu_adam=cpu_adam_rate(),
        collectives=collective_rates(device),
    )


def fitted(numbers: Numbers, samples: Sequence[tuple[float, float]]) -> Rate:
    """The straight line seconds = start + FLOPs / rate with the least squares of relative errors.

    ``samples`` are (FLOPs, seconds). A start below zero is noise: then the line goes through zero.
    """
    # with x = FLOPs / seconds and y = 1 / seconds, relative errors are those of start · y + x / rate = 1
    x, y = [f / s for f, s in samples], [1 / s for _, s in samples]
    xx, xy, yy = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    start = (xx * sum(y) - xy * sum(x)) / determinant if len(samples) > 1 and determinant > 0 else 0.0
    per_flop = (yy * sum(x) - xy * sum(y)) / determinant if start > 0 else 0.0
    if per_flop <= 0:
        return proportional(numbers, samples)
    return Rate(numbers=numbers, flops=1 / per_flop, start_seconds=start)


def proportional(numbers: Numbers, samples: Sequence[tuple[float, float]]) -> Rate:
    """seconds = FLOPs / rate, again with the least squares of relative errors."""
    x = [flops / seconds for flops, seconds in samples]
    return Rate(numbers=numbers, flops=sum(each * each for each in x) / sum(x))
