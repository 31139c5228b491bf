"""What a machine has, from what its driver and kernel say; torch is asked only where NVML cannot be."""

import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from fitune.errors import HardwareError
from fitune.estimate.overhead import usable_bytes
from fitune.measure import hardware as detection
from fitune.measure import nvml
from fitune.measure.hardware import (
    cpu_cores,
    describe_found,
    describe_hardware,
    detect_hardware,
    free_disk_bytes,
    has_bf16_products,
    host_memory_bytes,
    memory_limits,
    require_free,
    resolve_hardware,
    see_one_kind,
)
from fitune.measure.nvml import FoundGpu, driver_version, gpus_here, visible_gpus
from fitune.units import GIB, MIB
from fitune.values.machines.gpus import GpuFigures, find_gpu, hardware_for
from fitune.values.words import devices_with_memory


class FakeNvml(ModuleType):
    """nvidia-ml-py on a machine with these GPUs; a GPU that is an error raises it."""

    class NVMLError(Exception): ...

    class NVMLError_NoPermission(NVMLError): ...

    nvmlMemory_v2 = 2

    def __init__(self, *gpus, driver=True):
        super().__init__("pynvml")
        self.gpus, self.driver, self.running = gpus, driver, False

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.running = True

    def nvmlShutdown(self):
        self.running = False

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        assert self.running
        gpu = self.gpus[index]
        if isinstance(gpu, Exception):
            raise gpu
        return gpu

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetName(self, handle):
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):
        if handle.name == "NVIDIA GB10":  # its memory is the host's
            raise self.NVMLError("Not Supported")
        if handle.name == "sliced":
            raise self.NVMLError_NoPermission("Insufficient Permissions")
        kept = 300 * MIB if version == 1 else 0  # by the driver for itself
        return SimpleNamespace(total=handle.memory_bytes, used=handle.taken_bytes + kept)


def gpu(name, mib, *capability, index=0, uuid="GPU-1"):
    return FoundGpu(
        index=index, uuid=uuid, name=name, memory_bytes=mib * MIB, capability=(capability[0], capability[1])
    )


TWO_A100 = (
    gpu("NVIDIA A100-SXM4-80GB", 81920, 8, 0, uuid="GPU-5f1d0b0e-2c43-9d0a-7f2f-0a4d0a3c1a01"),
    gpu("NVIDIA A100-SXM4-80GB", 81920, 8, 0, index=1, uuid="GPU-77aa1c9e-0d5b-4be2-1c6a-3b9d6c2f4b02"),
)
MIXED = (
    gpu("NVIDIA GeForce RTX 4090", 24564, 8, 9, uuid="GPU-11111111-aaaa-bbbb-cccc-000000000000"),
    gpu("NVIDIA GeForce RTX 3060", 12288, 8, 6, index=1, uuid="GPU-22222222-aaaa-bbbb-cccc-000000000000"),
)


