"""Known devices, with the source of every figure, and how people spell their names.

``memory_bytes`` is the total that nvidia-smi prints (driver 510 or newer). Matrix rates are dense and
accumulate in fp32: GeForce cards do that at half of their advertised fp16 rate, and datasheets since
Ampere print figures with 2:4 sparsity, which are twice the dense ones.
"""

import re
from dataclasses import dataclass, replace

from fitune.errors import HardwareError, did_you_mean
from fitune.spec.hardware import Gpu, Hardware
from fitune.units import MIB

_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9
"""x16, bytes/s in one direction."""

_VOLTA = "NVIDIA V100 datasheet (2020): SXM2; fp16 tensor cores only"
_GA102 = "NVIDIA Ampere GA102 whitepaper v2.1, appendix A: fp32 accumulate, dense"
_ADA = "NVIDIA Ada whitepaper v2.1, appendix A: fp32 accumulate, dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A Gpu and what tells it apart: the words of its product name and its memory as advertised."""

    key: str
    advertised_gb: int
    gpu: Gpu


def _card(
    name: str, key: str, gb: int, *, mib: int, tflops: float, fp32_tflops: float, gb_s: float,
    capability: tuple[int, int], host: float, source: str, link: float | None = None, bf16: bool = True,
) -> Card:  # fmt: skip
    """``tflops``: dense fp16 (and bf16, where there is any); ``link``: NVLink, else PCIe between cards."""
    gpu = Gpu(
        name=name,
        memory_bytes=mib * MIB,
        bf16_flops=tflops * 1e12 if bf16 else 0.0,
        fp16_flops=tflops * 1e12,
        fp32_flops=fp32_tflops * 1e12,
        bandwidth=gb_s * 1e9,
        capability=capability,
        link_bandwidth=host if link is None else link,
        host_bandwidth=host,
        source=source,
    )
    return Card(key=key, advertised_gb=gb, gpu=gpu)


