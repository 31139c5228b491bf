"""The largest value of every number in a recipe: far above what anybody trains with, far below what overflows.

Lower bounds are in the types of the settings (recipe_values.py).
"""

from fitune.units import TIB

_STEPS = 1_000_000_000
"""At ten steps a second three years."""
_FP32_MAX = 3.4e38

MOST: dict[str, int | float] = {
    "lora_r": 65_536, "lora_alpha": 1_000_000, "quantization_group_size": 1_048_576,
    "gpus": 65_536, "nodes": 65_536, "host_memory": 1_024 * TIB, "nvme_size": 1_048_576 * TIB,
    "price_per_gpu_hour": 1_000_000.0,
    "seq_len": 100_000_000, "micro_batch_size": 1_000_000, "gradient_accumulation_steps": 1_000_000,
    "global_batch_size": _STEPS, "loss_chunk_tokens": _STEPS,
    "learning_rate": _FP32_MAX, "weight_decay": _FP32_MAX, "adam_epsilon": _FP32_MAX,
    "max_grad_norm": _FP32_MAX, "max_grad_value": _FP32_MAX,
    "num_epochs": 1_000_000.0, "max_steps": _STEPS, "warmup_steps": _STEPS,
    "log_steps": _STEPS, "eval_steps": _STEPS, "save_steps": _STEPS, "keep_checkpoints": 1_000_000,
    "samples": 100_000, "gradient_checkpointing": 9_999,
    # inside a source
    "sample": 1_000_000_000_000, "weight": 1_000_000.0,
}  # fmt: skip


def require_in_range(name: str, value: object) -> None:
    """Raises ValueError with the limit when the setting ``name`` has one and ``value`` is above it."""
    most = MOST.get(name)
    if most is not None and isinstance(value, int | float) and value > most:
        raise ValueError(f"must be at most {most:,}")
