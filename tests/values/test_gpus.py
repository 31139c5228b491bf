"""The table of devices: spellings, what a device cannot do, figures that belong together."""

import pytest

from fitune.errors import HardwareError
from fitune.units import GIB, MIB
from fitune.values.machines.cards import devices_elsewhere, known_cards
from fitune.values.machines.gpus import (
    GpuFigures,
    cpu_gpu,
    find_gpu,
    gpu_names,
    gpu_of_figures,
    hardware_for,
    similar_gpu,
    with_figures,
)

SPELLINGS = {
    "rtx-4090": ["RTX4090", "rtx 4090", "rtx_4090", "4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24GB"],
    "v100-32gb": ["V100 32GB", "v100-32g", "Tesla V100-SXM2-32GB"],
    "a100-80gb": ["A100 80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
    "h100": [
        "H100",
        "NVIDIA H100 80GB HBM3",
        "h100-sxm",
        "H100 SXM5 80 GB",
        "H100 (500W)",
        "H100-80GB (700 W)",
    ],
    "h100-pcie": ["NVIDIA H100 PCIe", "H100-PCIE-80GB", "H100 80GB (350W)"],
    "h200": ["H200 141GB"],
    "t4": ["Tesla T4"],
    "rtx-a6000": ["NVIDIA RTX A6000", "a6000"],
    "rtx-4060-ti-16gb": ["RTX 4060 Ti 16GB", "4060ti-16gb"],
    "rtx-4070-ti-super": ["NVIDIA GeForce RTX 4070 Ti SUPER", "4070 ti super"],
    "rtx-3060": ["3060", "RTX 3060 12GB"],
    "rtx-3060-8gb": ["RTX 3060 8GB"],
    "rtx-6000-ada": ["NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"],
    "rtx-pro-6000": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 96GB"],
    "rtx-pro-6000-max-q": ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 300W"],
    "rtx-pro-6000-server": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    "gh200-96gb": ["NVIDIA GH200 480GB"],
    "jetson-agx-orin-64gb": ["Jetson AGX Orin 64GB"],
}


def test_every_spelling_is_found_and_a_canonical_name_is_itself():
    spelled = {name: name for name in gpu_names()} | {
        each: name for name, all_ in SPELLINGS.items() for each in all_
    }
    assert {each: find_gpu(each).name for each in spelled} == spelled


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v100", "try: --gpu one of v100-16gb (16 GB), v100-32gb (32 GB)"),
        ("4060ti", "try: --gpu one of rtx-4060-ti (8 GB), rtx-4060-ti-16gb (16 GB)"),
        ("NVIDIA GeForce RTX 5060 Ti", "5060TI comes with 8 GB or 16 GB"),
        ("rtx-4090-48gb", "4090 comes with 24 GB"),
        ("rtx-4091", "did you mean 'rtx-4090'?"),
        ("gtx-1080", "below 7.0 (Volta)"),
        ("", "none of the 96 known cards\n  try: gpu: 24GB lists the cards of that size; without --gpu, --gpu-memory"),
        ("MI300X", "fitune does not train on mi300x: it runs ROCm"),
        ("Apple M2 Max 64GB", "fitune does not train on m2-max: it runs Metal"),
        ("Intel Arc B580", "is no CUDA device"),
        ("TPU v5e", "is no CUDA device"),
        ("8xH100", "--gpu h100 --gpus 8"),
        ("T4 x2", "--gpu t4 --gpus 2"),
        ("2xA100", "--gpu a100 --gpus 2"),
        ("3090,3090", "lists several cards\n  try: --gpu 3090 --gpus 2"),
        ("V100-32GB + V100-32GB", "--gpu v100-32gb --gpus 2"),
        ("RTX 4090, RTX 3060", "different cards: all GPUs of a plan are of one kind\n  try: --gpu rtx-3060 --gpus 2"),
        ("RTX 4090 Laptop GPU", "a laptop's card has less memory"),
        ("cuda:0", "leave gpu out"),
    ],
)  # fmt: skip
def test_what_is_not_one_known_device_is_refused_with_the_step_that_helps(name, words):
    with pytest.raises(HardwareError) as caught:
        find_gpu(name)
    assert words in str(caught.value)
    assert ("did you mean" in str(caught.value)) == words.startswith("did you mean")


def names_where(holds):
    return {card.gpu.name for card in known_cards() if holds(card.gpu)}


def test_what_devices_cannot_do():
    old = names_where(lambda gpu: gpu.capability < (8, 0))
    assert {"t4", "rtx-2080-ti", "v100-16gb", "gtx-1660-ti", "quadro-rtx-8000"} < old
    assert old == names_where(lambda gpu: not gpu.has_bf16)
    assert old == names_where(lambda gpu: not gpu.has_flash_attention)


