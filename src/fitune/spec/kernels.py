"""Which families Liger's fused kernels fit. Known without torch."""

from fitune.spec.hardware import Gpu
from fitune.spec.model import ModelSpec

_TRITON = (7, 0)
"""The oldest compute capability that Triton, which they are written in, compiles for."""

LIGER_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
"""RMSNorm, rotary positions over the whole head and, but for mixtures of experts, a gated MLP."""


def liger_refused_by_device(gpu: Gpu) -> str | None:
    """Why Liger's kernels do not run on this device, or None."""
    if gpu.capability >= _TRITON:
        return None
    where = "a CPU" if gpu.is_cpu else f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})"
    return f"they are Triton kernels, which run on GPUs of compute capability 7.0 and newer, not on {where}"


def liger_refused_by_model(model: ModelSpec) -> str | None:
    """Why Liger's kernels do not fit this model, or None."""
    if model.model_type not in LIGER_FAMILIES:
        return f"Liger's kernels are for {', '.join(LIGER_FAMILIES)}; {model.name} is {model.model_type}"
    return None
