"""GPUs that are not there."""

from types import SimpleNamespace

import pytest
import torch

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.fixture
def torch_sees(monkeypatch):
    """Lets torch see these GPUs, with kernels for ``architectures``."""

    def sees(*cards, architectures=CU130):
        found = [
            SimpleNamespace(
                name=each.name, total_memory=each.memory_bytes, uuid=each.uuid.removeprefix("GPU-"),
                major=each.capability[0], minor=each.capability[1],
            )
            for each in cards
        ]  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(architectures))

    return sees