def machine_with(monkeypatch, *gpus, visible=None):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    monkeypatch.setattr(detection, "HIDDEN", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what a test sets goes with it
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_the_driver_lists_what_there_is(monkeypatch):
    fake = FakeNvml(*MIXED)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here() == MIXED
    assert not fake.running


def test_a_gpu_of_another_container_is_passed_over(monkeypatch):
    others = FakeNvml.NVMLError_NoPermission("Insufficient Permissions")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(others, MIXED[1]))
    assert gpus_here() == (MIXED[1],)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (gpu("NVIDIA GB10", 0, 12, 1, index=1), "Not Supported"),
        (gpu("sliced", 0, 9, 0, index=1), "Insufficient Permissions"),
        (FakeNvml.NVMLError("GPU is lost"), "GPU is lost"),
    ],
    ids=["memory of the host", "sliced", "lost"],
)
def test_a_gpu_that_the_driver_cannot_describe_is_refused(monkeypatch, broken, words):
    fake = FakeNvml(TWO_A100[0], broken)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(HardwareError, match=f"GPU 1, but cannot describe it: {words}"):
        gpus_here()
    assert not fake.running


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    monkeypatch.setattr(nvml, "count_of_driver", lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", None)  # it is not asked
    assert gpus_here() == ()
    assert driver_version() == "none"


def test_without_nvml_torch_describes_the_gpus(monkeypatch, torch_sees):
    """A container without the driver's "utility" part: torch sees what CUDA_VISIBLE_DEVICES leaves, numbered from 0."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    monkeypatch.setattr(nvml, "count_of_driver", lambda: 1)
    torch_sees(MIXED[1])
    assert gpus_here() == (replace(MIXED[1], index=0),)
    assert detect_hardware().gpu.name == "rtx-3060"


@pytest.mark.parametrize("installed", [True, False])
def test_gpus_that_neither_nvml_nor_torch_can_describe_are_not_taken_for_a_processor(
    monkeypatch, torch_sees, installed
):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    monkeypatch.setattr(nvml, "count_of_driver", lambda: 2)
    if installed:
        torch_sees()
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    why = "sees no CUDA device" if installed else "torch is not installed"
    with pytest.raises(
        HardwareError, match=rf"NVML Shared Library Not Found\), and torch .*{why.partition(' ')[2]}"
    ):
        detect_hardware()
    assert detect_hardware(use_gpus=False).gpu.is_cpu


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("GPU-77aa", [1]),
        (" 1 , GPU-5f1d", [1, 0]),
    ],
)
def test_cuda_visible_devices(visible, indices):
    assert [gpu.index for gpu in visible_gpus(TWO_A100, visible)] == indices


def test_a_slice_of_a_gpu_is_refused():
    with pytest.raises(HardwareError, match="MIG"):
        visible_gpus(TWO_A100, "MIG-1234")


def test_a_known_device_has_the_tables_rates_and_its_own_memory():
    device = describe_found(gpu("NVIDIA GeForce RTX 4090", 24217, 8, 9))
    assert (device.name, device.memory_bytes) == ("rtx-4090", 24217 * MIB)
    assert device.fp16_flops == find_gpu("rtx-4090").fp16_flops


def test_a_name_without_its_size_is_settled_by_the_memory():
    assert describe_found(gpu("Tesla V100-SXM2", 32510, 7, 0)).name == "v100-32gb"
    assert describe_found(gpu("NVIDIA A100", 40536, 8, 0)).name == "a100-40gb"


def test_an_unknown_device_still_works():
    device = describe_found(gpu("NVIDIA GeForce RTX 3055", 8192, 8, 6))
    assert (device.name, device.memory_bytes, device.has_bf16) == (
        "NVIDIA GeForce RTX 3055",
        8192 * MIB,
        True,
    )
    assert device.is_geforce


def test_a_machine_with_two_gpus(monkeypatch, tmp_path):
    machine_with(monkeypatch, *TWO_A100)
    hardware = detect_hardware()
    assert (hardware.gpu.name, hardware.gpus_per_node, hardware.nodes) == ("a100-80gb", 2, 1)
    assert hardware.host_memory_bytes > 0
    assert hardware.cpu_cores >= 1
    assert hardware.nvme_bytes > 0
    assert free_disk_bytes(tmp_path / "not" / "yet") > 0
    assert describe_hardware(hardware).startswith(
        "2 × a100-80gb, 80.00 GiB each, 312 TFLOP/s fp16, 2,039 GB/s\nhost: "
    )


def test_of_gpus_that_differ_those_with_most_memory_are_taken_and_the_others_named(monkeypatch):
    machine_with(monkeypatch, *reversed(MIXED))
    monkeypatch.setattr(detection, "free_disk_bytes", lambda path: 60 * GIB)  # others write to this disk
    hardware = resolve_hardware()
    assert (hardware.gpu.name, hardware.num_gpus) == ("rtx-4090", 1)
    assert hardware.left_out == "1 × NVIDIA GeForce RTX 3060"
    assert devices_with_memory(hardware) == "1 × rtx-4090 of 23.99 GiB; not used: 1 × NVIDIA GeForce RTX 3060"
    assert ", not used: 1 × NVIDIA GeForce RTX 3060\n" in describe_hardware(hardware)
    see_one_kind()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == MIXED[0].uuid
    assert resolve_hardware() == hardware  # what is hidden is still named
    machine_with(monkeypatch, *MIXED, visible="1")
    chosen = resolve_hardware()
    assert (chosen.gpu.name, chosen.left_out) == ("rtx-3060", "")


def test_a_card_that_fitune_cannot_use_is_left_out_whatever_its_memory(monkeypatch):
    machine_with(monkeypatch, gpu("Tesla P40", 24576, 6, 1), MIXED[1])
    assert resolve_hardware().gpu.name == "rtx-3060"


def test_nothing_is_hidden_where_all_gpus_are_of_one_kind(monkeypatch):
    machine_with(monkeypatch, *TWO_A100)
    one = resolve_hardware(gpus=1)
    assert one.left_out == "1 × NVIDIA A100-SXM4-80GB"
    see_one_kind()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert resolve_hardware(gpu="h100").left_out == resolve_hardware(gpu="cpu").left_out == ""


def test_what_other_programs_hold_is_not_planned_with(monkeypatch):
    """The fullest GPU counts, in whole 128 MiB; less than that is what the reserve is for."""
    desktop = replace(TWO_A100[1], taken_bytes=1_500 * MIB)
    machine_with(monkeypatch, TWO_A100[0], desktop)
    both, first = resolve_hardware(), resolve_hardware(gpus=1)
    assert (both.taken_bytes, first.taken_bytes) == (1_536 * MIB, 0)
    assert usable_bytes(first) - usable_bytes(both) == 1_536 * MIB
    assert ", 80.00 GiB each, 1.50 GiB of it taken, " in describe_hardware(both)
    assert devices_with_memory(both).endswith(" of 80.00 GiB, 1.50 GiB of it taken by other programs")
    machine_with(monkeypatch, replace(TWO_A100[0], taken_bytes=100 * MIB))
    assert resolve_hardware().taken_bytes == 0


def test_a_named_gpu_must_have_free_what_the_plan_takes(monkeypatch):
    machine_with(monkeypatch, replace(TWO_A100[0], taken_bytes=70 * GIB), TWO_A100[1])
    wanted = hardware_for(gpu=find_gpu("a100-80gb"))
    require_free(wanted, 10 * GIB)
    with pytest.raises(
        HardwareError, match=r"takes 10\.50 GiB of GPU 0 .*10\.00 GiB of its 80\.00 GiB.* hold 70\.00"
    ):
        require_free(wanted, 10 * GIB + 512 * MIB)


def test_a_machine_without_gpus_is_its_processor(monkeypatch):
    machine_with(monkeypatch)
    hardware = detect_hardware()
    assert hardware.gpu.is_cpu
    assert hardware.gpu.memory_bytes == hardware.host_memory_bytes
    assert describe_hardware(hardware).startswith(f"{hardware.cpu_cores} cores of cpu, ")


def test_a_named_gpu_needs_no_machine(monkeypatch):
    monkeypatch.setattr(detection, "gpus_here", lambda environment: pytest.fail("the driver was asked"))
    hardware = resolve_hardware(gpu="V100 32GB", gpus=8, nodes=2, host_memory_bytes=128 * GIB)
    assert (hardware.gpu.name, hardware.num_gpus, hardware.host_memory_bytes) == ("v100-32gb", 16, 128 * GIB)
    assert describe_hardware(hardware) == (
        "2 nodes of 8 × v100-32gb, 32.00 GiB each, 125 TFLOP/s fp16, 900 GB/s, no bf16, no FlashAttention-2\n"
        "host: 128.00 GiB host memory"
    )
    assert resolve_hardware(gpu="cpu", host_memory_bytes=4 * GIB).gpu.memory_bytes == 4 * GIB


def test_this_machine_has_only_what_it_has(monkeypatch):
    machine_with(monkeypatch, *TWO_A100)
    assert [resolve_hardware(gpus=n).num_gpus for n in (1, 2, None)] == [1, 2, 2]
    with pytest.raises(HardwareError, match="gpus = 3, but this machine has 2 × a100-80gb"):
        resolve_hardware(gpus=3)


def test_limits_of_a_container(tmp_path):
    """Version 2: the process's own group and every group above it; version 1: the memory controller's."""
    (tmp_path / "pod" / "job").mkdir(parents=True)
    (tmp_path / "pod" / "job" / "memory.max").write_text("max\n")
    (tmp_path / "pod" / "memory.max").write_text(f"{2 * GIB}\n")
    assert memory_limits(tmp_path, "0::/pod/job\n") == [2 * GIB]
    assert host_memory_bytes(cgroup=tmp_path, membership="0::/pod/job\n") == 2 * GIB
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert memory_limits(tmp_path, "9:cpu:/pod\n4:memory:/job\n0::/\n") == [GIB]
    assert memory_limits(tmp_path, "") == []


def test_cores_of_a_container(tmp_path):
    """Of the process's own group and of every group above it."""
    (tmp_path / "pod" / "job").mkdir(parents=True)
    unlimited = cpu_cores(cgroup=tmp_path, membership="0::/pod/job\n")
    assert unlimited >= 1
    (tmp_path / "pod" / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "pod" / "job" / "cpu.max").write_text("max 100000\n")
    assert cpu_cores(cgroup=tmp_path, membership="0::/pod/job\n") == 1
    assert cpu_cores(cgroup=tmp_path, membership="0::/\n") == unlimited


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 fma", True),
        ("flags\t\t: amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: a bf16-less one", False),
    ],
)
def test_bf16_instructions_are_read_from_the_flags(tmp_path, line, there):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert has_bf16_products(cpuinfo=tmp_path / "cpuinfo") is there
    assert not has_bf16_products(cpuinfo=tmp_path / "missing")


