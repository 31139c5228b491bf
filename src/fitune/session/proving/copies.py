"""Copies between host and device: bytes/s in each direction, in both at once, and beside products."""

import torch

from fitune.measure.device_rates import COPY_BYTES, fastest_seconds
from fitune.session.proving.kernels import CannotRun
from fitune.spec.machines.hardware import Gpu
from fitune.spec.machines.proof import ProofCheck


def copies(gpu: Gpu, device: torch.device) -> ProofCheck:
    """Bytes/s of pinned copies, and the share of a copy that products hide. Told and not judged: plans have no figure
    for the rate of both directions at once."""
    if device.type == "cpu":
        raise CannotRun("a processor has no second memory")
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    x_DD = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16 if gpu.has_bf16 else torch.float16)

    def to_host() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(there[0], non_blocking=True)

    def to_device() -> None:
        with torch.cuda.stream(streams[1]):
            there[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        to_host()
        to_device()

    out, back, together = (fastest_seconds(work, device) for work in (to_host, to_device, both))
    product = fastest_seconds(lambda: x_DD @ x_DD, device)
    products = max(1, round(back / product))  # as long as the copy takes

    def beside() -> None:
        to_device()
        for _ in range(products):
            x_DD @ x_DD

    hidden = (back + products * product - fastest_seconds(beside, device)) / min(back, products * product)
    figures = {
        "to_host": COPY_BYTES / out, "to_device": COPY_BYTES / back, "both_at_once": 2 * COPY_BYTES / together,
        "planned": gpu.host_bandwidth, "hidden": hidden,
    }  # fmt: skip
    return ProofCheck(name="copies", passed=None, figures=figures)
