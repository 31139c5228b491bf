"""Gpu and Hardware: what there is to train on. Bytes, FLOP/s and bytes/s; no units hidden."""

from dataclasses import dataclass

from fitune.spec.calibration import Calibration


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
