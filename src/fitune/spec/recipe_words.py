"""The words of other frameworks and what they mean here: names of settings, their values, switches."""

from typing import Any

from fitune.errors import RecipeError

ALIASES = {
    "base_model": "model", "model_name_or_path": "model", "model_name": "model",
    "finetuning_type": "tuning", "adapter": "tuning", "train_type": "tuning", "tuner_type": "tuning",
    "lr": "learning_rate",
    "per_device_train_batch_size": "micro_batch_size", "batch_size": "micro_batch_size",
    "max_length": "seq_len", "max_seq_length": "seq_len", "max_seq_len": "seq_len",
    "sequence_len": "seq_len", "cutoff_len": "seq_len", "context_length": "seq_len",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules", "target_modules": "lora_target_modules",
    "num_train_epochs": "num_epochs", "epochs": "num_epochs",
    "recompute": "gradient_checkpointing", "enable_activation_checkpointing": "gradient_checkpointing",
    "flash_attn": "attn_implementation", "attn_impl": "attn_implementation",
    "attention_implementation": "attn_implementation",
    "out_dir": "output_dir", "output_directory": "output_dir",
    "resume_from_checkpoint": "resume",
    "logger": "report_to", "tracker": "report_to", "log_to": "report_to",
    "val_size": "val_fraction", "val_set_size": "val_fraction", "validation_size": "val_fraction",
    "split_dataset_ratio": "val_fraction",
    "dataset": "data", "datasets": "data", "train_data": "data",
    "eval_dataset": "eval_data", "val_data": "eval_data",
    "lr_scheduler_type": "lr_scheduler", "scheduler": "lr_scheduler",
    "optim": "optimizer",
    "gradient_clipping": "max_grad_norm", "grad_clip": "max_grad_norm",
    "save_total_limit": "keep_checkpoints",
    "sample_packing": "packing",
    "logging_steps": "log_steps",
    "dtype": "precision", "torch_dtype": "precision",
    "chat_template_path": "chat_template",
    "train_on_inputs": "train_on_prompt",
}  # fmt: skip
"""Other frameworks' name -> ours."""

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "precision": {
        "float32": "fp32", "32": "fp32", "bfloat16": "bf16", "pure_bf16": "bf16", "float16": "fp16",
        "bf16-mixed": "bf16-master", "bf16_master": "bf16-master",
    },
    "optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adam": "adamw",
        "sgd_momentum": "momentum", "momentum_sgd": "momentum",
    },
    "attn_implementation": {
        "flash_attention_2": "flash", "fa2": "flash", "flash_attention": "flash", "true": "flash",
        "disabled": "eager", "false": "sdpa",
    },
    "lr_scheduler": {"constant_with_warmup": "constant", "cosine_with_warmup": "cosine"},
    "tuning": {"full_finetune": "full", "full-finetune": "full", "none": "full"},
}  # fmt: skip
"""Setting -> other frameworks' value -> ours."""

SWITCHES: dict[str, tuple[str, str]] = {
    "bf16": ("precision", "bf16-master"),
    "fp16": ("precision", "fp16"),
    "pure_bf16": ("precision", "bf16"),
    "load_in_4bit": ("tuning", "qlora"),
    "quantization_bit": ("tuning", "qlora"),
}
"""Switches of other frameworks: the setting and the value they stand for when they are on."""

PLANNED_TUNINGS = ("qlora", "lomo", "adalomo")
"""Methods people will ask for by name; refused by name until they exist."""


def canonical_value(name: str, value: Any) -> Any:
    """Another framework's value of the setting ``name`` in our words; anything else as it is."""
    if name == "lora_target_modules" and value == "all":
        return ["all-linear"]
    if name not in VALUE_ALIASES or not isinstance(value, str | bool | int):
        return value
    text = str(value).lower()
    return VALUE_ALIASES[name].get(text, text)


def read_switch(key: str, value: Any, *, where: str) -> tuple[str, str] | None:
    """The setting and value a switch stands for, None when it is off. Raises RecipeError for anything else."""
    on, off = ("4", "none") if key == "quantization_bit" else ("true", "false")
    text = str(value).lower()
    if text == on:
        return SWITCHES[key]
    if text in (off, "none", "auto"):
        return None
    raise RecipeError(f"{where}: {key} = {value!r}: expected {on} or {off}")
