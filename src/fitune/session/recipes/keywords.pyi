"""The keys of a recipe as keyword arguments, for editors and type checkers. Written by bench/keywords.py."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from fitune.recipe.recipe import Recipe

PathLike: TypeAlias = str | os.PathLike[str]
RecipeLike: TypeAlias = PathLike | Recipe | Mapping[str, Any]
"""A YAML file, a recipe that was read already, or a mapping of keys."""

class RecipeKeys(TypedDict, total=False):
    """Every key of a recipe. None leaves a setting to the planner, as a key that is not given does."""

    model: PathLike
    tuning: Literal["adalomo", "full", "lomo", "lora", "qlora"] | None
    precision: Literal["bf16", "bf16-master", "fp16", "fp32"] | None
    lora_r: int
    lora_alpha: int | None
    lora_dropout: float
    lora_target_modules: str | Sequence[str]
    lora_layers: str | int | Sequence[int]
    lora_modules_to_save: str | Sequence[str]
    added_tokens: str | Sequence[str]
    dora: bool
    rslora: bool
    quantization: str | None
    quantization_bits: Literal[2, 3, 4, 8] | None
    quantization_group_size: int
    double_quantization: bool
    gpu: str | None
    gpu_memory: int | str | None
    gpu_flops: float | None
    gpu_bandwidth: float | str | None
    interconnect: float | str | None
    node_network: float | str | None
    gpus: int | None
    nodes: int
    host_memory: int | str | None
    nvme_path: PathLike
    nvme_size: int | str | None
    price_per_gpu_hour: float | None
    objective: Literal["cheapest", "fastest", "least-memory"]
    data: PathLike | Mapping[str, Any] | Sequence[PathLike | Mapping[str, Any]]
    data_weights: str | float | Sequence[float]
    columns: PathLike | Mapping[Literal["completion", "messages", "prompt", "system", "text", "tools"], Any]
    eval_data: PathLike | Mapping[str, Any] | Sequence[PathLike | Mapping[str, Any]]
    val_fraction: int | float
    chat_template: PathLike
    chat_template_date: str
    train_on_prompt: bool
    train_on_empty_thinking: bool
    packing: bool
    on_bad_row: Literal["error", "skip"]
    on_long_row: Literal["drop", "error", "split", "truncate"]
    cache_dir: PathLike
    allow_https: bool
    allow_private_addresses: bool
    seq_len: int
    mean_row_tokens: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    global_batch_size: int | None
    optimizer: Literal["adamw", "adamw-8bit", "momentum", "sgd"]
    optimizer_in_backward: bool
    learning_rate: float | None
    lr_scheduler: Literal["constant", "cosine", "linear"]
    min_lr_ratio: float
    warmup_steps: int | None
    warmup_ratio: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    momentum: float
    max_grad_norm: float
    max_grad_value: float | None
    num_epochs: float
    max_steps: int | None
    seed: int
    zero: Literal[0, 1, 2, 3] | None
    backend: Literal["deepspeed", "fsdp"] | None
    hybrid_sharding: bool | None
    deepspeed: PathLike | Mapping[str, Any]
    offload_parameters: Literal["cpu", "device", "nvme"] | None
    offload_optimizer: Literal["cpu", "device", "nvme"] | None
    offload_activations: Literal["cpu", "device", "nvme"] | None
    gradient_checkpointing: bool | int | None
    loss: Literal["chunked", "plain"] | None
    loss_chunk_tokens: int | None
    attn_implementation: Literal["eager", "flash", "sdpa"] | None
    kernels: Literal["liger", "torch"]
    torch_compile: bool
    tf32: bool
    output_dir: PathLike | None
    upload_to: PathLike
    resume: bool | PathLike
    log_steps: int
    eval_steps: int
    evals_per_epoch: int
    save_steps: int | None
    saves_per_epoch: int | None
    keep_checkpoints: int
    async_save: bool | None
    export: Literal["adapter", "full", "merged"] | None
    push_to_hub: str
    hub_public: bool
    samples: int
    report_to: str | Sequence[str]
    run_name: str
    track_project: str
    track_team: str
    track_server: str
    track_id: str
    track_offline: bool

class ScoreKeys(TypedDict, total=False):
    """Keys of a scoring beside those that have a place of their own. None leaves a setting as it is by itself."""

    shots: int | None
    limit: int | None
    adapter: PathLike
    columns: PathLike | Mapping[str, Any]
    graders: str | Sequence[str]
    max_new_tokens: int
    batch_size: int | None
    temperature: float
    top_p: float
    seed: int
    chat_template: PathLike
    id_column: str
    engine: Literal["server", "transformers", "vllm"] | None
    url: str
    served_model: str
    allow_https: bool
    allow_private_addresses: bool
