"""Known devices, from cards.json: one line a card, with the source of its figures.

``mib`` is the total that nvidia-smi prints (driver 510 or newer). ``tflops`` is dense fp16, and bf16 where there is
any, accumulating in fp32: GeForce cards do that at half of their advertised fp16 rate, and datasheets since Ampere
print figures with 2:4 sparsity, which are twice the dense ones. ``elsewhere`` are devices without CUDA 7.0.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fitune.units import MIB
from fitune.values.machines.hardware import Gpu

_HOSTS = {"pcie3": 16e9, "pcie4": 32e9, "pcie5": 64e9, "c2c": 450e9}
"""To host memory: x16, or NVLink-C2C; bytes/s in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A Gpu and what tells it apart: the words of its product name and its memory as advertised."""

    key: str
    advertised_gb: int
    gpu: Gpu
    other_gb: tuple[int, ...] = ()
    """Figures in the driver's name that are not the device's memory: GH200 480GB names its host's."""
    host_bytes: int = 0
    """Left to the host where both share one memory; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A device that fitune does not train on."""

    name: str
    key: str
    kind: Literal["rocm", "gaudi", "metal", "pascal"]


@cache
def known_cards() -> tuple[Card, ...]:
    """Every known CUDA card; one product name may come with several sizes of memory."""
    table = _table()
    return tuple(_card(row, table["sources"]) for row in table["cards"])


@cache
def devices_elsewhere() -> tuple[Elsewhere, ...]:
    """Devices on which fitune does not train."""
    return tuple(Elsewhere(**row) for row in _table()["elsewhere"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
    return table


def _card(row: Mapping[str, Any], sources: Mapping[str, str]) -> Card:
    major, minor = row["sm"].split(".")
    shares_memory = row["host"] == "shared"
    host = row["gb_s"] * 1e9 / 2 if shares_memory else _HOSTS[row["host"]]  # a copy reads and writes
    gpu = Gpu(
        name=row["name"],
        memory_bytes=row["mib"] * MIB,
        bf16_flops=row["tflops"] * 1e12 if row.get("bf16", True) else 0.0,
        fp16_flops=row["tflops"] * 1e12,
        fp32_flops=row["fp32"] * 1e12,
        bandwidth=row["gb_s"] * 1e9,
        capability=(int(major), int(minor)),
        link_bandwidth=row["link_gb_s"] * 1e9 if "link_gb_s" in row else host,
        host_bandwidth=host,
        source=sources[row["source"]],
        slower_board=row.get("slower_board", ""),
    )
    return Card(
        key=row["key"], advertised_gb=row["gb"], gpu=gpu, other_gb=tuple(row.get("also_gb", ())),
        host_bytes=row.get("host_mib", 0) * MIB,
    )  # fmt: skip
