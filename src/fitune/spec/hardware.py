"""Gpu and Hardware: what there is to train on, and what it was measured to do. Bytes, FLOP/s and bytes/s."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

Numbers = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Seconds of one product: ``start_seconds`` + FLOPs / ``flops``.

    Small ones reach less of the rate: half of it where FLOPs = start_seconds · flops.
    """

    numbers: Numbers
    flops: float
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Fused causal attention, forward and backward together.

    A row of n tokens takes as long as n · (n + ``row_tokens``) / 2 pairs would at ``flops``: kernels work in blocks,
    those on the diagonal whole, and short rows fill them badly. Every score costs as much as ``score_columns`` more
    columns of a head (exponentials, sums, casts), every head of a row ``start_seconds`` in backward.
    """

    numbers: Numbers
    flops: float
    row_tokens: float = 0.0
    score_columns: float = 0.0
    start_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes/s of elementwise operations, read and written, on tensors of ``tensor_bytes``."""

    tensor_bytes: int
    bandwidth: float
    numbers: Numbers = "fp32"
    """A processor works on 16 bit in fp32: it moves half the bytes in nearly the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Between ``ranks`` processes, as a ring sends: calls · start_seconds + bytes sent by one rank / bandwidth."""

    ranks: int
    start_seconds: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One device measured on one day; measure/calibrate.py says how. 0 stands for what a device does not have."""

    device: str
    date: str
    """YYYY-MM-DD."""
    threads: int
    """The processor's, while it was measured."""
    products: tuple[Rate, ...]
    """Matrix products, one entry for each kind of numbers."""
    attention: tuple[AttentionRate, ...]
    traffic: tuple[Traffic, ...]
    """Small tensors first, for each kind of numbers; a GPU's are of fp32 alone."""
    forward_launch_seconds: float
    """From one small operation of a model's forward to the next, modules and Python included."""
    backward_launch_seconds: float
    host_bandwidth: float = 0.0
    """Pinned copies, the slower direction, bytes/s."""
    cpu_adam: float = 0.0
    """Parameters/s, fp32, with all threads."""
    collectives: Collectives | None = None

    def product_rate(self, numbers: str) -> Rate | None:
        return next((rate for rate in self.products if rate.numbers == numbers), None)

    def attention_rate(self, numbers: str) -> AttentionRate | None:
        return next((rate for rate in self.attention if rate.numbers == numbers), None)

    def bandwidth_for(self, tensor_bytes: float, numbers: str = "fp32") -> float:
        """Between two measured sizes along the logarithm of the size; outside, the nearest."""
        known = [each for each in self.traffic if each.numbers == numbers] or self.traffic
        if tensor_bytes <= known[0].tensor_bytes:
            return known[0].bandwidth
        for low, high in itertools.pairwise(known):
            if tensor_bytes <= high.tensor_bytes:
                share = math.log(tensor_bytes / low.tensor_bytes) / math.log(
                    high.tensor_bytes / low.tensor_bytes
                )
                return low.bandwidth * math.exp(share * math.log(high.bandwidth / low.bandwidth))
        return known[-1].bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of device.

    Rates are dense datasheet peaks, accumulating in fp32. ``memory_bytes`` is what the driver reports as
    total. ``capability`` is CUDA's compute capability ((8, 9) for Ada), (0, 0) for a CPU.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    """0 when the device has no bf16 matrix units."""
    fp16_flops: float
    fp32_flops: float
    bandwidth: float
    """Device memory, bytes/s."""
    capability: tuple[int, int]
    link_bandwidth: float
    """To a neighbour in the same node, bytes/s in one direction (NVLink, else PCIe)."""
    host_bandwidth: float
    """To and from host memory, bytes/s in one direction."""
    source: str
    """Where the figures come from."""

    @property
    def is_cpu(self) -> bool:
        return self.capability == (0, 0)

    @property
    def is_geforce(self) -> bool:
        """A card for games: no direct copies between two of them, and a clock above what is rated."""
        known = self.name.startswith("rtx-") and not self.name.startswith(("rtx-a", "rtx-6000"))
        return known or "geforce" in self.name.lower()

    @property
    def has_bf16(self) -> bool:
        return self.bf16_flops > 0

    @property
    def has_flash_attention(self) -> bool:
        """FlashAttention-2 needs Ampere (8.0) or newer."""
        return self.capability >= (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Everything one job may use. All nodes alike."""

    gpu: Gpu
    gpus_per_node: int = 1
    nodes: int = 1
    host_memory_bytes: int = 0
    """Per node; 0 when not known."""
    cpu_cores: int = 0
    nvme_bytes: int = 0
    nvme_bandwidth: float = 0.0
    """Of a node's disk, bytes/s, read or write; 0 when not known."""
    internode_bandwidth: float = 0.0
    calibration: Calibration | None = None
    """What the device was measured to do; without it, its datasheet counts."""

    @property
    def rates(self) -> str:
        """Where the rates come from, for people."""
        if self.calibration is not None:
            return f"calibrated on {self.calibration.date}"
        return "assumed rates" if self.gpu.is_cpu else "datasheet rates"

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_node * self.nodes