def test_dense_rates_of_the_datasheets_and_memory_that_the_driver_reports():
    """Dense, fp32 accumulate: memory.md's list."""
    rates = {"a100-80gb": 312, "h100": 989, "v100-32gb": 125, "rtx-3090": 71, "rtx-4090": 165}
    for name, tflops in rates.items():
        assert round(find_gpu(name).fp16_flops / 1e12 - 0.2) == tflops
    assert find_gpu("rtx-4090").memory_bytes == 24_564 * MIB
    assert find_gpu("h100").memory_bytes == 81_559 * MIB


def test_figures_belong_together():
    for card in known_cards():
        gpu = card.gpu
        assert 0.89 < (gpu.memory_bytes + card.host_bytes) / (card.advertised_gb * GIB) <= 1.0, gpu
        assert gpu.bf16_flops in (0.0, gpu.fp16_flops), gpu
        assert 1.9 < gpu.fp16_flops / gpu.fp32_flops < 34, gpu
        assert gpu.host_bandwidth <= gpu.link_bandwidth < gpu.bandwidth, gpu
        assert len(gpu.source) > 20, gpu
        assert not gpu.is_cpu


def test_a_device_outside_the_table_keeps_its_memory_and_gets_the_rates_of_its_kin():
    found = similar_gpu("NVIDIA RTX A1000", memory_bytes=8 * GIB, capability=(8, 6))
    assert (found.memory_bytes, found.capability) == (8 * GIB, (8, 6))
    assert found.fp16_flops == find_gpu("a16").fp16_flops
    assert "a16" in found.source
    newest = similar_gpu("NVIDIA Next", memory_bytes=GIB, capability=(13, 0))
    assert newest.fp16_flops == find_gpu("dgx-spark").fp16_flops
    with pytest.raises(HardwareError, match=r"compute capability 6\.1"):
        similar_gpu("NVIDIA GeForce GTX 1080", memory_bytes=8 * GIB, capability=(6, 1))


def test_the_cpu_as_a_device():
    cpu = cpu_gpu(memory_bytes=16 * GIB, cores=4)
    assert (cpu.is_cpu, cpu.has_bf16, cpu.has_flash_attention) == (True, True, False)
    assert cpu.fp32_flops == 4 * 40e9 > cpu.bf16_flops > 0
    assert cpu_gpu(memory_bytes=GIB, cores=64).bandwidth == cpu.bandwidth


def test_hardware_counts_gpus_per_node():
    hardware = hardware_for(gpu=find_gpu("h100"), gpus=8, nodes=4, host_memory_bytes=2**40)
    assert hardware.num_gpus == 32
    assert hardware.internode_bandwidth > 0
    assert hardware_for(gpu=find_gpu("h100")).internode_bandwidth == 0
    with pytest.raises(HardwareError, match="gpus = 0 must be at least 1"):
        hardware_for(gpu=find_gpu("h100"), gpus=0)


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("H100", "h100-pcie"),
        ("H100-80GB (500W)", "h100-pcie"),
        ("H100 80GB HBM3", ""),
        ("rtx pro 6000", "rtx-pro-6000-max-q"),
        ("RTX PRO 6000 Blackwell Workstation Edition", ""),
    ],
)
def test_an_h100_whose_board_is_not_named_may_be_a_slower_one(name, slower):
    assert find_gpu(name).slower_board == slower


def test_every_name_is_in_the_table_once():
    names = [*gpu_names(), *(device.name for device in devices_elsewhere())]
    assert len(names) >= 120
    assert len(set(names)) == len(names)


def test_games_cards_copy_through_the_host():
    games = names_where(lambda gpu: gpu.is_geforce)
    assert {"rtx-4090", "rtx-4060-ti-16gb", "gtx-1660-super"} <= games
    assert games.isdisjoint({"rtx-a6000", "rtx-6000-ada", "rtx-pro-6000", "titan-rtx", "l4"})


def test_a_gpu_by_its_figures():
    given = GpuFigures(memory_bytes=24 * GIB, flops=165e12, bandwidth=1008e9)
    gpu = gpu_of_figures(given)
    assert (gpu.memory_bytes, gpu.bf16_flops, gpu.bandwidth) == (24 * GIB, 165e12, 1008e9)
    assert "assumed" in gpu.source
    with pytest.raises(HardwareError, match="needs memory, FLOPS and bandwidth"):
        gpu_of_figures(GpuFigures(memory_bytes=24 * GIB))
    slower = with_figures(find_gpu("rtx-4090"), GpuFigures(flops=82.6e12, link_bandwidth=8e9))
    assert (slower.bf16_flops, slower.link_bandwidth) == (82.6e12, 8e9)
    assert slower.memory_bytes == find_gpu("rtx-4090").memory_bytes
