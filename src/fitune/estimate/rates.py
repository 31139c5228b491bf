"""Rates of the device per second: as measured, else its datasheet times the share of it that others reach."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fitune.values.counts import peak_flops
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.plan import Precision
from fitune.values.remembered import remembered

PRODUCT_EFFICIENCY = {
    (7, 0): 0.72, (7, 5): 0.45, (8, 0): 0.78, (8, 6): 0.80, (8, 9): 0.60, (9, 0): 0.60, (10, 0): 0.60, (12, 0): 0.80,
}  # fmt: skip
"""Share of the dense peak that large 16-bit products reach, by compute capability: an aggregate of published runs for
A100 and H100 (whose clock falls under load), a guess between them for the others. T4 and L4 are held back by 70 W."""
GEFORCE_EFFICIENCY = 1.0
"""GeForce cards run above the rated boost that their peak is computed with (RTX 3090: 1.7 GHz, about 1.9 real)."""
PRODUCT_START_SECONDS = 4e-6
"""Filling and draining the device, each product. Not measured by us."""
ATTENTION_EFFICIENCY = {
    (7, 0): 0.35, (7, 5): 0.35, (8, 0): 0.60, (8, 6): 0.70, (8, 9): 0.70, (9, 0): 0.38, (10, 0): 0.35, (12, 0): 0.70,
}  # fmt: skip
"""Share of the peak that fused attention reaches on long rows, forward and backward: 0.6 on A100 (Dao 2023, arXiv
2307.08691); the same kernels reach 0.35–0.4 on H100 (Shah et al. 2024, arXiv 2407.08608). Others are guesses: more
where tensor cores are slow beside the units that take exponentials (consumer Ampere and Ada), less where there is no
FlashAttention-2."""
ATTENTION_ROW_TOKENS = 512
"""Rows of 512 tokens reach half of that rate, of 2,048 four fifths (Dao 2023, its plots over the length of rows)."""
CPU_ATTENTION_EFFICIENCY, CPU_ATTENTION_ROW_TOKENS = 0.5, 64
"""Share of the rate of products; measured on a core of a cloud EPYC (fitune doctor --calibrate, torch 2.13)."""
BANDWIDTH_EFFICIENCY = 0.80
"""Share of the datasheet bandwidth that elementwise kernels reach. Not measured by us."""
CPU_16_BIT_TRAFFIC = 0.5
"""Share of the bytes per second in fp32 that 16 bit reach: a processor computes on them in fp32 and casts.

Measured on a Zen 4 core (fitune doctor --calibrate, torch 2.13): 0.4 to 0.8.
"""
FORWARD_LAUNCH_SECONDS, BACKWARD_LAUNCH_SECONDS = 18e-6, 13e-6
"""From one operation to the next. 14 and 9 µs were measured on a core of a cloud EPYC without CUDA (fitune doctor
--calibrate, torch 2.13), + 4 µs for the launch itself, which is assumed."""
NEW_PAGE_BYTES = 16 * 1024**2
"""From this size on glibc gives a tensor's memory back to the system, so that every page is new the next time: always
from 32 MiB on, nearly always from 16 (measured, torch 2.13)."""
LOGIT_BYTES = {4: 8 * 4, 2: 8 * 4 + 12}
"""Moved for one logit by element size: largest, minus, exp, sum and scale in fp32, and 16 bit's copies there and back
(models/loss_head.py)."""
FUSED_LOGIT_MOVES = 3
"""How often the one kernel of the loss moves a logit in its own type: read twice, written once (fused_loss.py)."""
ADAM_BYTES = 28
"""Bytes moved for one fp32 parameter that AdamW steps: weight and two states read and written, gradient read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one device in the plan's compute type."""

    flops: float
    product_start_seconds: float
    attention_flops: float
    attention_row_tokens: float
    """values/machines/hardware.py, AttentionRate."""
    head_seconds: Callable[[int, float], tuple[float, float] | None]
    """(head size, tokens of a row) -> seconds of one head, forward and backward; None: the rate above counts."""
    logit_seconds: float
    new_page_seconds: float
    """For each byte of a new tensor of NEW_PAGE_BYTES or more; 0 where memory is kept for later."""
    bandwidth_for: Callable[[float], float]
    """Bytes/s of elementwise operations on tensors of so many bytes."""
    in_place_bandwidth: float
    forward_launch_seconds: float
    backward_launch_seconds: float
    forward_start_seconds: float
    waits_for_launches: bool
    """A processor computes only when it is not launching; a GPU does both at once."""


