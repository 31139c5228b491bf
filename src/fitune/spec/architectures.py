"""Architectures without formulas that training was held against transformers' own forward for."""

from fitune.spec.model import ModelSpec

EQUAL_TO_TRANSFORMERS = frozenset(("cohere", "gpt_neox", "granite", "olmo2", "starcoder2"))
"""Values of model_type: a small random model of each has the losses and gradients of transformers' own forward, fully
trained, with LoRA and with LoRA on NF4 (bench/architectures.py)."""


def trains_like_transformers(model: ModelSpec) -> bool:
    """True if its way through fitune was compared with transformers' own."""
    return not model.is_traced or model.model_type in EQUAL_TO_TRANSFORMERS
