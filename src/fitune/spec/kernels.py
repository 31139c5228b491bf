"""Which families Liger's fused kernels fit. Known without torch."""

from fitune.spec.model import ModelSpec

LIGER_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
"""RMSNorm, rotary positions over the whole head and, but for mixtures of experts, a gated MLP."""


def liger_refused_by_model(model: ModelSpec) -> str | None:
    """Why Liger's kernels do not fit this model, or None."""
    if model.model_type not in LIGER_FAMILIES:
        return f"Liger's kernels are for {', '.join(LIGER_FAMILIES)}; {model.name} is {model.model_type}"
    return None
