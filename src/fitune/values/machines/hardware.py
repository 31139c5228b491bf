"""Gpu and Hardware: what there is to train on, and what it was measured to do. Bytes, FLOP/s and bytes/s."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fitune.units import format_percent

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
    those on the diagonal whole, and short rows fill them badly.
    """

    numbers: Numbers
    flops: float
    row_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTime:
    """Seconds of fused causal attention on a processor: one head of one row, forward and backward.

    Its kernels change their blocks with the length of the row, so that no short formula describes them.
    """

    numbers: Numbers
    head_size: int
    tokens: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTime:
    """Seconds of softmax and its gradient on a processor, for each logit: mostly the exponential."""

    numbers: Numbers
    seconds: float


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
    """From one small operation of a model's blocks to the next in forward, modules and Python included."""
    backward_launch_seconds: float
    forward_start_seconds: float = 0.0
    """Seconds of a pass before and after the blocks: masks, positions, Python."""
    heads: tuple[HeadTime, ...] = ()
    """A processor's, used instead of ``attention``: two head sizes, the small one first, each with rising tokens."""
    logits: tuple[LogitTime, ...] = ()
    """A processor's."""
    new_page_bandwidth: float = 0.0
    """Bytes/s at which a processor first writes a tensor so large that its memory is asked for and given back."""
    host_bandwidth: float = 0.0
    """Pinned copies, the slower direction, bytes/s."""
    cpu_adam: float = 0.0
    """Parameters/s, fp32, with all threads."""
    collectives: Collectives | None = None

    def product_rate(self, numbers: str) -> Rate | None:
        """The measured rate of matrix products in these numbers; None if not measured."""
        return next((rate for rate in self.products if rate.numbers == numbers), None)

    def attention_rate(self, numbers: str) -> AttentionRate | None:
        """The measured rate of attention in these numbers; None if not measured."""
        return next((rate for rate in self.attention if rate.numbers == numbers), None)

    def logit_seconds(self, numbers: str) -> float | None:
        """The measured seconds of a logit in these numbers; None if not measured."""
        return next((each.seconds for each in self.logits if each.numbers == numbers), None)

    def head_seconds(self, numbers: str, *, head_size: int, tokens: float) -> tuple[float, float] | None:
        """Seconds of one head of a row of ``tokens``, forward and backward; None where heads were not measured.

        Along a straight line over the size of the head, along logarithms over the length of the row.
        """
        known = [each for each in self.heads if each.numbers == numbers]
        sizes = sorted({each.head_size for each in known})
        if not sizes:
            return None
        by_size = [[each for each in known if each.head_size == size] for size in sizes]
        there, back = (
            _between(
                head_size,
                sizes,
                [
                    _along_logarithms(tokens, [(each.tokens, getattr(each, way)) for each in row])
                    for row in by_size
                ],
            )
            for way in ("forward_seconds", "backward_seconds")
        )
        return there, back

    def bandwidth_for(self, tensor_bytes: float, numbers: str = "fp32") -> float:
        """Between two measured sizes along the logarithm of the size; outside, the nearest."""
        known = [each for each in self.traffic if each.numbers == numbers] or self.traffic
        if not known[0].tensor_bytes < tensor_bytes < known[-1].tensor_bytes:
            return (known[0] if tensor_bytes <= known[0].tensor_bytes else known[-1]).bandwidth
        return _along_logarithms(tensor_bytes, [(each.tensor_bytes, each.bandwidth) for each in known])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How far plans on cards of one kind were off, as ``fitune doctor --prove`` measured it."""

    cards: int
    memory_error: float
    """Largest |measured / predicted − 1| of a plan's peak."""
    speed_error: float
    """Median of measured / predicted tokens/s − 1: below zero, plans were slower than predicted."""

    def __str__(self) -> str:
        speed = format_percent(self.speed_error, signed=True, digits=0)
        return f"memory ±{format_percent(self.memory_error)}, speed {speed}"


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
    """Source of the figures."""
    slower_board: str = ""
    """The slowest card that the same name may mean, where it does not say which; else empty."""

    @property
    def is_cpu(self) -> bool:
        """True for a processor as a device."""
        return self.capability == (0, 0)

    @property
    def is_geforce(self) -> bool:
        """A card for games: no direct copies between two of them, and a clock above what is rated."""
        return bool(_GEFORCE.fullmatch(self.name)) or "geforce" in self.name.lower()

    @property
    def has_bf16(self) -> bool:
        """True if it multiplies in bf16."""
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
    """Bytes/s of a node's disk, read or write; 0 when not known."""
    internode_bandwidth: float = 0.0
    calibration: Calibration | None = None
    """Measured rates of the device; without them, its datasheet counts."""
    taken_bytes: int = 0
    """Held by other programs on each GPU when the plan was made: a desktop, another training."""
    left_out: str = ""
    """Visible GPUs of the machine that are not planned with, in words: ``1 × rtx-3060``."""
    measured: Measured | None = None
    """Of plans on cards of this kind; None: no card of this kind was ever measured."""
    growing_segments: bool = True
    """True if torch's allocator has expandable segments; else rows of mixed lengths lose much more of its memory."""

    @property
    def rates(self) -> str:
        """Source of the rates, for people."""
        if self.calibration is not None:
            return f"calibrated on {self.calibration.date}"
        return "assumed rates" if self.gpu.is_cpu else "datasheet rates"

    @property
    def num_gpus(self) -> int:
        """Devices on all nodes."""
        return self.gpus_per_node * self.nodes

    @property
    def threads_per_process(self) -> int:
        """One process a device; those of a machine share its cores equally."""
        return max(1, self.cpu_cores // self.gpus_per_node)


_GEFORCE = re.compile(r"[rg]tx-\d{4}(-ti)?(-super)?(-d)?(-\d+gb)?")


def _along_logarithms(x: float, points: Sequence[tuple[float, float]]) -> float:
    """y at ``x`` on the line through the logarithms of the two points around it; outside, of the two nearest."""
    if len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 * math.exp(math.log(x / x0) / math.log(x1 / x0) * math.log(y1 / y0))


def _between(size: float, sizes: Sequence[int], values: Sequence[float]) -> float:
    """The value at ``size`` on the line through the first and the last, at least half the first's share."""
    if len(sizes) == 1 or size == sizes[0]:
        return values[0]
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return max(values[0] + slope * (size - sizes[0]), values[0] / 2 * min(1.0, size / sizes[0]))
