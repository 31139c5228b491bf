"""A recipe as keyword arguments of Python: the settings of ``Recipe`` for editors and type checkers."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from fitune.errors import RecipeError
from fitune.session.recipes.foreign_recipes import recipe_of_keys
from fitune.spec.plan import Attention, Backend, Kernels, Place
from fitune.spec.recipe.recipe import Recipe, canonical_keys, given_keys, parse_recipe
from fitune.spec.recipe.strict_yaml import load_yaml

logger = logging.getLogger(__name__)

Names: TypeAlias = str | Sequence[str]
"""A list, or a text with commas."""
Size: TypeAlias = int | str
"""Bytes, or ``"128GiB"``."""
Bandwidth: TypeAlias = float | str
"""Bytes/s, or ``"1008GB/s"``."""
PathLike: TypeAlias = str | os.PathLike[str]
RecipeLike: TypeAlias = PathLike | Recipe | Mapping[str, Any]
"""A YAML file, a recipe that was read already, or a mapping of keys."""
Source: TypeAlias = PathLike | Mapping[str, Any]
"""A path or Hub id, or the fields of ``SourceRecipe``."""
Sources: TypeAlias = Source | Sequence[Source]


class RecipeKeys(TypedDict, total=False):
    """Every key of a recipe. None leaves a setting to the planner, as a key that is not given does."""

    model: PathLike
    tuning: Literal["full", "lora", "qlora", "lomo", "adalomo"] | None
    precision: Literal["fp32", "bf16", "bf16-master", "fp16"] | None
    lora_r: int
    lora_alpha: int | None
    lora_dropout: float
    lora_target_modules: Names
    lora_layers: str | Sequence[int]
    lora_modules_to_save: Names
    added_tokens: Names
    dora: bool
    rslora: bool
    quantization: str | None
    quantization_bits: Literal[2, 3, 4, 8] | None
    quantization_group_size: int
    double_quantization: bool

    gpu: str | None
    gpu_memory: Size | None
    gpu_flops: float | None
    gpu_bandwidth: Bandwidth | None
    interconnect: Bandwidth | None
    node_network: Bandwidth | None
    gpus: int | None
    nodes: int
    host_memory: Size | None
    nvme_path: PathLike
    nvme_size: Size | None
    price_per_gpu_hour: float | None
    objective: Literal["fastest", "cheapest", "least-memory"]

    data: Sources
    data_weights: Sequence[float]
    columns: Mapping[Literal["system", "prompt", "completion", "text", "messages", "tools"], str]
    eval_data: Sources
    val_fraction: float
    chat_template: PathLike
    chat_template_date: str
    train_on_prompt: bool
    train_on_empty_thinking: bool
    packing: bool
    on_bad_row: Literal["error", "skip"]
    on_long_row: Literal["truncate", "drop", "split", "error"]
    cache_dir: PathLike
    allow_https: bool
    allow_private_addresses: bool

    seq_len: int
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    global_batch_size: int | None

    optimizer: Literal["adamw", "adamw-8bit", "sgd", "momentum"]
    optimizer_in_backward: bool
    learning_rate: float | None
    lr_scheduler: Literal["constant", "linear", "cosine"]
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
    backend: Backend | None
    hybrid_sharding: bool | None
    deepspeed: PathLike | Mapping[str, int | bool | Mapping[str, Any]]
    offload_parameters: Place | None
    offload_optimizer: Place | None
    offload_activations: Place | None

    gradient_checkpointing: bool | int | None
    loss: Literal["plain", "chunked"] | None
    loss_chunk_tokens: int | None
    attn_implementation: Attention | None

    kernels: Kernels
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
    export: Literal["adapter", "merged", "full"] | None
    samples: int

    report_to: Names
    run_name: str
    track_project: str
    track_team: str
    track_server: str
    track_id: str
    track_offline: bool


def recipe_of(recipe: RecipeLike | None, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a YAML file, of a mapping like one, or one that was read already, with ``settings`` on top.

    A recipe of another trainer is understood as in a file; what became of its keys is logged. Raises RecipeError.
    """
    asked = canonical_keys({key: _plain(value) for key, value in settings.items()}, where="the keywords")
    if isinstance(recipe, Recipe):
        return parse_recipe({**given_keys(recipe), **asked}, where="the recipe")
    if recipe is None:
        if not asked.get("model"):
            raise RecipeError("the keywords: no model is named", hint='model="meta-llama/Llama-3.1-8B"')
        return parse_recipe(asked, where="the keywords")
    if isinstance(recipe, Mapping):
        raw, where, folder = {key: _plain(value) for key, value in recipe.items()}, "the recipe", Path(".")
    elif isinstance(recipe, str | os.PathLike):
        raw, where, folder = load_yaml(Path(recipe)), str(recipe), Path(recipe).parent
    else:
        raise RecipeError(
            f"a recipe cannot be read from {recipe!r}", hint="a path, a mapping, keywords, or a Recipe"
        )
    read = recipe_of_keys(raw, where=where, folder=folder, options=asked)
    for line in read.notes:
        logger.info(line)
    return read.recipe


def _plain(value: Any) -> Any:
    """Values as YAML has them: paths are texts, sequences are lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