CARDS = (
    _card("t4", "t4", 16, mib=15360, tflops=65, fp32_tflops=8.1, gb_s=300, capability=(7, 5), host=_PCIE3,
          bf16=False, source="NVIDIA T4 datasheet (2019); fp16 tensor cores only"),
    _card("rtx-2080-ti", "2080ti", 11, mib=11264, tflops=53.8, fp32_tflops=13.4, gb_s=616, capability=(7, 5),
          host=_PCIE3, bf16=False, source="NVIDIA Turing whitepaper (2018), table 1: reference card, fp32 accumulate"),
    _card("v100-16gb", "v100", 16, mib=16384, tflops=125, fp32_tflops=15.7, gb_s=900, capability=(7, 0),
          host=_PCIE3, link=150e9, bf16=False, source=_VOLTA),
    _card("v100-32gb", "v100", 32, mib=32768, tflops=125, fp32_tflops=15.7, gb_s=900, capability=(7, 0),
          host=_PCIE3, link=150e9, bf16=False, source=_VOLTA),
    _card("a10g", "a10g", 24, mib=23028, tflops=70, fp32_tflops=35, gb_s=600, capability=(8, 6), host=_PCIE4,
          source="NVIDIA A10G datasheet (AWS G5): 140 TFLOPS with sparsity, halved"),
    _card("a10", "a10", 24, mib=23028, tflops=125, fp32_tflops=31.2, gb_s=600, capability=(8, 6), host=_PCIE4,
          source="NVIDIA A10 datasheet (2021): 250 TFLOPS with sparsity, halved"),
    _card("a30", "a30", 24, mib=24576, tflops=165, fp32_tflops=10.3, gb_s=933, capability=(8, 0), host=_PCIE4,
          source="NVIDIA A30 datasheet (2021): 330 TFLOPS with sparsity, halved"),
    _card("a40", "a40", 48, mib=46068, tflops=149.7, fp32_tflops=37.4, gb_s=696, capability=(8, 6), host=_PCIE4,
          source="NVIDIA A40 datasheet (2021): 299.4 TFLOPS with sparsity, halved"),
    _card("a100-40gb", "a100", 40, mib=40960, tflops=312, fp32_tflops=19.5, gb_s=1555, capability=(8, 0),
          host=_PCIE4, link=300e9, source="NVIDIA A100 datasheet (2021): SXM4 40 GB"),
    _card("a100-80gb", "a100", 80, mib=81920, tflops=312, fp32_tflops=19.5, gb_s=2039, capability=(8, 0),
          host=_PCIE4, link=300e9, source="NVIDIA A100 datasheet (2021): SXM4 80 GB"),
    _card("rtx-a6000", "a6000", 48, mib=49140, tflops=154.8, fp32_tflops=38.7, gb_s=768, capability=(8, 6),
          host=_PCIE4, source="NVIDIA RTX A6000 datasheet (2021): 309.7 TFLOPS with sparsity, halved"),
    _card("rtx-a5000", "a5000", 24, mib=24564, tflops=111.1, fp32_tflops=27.8, gb_s=768, capability=(8, 6),
          host=_PCIE4, source="NVIDIA RTX A5000 datasheet (2021): 222.2 TFLOPS with sparsity, halved"),
    _card("rtx-3060", "3060", 12, mib=12288, tflops=25.5, fp32_tflops=12.7, gb_s=360, capability=(8, 6), host=_PCIE4,
          source="NVIDIA GeForce RTX 3060 specification: 12.7 TFLOPS fp32; tensor cores twice that at fp32 accumulate"),
    _card("rtx-3080", "3080", 10, mib=10240, tflops=59.5, fp32_tflops=29.8, gb_s=760, capability=(8, 6),
          host=_PCIE4, source=_GA102),
    _card("rtx-3090", "3090", 24, mib=24576, tflops=71, fp32_tflops=35.6, gb_s=936, capability=(8, 6),
          host=_PCIE4, source=_GA102),
    _card("rtx-3090-ti", "3090ti", 24, mib=24564, tflops=80, fp32_tflops=40, gb_s=1008, capability=(8, 6),
          host=_PCIE4, source="NVIDIA Ada whitepaper v2.1, appendix A: RTX 3090 Ti, fp32 accumulate, dense"),
    _card("l4", "l4", 24, mib=23034, tflops=121, fp32_tflops=30.3, gb_s=300, capability=(8, 9), host=_PCIE4,
          source="NVIDIA L4 datasheet (2023): 242 TFLOPS with sparsity, halved"),
    _card("l40", "l40", 48, mib=46068, tflops=181, fp32_tflops=90.5, gb_s=864, capability=(8, 9), host=_PCIE4,
          source="NVIDIA L40 datasheet (2022): 362 TFLOPS with sparsity, halved"),
    _card("l40s", "l40s", 48, mib=46068, tflops=362, fp32_tflops=91.6, gb_s=864, capability=(8, 9),
          host=_PCIE4, source="NVIDIA L40S datasheet (2023)"),
    _card("rtx-4090", "4090", 24, mib=24564, tflops=165.2, fp32_tflops=82.6, gb_s=1008, capability=(8, 9),
          host=_PCIE4, source=_ADA),
    _card("rtx-4080", "4080", 16, mib=16376, tflops=97.5, fp32_tflops=48.7, gb_s=716.8, capability=(8, 9),
          host=_PCIE4, source=_ADA),
    _card("rtx-6000-ada", "6000ada", 48, mib=49140, tflops=364.2, fp32_tflops=91.1, gb_s=960, capability=(8, 9),
          host=_PCIE4, source="NVIDIA RTX 6000 Ada datasheet (2022): 728.5 TFLOPS with sparsity, halved"),
    _card("h100", "h100", 80, mib=81559, tflops=989, fp32_tflops=67, gb_s=3350, capability=(9, 0),
          host=_PCIE5, link=450e9, source="NVIDIA H100 datasheet (2024): SXM5, 1,979 with sparsity, halved"),
    _card("h100-pcie", "h100pcie", 80, mib=81559, tflops=756, fp32_tflops=51, gb_s=2000, capability=(9, 0),
          host=_PCIE5, source="NVIDIA H100 PCIe product brief (2022): 1,513 with sparsity, halved"),
    _card("h200", "h200", 141, mib=143771, tflops=989, fp32_tflops=67, gb_s=4800, capability=(9, 0),
          host=_PCIE5, link=450e9, source="NVIDIA H200 datasheet (2024): SXM5, 1,979 with sparsity, halved"),
    _card("h20", "h20", 96, mib=97871, tflops=148, fp32_tflops=44, gb_s=4000, capability=(9, 0),
          host=_PCIE5, link=450e9, source="NVIDIA H20 specification (2023): 148 TFLOPS dense bf16"),
    _card("b200", "b200", 180, mib=183359, tflops=2250, fp32_tflops=75, gb_s=7700, capability=(10, 0),
          host=_PCIE5, link=900e9, source="NVIDIA HGX B200 datasheet (2025): 36 PFLOPS with sparsity on 8, / 16"),
    _card("rtx-5090", "5090", 32, mib=32607, tflops=209.5, fp32_tflops=104.8, gb_s=1792, capability=(12, 0),
          host=_PCIE5, source="NVIDIA RTX Blackwell whitepaper v1.1, appendix: fp32 accumulate, dense"),
)  # fmt: skip
"""Every known card; one product name may come with two sizes of memory."""

