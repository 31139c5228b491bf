"""A recipe's keys and values under the names of other frameworks."""

from typing import Any

from fitune.errors import RecipeError

ALIASES = {
    "base_model": "model", "model_name_or_path": "model", "model_name": "model",
    "finetuning_type": "tuning", "adapter": "tuning", "train_type": "tuning", "tuner_type": "tuning",
    "method": "tuning",
    "lr": "learning_rate",
    "per_device_train_batch_size": "micro_batch_size", "batch_size": "micro_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps", "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "num_gpus": "gpus", "n_gpus": "gpus", "nproc_per_node": "gpus", "num_nodes": "nodes", "nnodes": "nodes",
    "vram": "gpu_memory",
    "max_length": "seq_len", "max_seq_length": "seq_len", "max_seq_len": "seq_len",
    "seq_length": "seq_len",
    "sequence_len": "seq_len", "cutoff_len": "seq_len", "context_length": "seq_len",
    "lora_rank": "lora_r", "rank": "lora_r", "use_dora": "dora", "peft_use_dora": "dora",
    "use_rslora": "rslora", "peft_use_rslora": "rslora",
    "layers_to_transform": "lora_layers", "peft_layers_to_transform": "lora_layers",
    "lora_layers_to_transform": "lora_layers",
    "tokens": "added_tokens", "add_tokens": "added_tokens",
    "modules_to_save": "lora_modules_to_save", "additional_target": "lora_modules_to_save",
    "quantization_method": "quantization", "quant_method": "quantization", "bnb_4bit_quant_type": "quantization",
    "quantization_bit": "quantization_bits", "group_size": "quantization_group_size",
    "bnb_4bit_use_double_quant": "double_quantization", "double_quant": "double_quantization",
    "zero_stage": "zero", "sharding_backend": "backend", "hybrid_shard": "hybrid_sharding",
    "offload_params": "offload_parameters", "fsdp_offload_params": "offload_parameters",
    "activation_offloading": "offload_activations", "enable_activation_offloading": "offload_activations",
    "nvme_offload_path": "nvme_path", "clip_grad_value": "max_grad_value",
    "lora_target": "lora_target_modules", "target_modules": "lora_target_modules",
    "num_train_epochs": "num_epochs", "epochs": "num_epochs",
    "recompute": "gradient_checkpointing", "enable_activation_checkpointing": "gradient_checkpointing",
    "flash_attn": "attn_implementation", "attn_impl": "attn_implementation",
    "attention_implementation": "attn_implementation",
    "compile": "torch_compile", "use_torch_compile": "torch_compile",
    "out": "output_dir", "output": "output_dir", "output_path": "output_dir", "save_dir": "output_dir",
    "out_dir": "output_dir", "output_directory": "output_dir", "save_folder": "output_dir",
    "remote_dir": "upload_to", "storage_path": "upload_to", "ray_storage_path": "upload_to",
    "hub_model_id": "push_to_hub",
    "resume_from_checkpoint": "resume",
    "logger": "report_to", "tracker": "report_to", "log_to": "report_to",
    "wandb_project": "track_project", "mlflow_experiment_name": "track_project", "comet_project_name": "track_project",
    "wandb_entity": "track_team", "comet_workspace": "track_team", "mlflow_tracking_uri": "track_server",
    "wandb_name": "run_name", "wandb_run_name": "run_name", "mlflow_run_name": "run_name", "wandb_run_id": "track_id",
    "val_size": "val_fraction", "val_set_size": "val_fraction", "validation_size": "val_fraction",
    "split_dataset_ratio": "val_fraction",
    "dataset": "data", "datasets": "data", "train_data": "data",
    "train_file": "data", "data_path": "data", "dataset_path": "data",
    "eval_dataset": "eval_data", "val_data": "eval_data", "eval_file": "eval_data", "validation_file": "eval_data",
    "lr_scheduler_type": "lr_scheduler", "scheduler": "lr_scheduler",
    "cosine_min_lr_ratio": "min_lr_ratio", "min_lr_rate": "min_lr_ratio",
    "optim": "optimizer", "optimizer_in_bwd": "optimizer_in_backward",
    "gradient_clipping": "max_grad_norm", "grad_clip": "max_grad_norm",
    "save_total_limit": "keep_checkpoints",
    "sample_packing": "packing",
    "logging_steps": "log_steps",
    "dtype": "precision", "torch_dtype": "precision",
    "chat_template_path": "chat_template",
    "train_on_inputs": "train_on_prompt",
}  # fmt: skip
"""Other frameworks' name -> ours."""

_PLACES = {"true": "cpu", "false": "device", "none": "device", "disk": "nvme"}