def test_detection_does_not_import_torch():
    program = (
        "import sys; from fitune.measure.hardware import detect_hardware, describe_hardware;"
        "detect_hardware(use_gpus=False); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_processes_on_processors_of_several_nodes_have_the_named_network():
    two = resolve_hardware(gpu="cpu", gpus=2, nodes=2, host_memory_bytes=4 * GIB, internode_bandwidth=50e9)
    assert (two.internode_bandwidth, two.gpu.memory_bytes, two.num_gpus) == (50e9, 2 * GIB, 4)


def test_figures_replace_a_name_or_its_figures():
    figures = GpuFigures(memory_bytes=24 * GIB, flops=165e12, bandwidth=1e12)
    unnamed = resolve_hardware(gpus=2, nodes=2, figures=figures, internode_bandwidth=50e9)
    assert (unnamed.gpu.memory_bytes, unnamed.num_gpus, unnamed.internode_bandwidth) == (24 * GIB, 4, 50e9)
    more = resolve_hardware(gpu="rtx-4090", figures=GpuFigures(memory_bytes=48 * GIB))
    assert (more.gpu.name, more.gpu.memory_bytes) == ("rtx-4090", 48 * GIB)
    with pytest.raises(HardwareError, match="gpu is cpu"):
        resolve_hardware(gpu="cpu", figures=figures)


def test_a_device_that_shares_its_memory_leaves_the_rest_to_the_host():
    orin = resolve_hardware(gpu="jetson-agx-orin-64gb")
    assert orin.gpu.memory_bytes + orin.host_memory_bytes == 64 * GIB
