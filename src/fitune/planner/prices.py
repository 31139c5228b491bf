"""What an hour of a device costs when the recipe does not say: round figures in US dollars."""

from fitune.spec.hardware import Gpu

PRICES = {
    "t4": 0.53, "v100-16gb": 3.06, "v100-32gb": 3.90, "a10g": 1.01, "l4": 0.80,
    "a100-40gb": 4.10, "a100-80gb": 1.90, "h100": 3.00, "h100-pcie": 2.40, "h200": 3.80, "b200": 6.00,
    "rtx-a6000": 0.80, "l40s": 0.90, "rtx-3080": 0.20, "rtx-3090": 0.45, "rtx-4090": 0.70, "rtx-5090": 0.90,
}  # fmt: skip
"""The order of magnitude of cloud prices in 2024 and 2025, our assumption and nobody's offer. The recipe's
``price_per_gpu_hour`` always wins, and every cost is printed with the price it was made with."""


def price_of(gpu: Gpu) -> float:
    """0 when it is not known."""
    return PRICES.get(gpu.name, 0.0)