VALUE_ALIASES: dict[str, dict[str, str]] = {
    "precision": {
        "float32": "fp32", "32": "fp32", "bfloat16": "bf16", "pure_bf16": "bf16", "float16": "fp16",
        "bf16-mixed": "bf16-master", "bf16_master": "bf16-master",
    },
    "optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
        "sgd_momentum": "momentum", "momentum_sgd": "momentum",
        "adamw_8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit", "adamw8bit": "adamw-8bit",
    },
    "attn_implementation": {
        "flash_attention_2": "flash", "fa2": "flash", "flash_attention": "flash", "true": "flash",
        "disabled": "eager", "false": "sdpa",
    },
    "lr_scheduler": {"constant_with_warmup": "constant", "cosine_with_warmup": "cosine"},
    "quantization": {"bnb": "nf4", "bitsandbytes": "nf4"},
    "offload_parameters": _PLACES, "offload_optimizer": _PLACES, "offload_activations": _PLACES,
    "objective": {"least_memory": "least-memory"},
    "tuning": {"full_finetune": "full", "full-finetune": "full", "none": "full", "4bit": "qlora", "4-bit": "qlora"},
}  # fmt: skip
"""Setting -> other frameworks' value -> ours."""

SWITCHES: dict[str, tuple[str, str]] = {
    "bf16": ("precision", "bf16-master"),
    "fp16": ("precision", "fp16"),
    "pure_bf16": ("precision", "bf16"),
    "load_in_4bit": ("quantization", "nf4"),
    "lora_target_linear": ("lora_target_modules", "all-linear"),
    "use_liger_kernel": ("kernels", "liger"),
    "enable_liger_kernel": ("kernels", "liger"),
    "use_liger": ("kernels", "liger"),
}
"""Switches of other frameworks: the setting and the value they stand for when they are on."""

FOREIGN_FILES = {
    "hub_private_repo": "what is pushed is private; hub_public: true lets everybody read it",
    "fsdp": "zero: 3, backend: fsdp, offload_parameters: cpu; what is left open is planned",
    "lr_scheduler_kwargs": "lr_scheduler: cosine with min_lr_ratio, the share of learning_rate that it falls to",
    "lora": "tuning: lora; lora_r, lora_alpha, lora_dropout and lora_target_modules are keys beside it",
    "qlora": "tuning: qlora; lora_r, lora_alpha, lora_dropout and lora_target_modules are keys beside it",
    "wandb": "report_to: wandb; track_project and run_name say where",
    "save_strategy": "save_steps or saves_per_epoch (1: once an epoch)",
    "eval_strategy": "eval_steps or evals_per_epoch (1: once an epoch)",
    "evaluation_strategy": "eval_steps or evals_per_epoch (1: once an epoch)",
    "test_size": "val_fraction",
    "export_dir": "fitune export folds an adapter that was trained into its base",
    "no_packing": "packing: false",
    "load_in_8bit": "tuning: qlora, quantization: hqq, quantization_bits: 8",
    "fsdp_config": "zero: 3, backend: fsdp, offload_parameters: cpu; what is left open is planned",
    **dict.fromkeys(
        (
            "plugins",
            "liger_rms_norm",
            "liger_rope",
            "liger_glu_activation",
            "liger_swiglu",
            "liger_layer_norm",
        ),
        "kernels: liger, which replaces norms, gated MLPs, rotary positions and the loss together",
    ),
    "liger_fused_linear_cross_entropy": "loss: chunked, on any device; with kernels: liger in one kernel",
}
"""Settings of other frameworks that name a configuration of their own, and what says the same here."""


_PAGED = (
    "paged states are not in this version: optimizer: adamw-8bit keeps them small on the device, optimizer: adamw with "
    "offload_optimizer: cpu keeps them on the host"
)
FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {
        **dict.fromkeys(
            (
                "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit", "paged_lion", "paged_lion_32bit",
                "paged_lion_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit",
            ),
            _PAGED,
        ),
        "adam": "optimizer: adamw, which decays weights beside the gradient (the same while weight_decay is 0)",
        "lomo": "tuning: lomo", "adalomo": "tuning: adalomo",
        "adamw_torch_8bit": "optimizer: adamw-8bit, by bitsandbytes",
        "adamw_torch_4bit": "optimizer: adamw-8bit, by bitsandbytes",
        "adamw_anyprecision": "optimizer: adamw with precision: bf16, whose states are bf16",
    },
    "lr_scheduler": dict.fromkeys(
        ("cosine_with_min_lr", "cosine_warmup_with_min_lr"),
        "lr_scheduler: cosine with min_lr_ratio, the share of learning_rate that it falls to (min_lr_ratio: 0.1)",
    ),
}  # fmt: skip
"""Setting -> another framework's value that nothing here is the same as -> what comes nearest."""


def refuse_foreign_value(name: str, value: Any, *, where: str) -> None:
    """Raises RecipeError for a value that is known elsewhere and means nothing here."""
    nearest = FOREIGN_VALUES.get(name, {}).get(str(value).lower())
    if nearest is not None:
        raise RecipeError(f"{where}: {name}: {value} is not in this version", hint=nearest)


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
    text = str(value).lower()
    if text == "true":
        return SWITCHES[key]
    if text in ("false", "none", "auto"):
        return None
    raise RecipeError(f"{where}: {key} = {value!r}: expected true or false")
