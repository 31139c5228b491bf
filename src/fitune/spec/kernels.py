"""Which models and devices the fused kernels fit: FlashAttention and Liger's. Known without torch."""

from fitune.spec.hardware import Gpu
from fitune.spec.model import ModelSpec

_TRITON = (7, 0)
"""The oldest compute capability that Triton, which Liger's kernels are written in, compiles for."""

LIGER_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
"""RMSNorm, rotary positions and, but for mixtures of experts, a gated MLP."""


_LIGER_PRODUCTS = ("silu", "swish", "gelu_pytorch_tanh")
"""Activations, the last not where one linear makes gate and up (Phi-3)."""


def flash_refused_by_device(gpu: Gpu) -> str | None:
    """Why FlashAttention does not run on this device, or None."""
    if gpu.is_cpu:
        return "FlashAttention runs on GPUs"
    if not gpu.has_flash_attention:
        return (
            f"FlashAttention-2 needs compute capability 8.0 or newer (Ampere), and {gpu.name} has "
            f"{capability_words(gpu)}"
        )
    return None


def flash_refused_by_model(model: ModelSpec, gpu: Gpu) -> str | None:
    """Why the FlashAttention kernel cannot compute this model's attention on ``gpu``, which has it, or None."""
    if model.model_type == "falcon":
        return "Falcon's attention takes a mask over the whole stream, which the kernel does not"
    if model.caps_scores:
        return f"{model.name} caps its attention scores, which no fused kernel does"
    if model.head_dim > 256:
        return f"heads of {model.head_dim} are larger than the 256 the kernel takes"
    if model.head_dim % 8:
        return f"heads of {model.head_dim} are no multiple of the 8 the kernel takes"
    # torch refuses to train these: check_requires_grad_and_head_dim_gt192_constraints in its sdp_utils.cpp
    if gpu.capability in ((8, 6), (8, 9)) and 192 < model.head_dim <= 224:
        return (
            f"its backward takes no heads of 193 to 224 on compute capability {capability_words(gpu)}, and "
            f"{model.name} has {model.head_dim}"
        )
    return None


def liger_refused_by_device(gpu: Gpu) -> str | None:
    """Why Liger's kernels do not run on this device, or None."""
    if gpu.capability >= _TRITON:
        return None
    where = "a CPU" if gpu.is_cpu else f"{gpu.name} ({capability_words(gpu)})"
    return f"they are Triton kernels, which run on GPUs of compute capability 7.0 and newer, not on {where}"


def liger_refused_by_model(model: ModelSpec) -> str | None:
    """Why Liger's kernels do not fit this model, or None."""
    if model.model_type not in LIGER_FAMILIES:
        return f"Liger's kernels are for {', '.join(LIGER_FAMILIES)}; {model.name} is {model.model_type}"
    products = _LIGER_PRODUCTS[:2] if model.model_type == "phi3" else _LIGER_PRODUCTS
    if not model.num_experts and model.activation not in products:
        return f"Liger's gated product is of {', '.join(products)}; {model.name} has {model.activation}"
    if model.rotary_share != 1:
        return f"Liger's kernels turn whole heads by position, and {model.name} turns {model.rotary_share:g} of each"
    return None


def capability_words(gpu: Gpu) -> str:
    """``8.6``."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}"