_H100_350_W = "h100-pcie"
_WATTS = re.compile(r"(?<!\d)(\d{2,4}) ?w(?:atts?)?(?![a-z])")
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|rtx|(?<![a-z])gpu(?![a-z])")
_FORM_FACTOR = re.compile(r"(sxm\d?|pcie|hbm\d?e?)")
_MEMORY = re.compile(r"(?<![a-z\d])(\d+)\s*(?:gb|gib|g)(?![a-z])")


def gpu_names() -> tuple[str, ...]:
    """The canonical names."""
    return tuple(card.gpu.name for card in CARDS)


def find_gpu(name: str) -> Gpu:
    """The GPU of a canonical name or any usual spelling: ``RTX4090``, ``NVIDIA A100-SXM4-80GB``, ``Tesla V100 32GB``.

    ``h100`` means the SXM card, or may be a slower board; with a form factor or watts (``H100 (350W)``) it is one of
    them. A product that comes with two sizes of memory needs the size: ``v100``
    and ``a100`` alone are refused, because a plan for the larger would not run on the smaller.
    Raises HardwareError for those and for unknown names.
    """
    key, gb = _split_name(name)
    cards = _cards_of(key) or _cards_of(_FORM_FACTOR.sub("", key))
    sized = [card for card in cards if gb in (None, card.advertised_gb)]
    if len(sized) == 1:
        return _board(name, sized[0].gpu)
    if cards:
        raise HardwareError(
            f"gpu = {name!r}: {cards[0].key.upper()} comes with "
            + " or ".join(f"{card.advertised_gb} GB" for card in cards),
            hint=" or ".join(card.gpu.name for card in cards),
        )
    raise HardwareError(
        f"gpu = {name!r} is not known; known are {', '.join(gpu_names())} and cpu",
        hint=did_you_mean(name, gpu_names()),
    )


def _board(name: str, gpu: Gpu) -> Gpu:
    """The H100 of ``name``: sold with 350 W (PCIe), with 700 W (SXM), and as an SXM card held to 500 W."""
    if gpu.name != "h100" or _FORM_FACTOR.search(name.lower()):
        return gpu
    watts = _WATTS.search(name.lower())
    if watts and int(watts.group(1)) <= 400:
        return find_gpu(_H100_350_W)
    return gpu if watts and int(watts.group(1)) >= 600 else replace(gpu, slower_board=_H100_350_W)


