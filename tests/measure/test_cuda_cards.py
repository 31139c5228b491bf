"""torch's GPUs against the plan, and against what the installed torch was compiled for."""

from dataclasses import replace

import pytest

from fitune.errors import HardwareError
from fitune.measure.cuda_cards import missing_kernels, other_card, require_planned_card, torch_problem
from fitune.units import GIB
from fitune.values.machines.gpus import GpuFigures, find_gpu, gpu_of_figures
from measure.conftest import CU130
from measure.test_hardware_detection import gpu

CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


V100 = gpu("Tesla V100-SXM2-16GB", 16151, 7, 0)
L4 = gpu("NVIDIA L4", 22560, 8, 9)  # torch's figures: NVML says 23,034
RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 24217, 8, 9)
RTX_3060 = gpu("NVIDIA GeForce RTX 3060", 11909, 8, 6)


def test_the_planned_card_and_a_larger_one_are_taken(torch_sees):
    torch_sees(RTX_3060, RTX_4090, L4)
    require_planned_card(find_gpu("rtx-4090"), 1)
    require_planned_card(find_gpu("l4"), 2)
    require_planned_card(find_gpu("rtx-3060"), 1)
    assert other_card(find_gpu("rtx-4090"), 1) == ""
    assert "the plan is for rtx-3060, and cuda:1 is NVIDIA GeForce RTX 4090" in other_card(
        find_gpu("rtx-3060"), 1
    )


def test_figures_of_a_board_are_no_other_card(torch_sees):
    h100 = find_gpu("h100")
    assert h100.slower_board
    torch_sees(gpu("NVIDIA H100 PCIe", 81007, 9, 0))
    assert other_card(h100, 0) == ""


@pytest.mark.parametrize(
    ("planned", "index", "words"),
    [
        (
            "rtx-4090",
            0,
            r"cuda:0 is NVIDIA GeForce RTX 3060 \(8\.6, 11\.63 GiB\).* rtx-4090 \(8\.9, 23\.99 GiB\)",
        ),
        (
            "rtx-5080",
            1,
            r"cuda:1 is NVIDIA GeForce RTX 4090 \(8\.9, .* rtx-5080 \(12\.0",
        ),  # more memory, but older
        ("rtx-4090", 2, "the plan needs cuda:2, and torch sees 2 CUDA devices"),
    ],
)
def test_a_lesser_card_is_refused_before_anything_is_loaded(torch_sees, planned, index, words):
    torch_sees(RTX_3060, RTX_4090)
    with pytest.raises(HardwareError, match=words):
        require_planned_card(find_gpu(planned), index)


def test_a_card_by_its_figures_is_compared_by_them(torch_sees):
    torch_sees(RTX_4090)
    figures = GpuFigures(memory_bytes=24 * GIB, flops=165e12, bandwidth=1e12)
    require_planned_card(gpu_of_figures(figures), 0)
    with pytest.raises(HardwareError, match="48.00 GiB"):
        require_planned_card(gpu_of_figures(replace(figures, memory_bytes=48 * GIB)), 0)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (CU130, (7, 0), False),
        (CU126, (7, 0), True),
        (CU126, (12, 0), False),
        ((*CU126, "compute_90"), (12, 0), True),  # PTX is compiled on the card
        (CU130, (8, 9), True),  # by sm_86
        (CU130, (12, 1), True),
        (CU130, (10, 3), True),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_86",), (8, 0), False),
        ((), (8, 0), True),  # it says nothing
        (("gfx942",), (9, 4), False),
    ],
)
def test_which_cards_a_wheel_has_kernels_for(torch_sees, architectures, capability, runs):
    torch_sees(architectures=architectures)
    assert (missing_kernels(gpu("a card", 16000, *capability)) == "") is runs


def test_a_v100_and_the_newest_wheel(torch_sees):
    torch_sees(V100)
    with pytest.raises(
        HardwareError, match=r"no kernels for Tesla V100.*7\.0 \(sm_70\).* sm_75, sm_80"
    ) as caught:
        require_planned_card(find_gpu("v100-16gb"), 0)
    assert "cu126" in (caught.value.hint or "")
    assert "cu126" in torch_problem(V100)
    torch_sees(V100, architectures=CU126)
    require_planned_card(find_gpu("v100-16gb"), 0)
    assert torch_problem(V100) == ""
    assert "cu128" in torch_problem(gpu("NVIDIA GeForce RTX 5090", 32607, 12, 0))


def test_a_wheel_for_processors_on_a_machine_with_a_gpu(torch_sees):
    torch_sees()
    assert "sees no CUDA device, though NVML lists NVIDIA GeForce RTX 4090" in torch_problem(RTX_4090)