@remembered
def rates_of(hardware: Hardware, precision: Precision) -> Rates:
    """Rates of the device (FLOP/s, bytes/s, seconds), calibrated where it was measured, else from its datasheet."""
    numbers = "bf16" if precision is Precision.BF16_MASTER else precision.value
    calibration = hardware.calibration
    products = calibration.product_rate(numbers) if calibration is not None else None
    attention = calibration.attention_rate(numbers) if calibration is not None else None
    if calibration is None or products is None or attention is None:
        return _assumed(hardware.gpu, precision)
    on_cpu = hardware.gpu.is_cpu
    in_place = ADAM_BYTES * calibration.cpu_adam if on_cpu else calibration.bandwidth_for(math.inf)
    logit_seconds = calibration.logit_seconds(numbers)
    return Rates(
        flops=products.flops,
        product_start_seconds=products.start_seconds,
        attention_flops=attention.flops,
        attention_row_tokens=attention.row_tokens,
        head_seconds=lambda head_size, tokens: calibration.head_seconds(
            numbers, head_size=head_size, tokens=tokens
        ),
        logit_seconds=LOGIT_BYTES[precision.compute_bytes] / in_place
        if logit_seconds is None
        else logit_seconds,
        new_page_seconds=1 / calibration.new_page_bandwidth if calibration.new_page_bandwidth else 0.0,
        bandwidth_for=lambda tensor_bytes: calibration.bandwidth_for(tensor_bytes, numbers),
        in_place_bandwidth=in_place,
        forward_launch_seconds=calibration.forward_launch_seconds,
        backward_launch_seconds=calibration.backward_launch_seconds,
        forward_start_seconds=calibration.forward_start_seconds,
        waits_for_launches=on_cpu,
    )


def _assumed(gpu: Gpu, precision: Precision) -> Rates:
    peak = max(peak_flops(gpu, precision), 1.0)
    bandwidth = gpu.bandwidth * BANDWIDTH_EFFICIENCY
    casts = gpu.is_cpu and precision is not Precision.FP32
    elementwise = bandwidth * CPU_16_BIT_TRAFFIC if casts else bandwidth
    products, attention = 1.0, CPU_ATTENTION_EFFICIENCY  # a processor's peak is already measured by products
    if not gpu.is_cpu:
        known = max((each for each in PRODUCT_EFFICIENCY if each <= gpu.capability), default=(7, 0))
        products, attention = PRODUCT_EFFICIENCY[known], ATTENTION_EFFICIENCY[known]
    if gpu.is_geforce:
        products = GEFORCE_EFFICIENCY
    return Rates(
        flops=peak * products,
        product_start_seconds=PRODUCT_START_SECONDS,
        attention_flops=peak * attention,
        attention_row_tokens=CPU_ATTENTION_ROW_TOKENS if gpu.is_cpu else ATTENTION_ROW_TOKENS,
        head_seconds=lambda head_size, tokens: None,
        logit_seconds=LOGIT_BYTES[precision.compute_bytes] / bandwidth,
        new_page_seconds=0.0,
        bandwidth_for=lambda tensor_bytes: elementwise,
        in_place_bandwidth=bandwidth,
        forward_launch_seconds=FORWARD_LAUNCH_SECONDS,
        backward_launch_seconds=BACKWARD_LAUNCH_SECONDS,
        forward_start_seconds=0.0,
        waits_for_launches=gpu.is_cpu,
    )