def _split_name(name: str) -> tuple[str, int | None]:
    """The product without maker, brand and separators, and the memory if it is named: ("a100pcie", 40)."""
    text = name.lower()
    text = _WATTS.sub(" ", text)
    memory = _MEMORY.search(text)
    text = _NOISE.sub(" ", _MEMORY.sub(" ", text))
    return re.sub(r"[^a-z0-9]", "", text), int(memory.group(1)) if memory else None


def _cards_of(key: str) -> list[Card]:
    return [card for card in CARDS if card.key == key]


def similar_gpu(name: str, *, memory_bytes: int, capability: tuple[int, int]) -> Gpu:
    """A device that is not in the table but was found in a machine: memory as found, rates a stand-in.

    They are those of the slowest known card of the nearest architecture that is not newer; ``source`` says so.
    """
    older = [card.gpu for card in CARDS if card.gpu.capability <= capability]
    if not older:
        raise HardwareError(
            f"{name} has compute capability {capability[0]}.{capability[1]}; fitune needs 7.0 (Volta) or newer"
        )
    nearest = max(gpu.capability for gpu in older)
    like = min((gpu for gpu in older if gpu.capability == nearest), key=lambda gpu: gpu.fp16_flops)
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        bf16_flops=like.bf16_flops,
        fp16_flops=like.fp16_flops,
        fp32_flops=like.fp32_flops,
        bandwidth=like.bandwidth,
        capability=capability,
        link_bandwidth=like.host_bandwidth,
        host_bandwidth=like.host_bandwidth,
        source=f"memory as the driver reports; not in the table: rates of the slowest like it, {like.name}",
    )


def cpu_gpu(*, memory_bytes: int, cores: int, has_bf16_products: bool = False) -> Gpu:
    """The processor as a device. Capability (0, 0); links are memory copies.

    fp32: 40 GFLOP/s a core, half of what one AVX2 core was measured to reach (83 on a cloud EPYC, torch
    2.13, 768³ products). 16 bit: 1 GFLOP/s, measured on the same core: without AVX512-BF16 or AMX torch
    falls back to scalar code. bf16 with such instructions (``has_bf16_products``): twice fp32; a Zen 4 core was
    measured to reach 2.2 times. Memory: 10 GB/s a core, at most 40 (two channels of DDR4).
    """
    bf16 = 80e9 if has_bf16_products else 1e9
    bandwidth = 10e9 * min(cores, 4)
    return Gpu(
        name="cpu",
        memory_bytes=memory_bytes,
        bf16_flops=bf16 * cores,
        fp16_flops=1e9 * cores,
        fp32_flops=40e9 * cores,
        bandwidth=bandwidth,
        capability=(0, 0),
        link_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        source=f"{cores} cores × 40 GFLOP/s fp32 (half of one measured AVX2 core), {bf16 / 1e9:g} GFLOP/s bf16",
    )


def hardware_for(
    *,
    gpu: Gpu,
    gpus: int = 1,
    nodes: int = 1,
    host_memory_bytes: int = 0,
    cpu_cores: int = 0,
    nvme_bytes: int = 0,
    internode_bandwidth: float = 12.5e9,
) -> Hardware:
    """``gpus`` is the number in each node. Between nodes: 100 Gbit/s Ethernet unless told otherwise."""
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value < 1:
            raise HardwareError(f"{name} = {value} must be at least 1")
    return Hardware(
        gpu=gpu,
        gpus_per_node=gpus,
        nodes=nodes,
        host_memory_bytes=host_memory_bytes,
        cpu_cores=cpu_cores,
        nvme_bytes=nvme_bytes,
        internode_bandwidth=internode_bandwidth if nodes > 1 else 0.0,
    )
