"""Every key of a recipe by group, with one line for people: what ``--help`` prints and ``fitune init`` writes."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

from fitune.spec.quantisers import QUANTISERS
from fitune.spec.recipe.aliases import ALIASES
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.recipe.strict_yaml import kinds_of

GROUPS: dict[str, dict[str, str]] = {
    "Model and method": {
        "model": "A folder, a name on the Hub, or a config.json",
        "tuning": "How to train; chosen: the best quality that fits",
        "precision": "Type of weights and arithmetic; bf16-master: fp32 masters too",
        "lora_r": "Rank of the adapters",
        "lora_alpha": "Adapters are scaled by alpha / r; chosen: 2 · r",
        "lora_dropout": "Share of an adapter's inputs that is dropped",
        "lora_target_modules": "Linears that get adapters: names or patterns",
        "lora_layers": "Blocks that get adapters: 24-31; empty is all",
        "lora_modules_to_save": "Tables trained whole beside adapters: embed_tokens, lm_head",
        "added_tokens": "New tokens, each with a row in the embedding",
        "dora": "DoRA: train a weight's magnitude apart from its direction",
        "rslora": "Scale adapters by alpha / √r",
        "quantization": f"Pack the frozen base: {', '.join(QUANTISERS)} or none",
        "quantization_bits": "Bits of a packed weight; other than 4: hqq",
        "quantization_group_size": "Weights with one scale (hqq)",
        "double_quantization": "Pack the scales, too (nf4)",
    },
    "Hardware": {
        "gpu": "A GPU by name (rtx-4090), or cpu; chosen: what is here",
        "gpu_memory": "Memory of a GPU that has no name here: 24GiB",
        "gpu_flops": "Its dense bf16 FLOP/s",
        "gpu_bandwidth": "Its memory bandwidth: 1008GB/s",
        "interconnect": "Bandwidth between the GPUs of a node, one direction: 64GB/s",
        "node_network": "Bandwidth between nodes: 400Gbit/s",
        "gpus": "GPUs of a node; without gpu all of one kind that are here",
        "nodes": "Machines",
        "host_memory": "Memory of a node: 128GiB",
        "nvme_path": "A folder on NVMe for what is offloaded there",
        "nvme_size": "Room in nvme_path: 2TiB",
        "price_per_gpu_hour": "US dollars; chosen: a market price, assumed and shown",
        "objective": "What to optimise the plan for",
    },
    "Data": {
        "data": "Files, folders, URLs, names on the Hub; FILE#500 takes 500",
        "data_weights": "One for each source: 2 repeats its rows, 0.5 takes half",
        "columns": "Of other names: prompt=question,completion=best_reply",
        "eval_data": "Rows to evaluate on",
        "val_fraction": "Share of the rows held out to evaluate on",
        "chat_template": "A Jinja file; left out: the tokenizer's own",
        "chat_template_date": "Day that the template writes: 2026-01-31; else 2024-07-26",
        "train_on_prompt": "Learn prompts, too, not only answers",
        "train_on_empty_thinking": "Learn the empty <think> blocks that a template puts in",
        "packing": "Put several rows into one of seq_len tokens",
        "on_bad_row": "When a row cannot be read",
        "on_long_row": "When a row is longer than seq_len",
        "cache_dir": "Where tokenised rows are kept",
        "allow_https": "Fetch data from https:// addresses",
        "allow_private_addresses": "Also without encryption: http://",
    },
    "Batches": {
        "seq_len": "Longest row in tokens",
        "mean_row_tokens": "Mean tokens of a row, for speeds; chosen: from the data",
        "micro_batch_size": "Rows on a device at once",
        "gradient_accumulation_steps": "Micro-batches in a step",
        "global_batch_size": "Rows in a step on all devices; chosen: near 16",
    },
    "Optimizer and schedule": {
        "optimizer": "Update rule",
        "optimizer_in_backward": "Update each weight as soon as its gradient is there",
        "learning_rate": "Peak learning rate; chosen: by tuning and optimizer",
        "lr_scheduler": "How the learning rate falls",
        "min_lr_ratio": "Share of the learning rate that it falls to",
        "warmup_steps": "Steps over which the learning rate rises",
        "warmup_ratio": "Steps of the rise as a share of all steps",
        "weight_decay": "Share of a weight, times the rate, taken off each step",
        "adam_beta1": "Decay of AdamW's first moment",
        "adam_beta2": "Decay of AdamW's second moment",
        "adam_epsilon": "Added to AdamW's denominator",
        "momentum": "With optimizer: momentum",
        "max_grad_norm": "Clip the gradient's norm to this; 0 is off",
        "max_grad_value": "Clip each entry of the gradient (LOMO, optimizer_in_backward)",
        "num_epochs": "Passes over the data",
        "max_steps": "Stop after so many steps, whatever num_epochs says",
        "seed": "Seed of every random draw",
    },
    "Several devices and offload": {
        "zero": "0 is DDP; 1 divides states, 2 also gradients, 3 also weights",
        "backend": "Library that divides: FSDP2 or DeepSpeed",
        "hybrid_sharding": "Divide within each node, replicate across nodes",
        "deepspeed": "Path of a ds_config.json",
        "offload_parameters": "Where weights wait",
        "offload_optimizer": "Where optimizer states wait",
        "offload_activations": "Where activations wait for the backward pass",
    },
    "Memory": {
        "gradient_checkpointing": "Recompute activations: true, false, or of how many blocks",
        "loss": "Chunked never holds all logits at once",
        "loss_chunk_tokens": "Tokens in a chunk of the loss",
        "attn_implementation": "Kernel of attention",
    },
    "Speed on request": {
        "kernels": "liger: fused norms, MLPs, rotary positions and loss",
        "torch_compile": "Compile the blocks",
        "tf32": "With precision fp32: products of 10 bits, on Ampere and newer",
    },
    "Output": {
        "output_dir": "Folder of the run, or a URL; chosen: runs/MODEL-TUNING",
        "upload_to": "A URL that gets checkpoints, export and report, too",
        "resume": "Go on from the newest checkpoint, or from a path or URL",
        "log_steps": "Print a line every so many steps",
        "eval_steps": "Evaluate every so many steps; 0: never",
        "evals_per_epoch": "Evaluations per epoch",
        "save_steps": "Save a checkpoint every so many steps; 0: never",
        "saves_per_epoch": "Checkpoints per epoch",
        "keep_checkpoints": "Number of newest checkpoints that are kept",
        "async_save": "Write checkpoints while training goes on",
        "export": "What is written at the end",
        "push_to_hub": "OWNER/NAME on the Hub that gets the export; private",
        "hub_public": "Let everybody read what push_to_hub sends",
        "samples": "Answers before and after training shown in the report",
    },
    "Trackers": {
        "report_to": "Also log to: wandb, mlflow, comet, tensorboard",
        "run_name": "Name of the run there; chosen: that of output_dir",
        "track_project": "Project (wandb, Comet) or experiment (MLflow); chosen: fitune",
        "track_team": "Entity (wandb) or workspace (Comet)",
        "track_server": "Tracking URI of MLflow",
        "track_id": "A run there to go on with",
        "track_offline": "Keep what wandb and Comet would get, to be sent later",
    },
}  # fmt: skip
"""Group -> key -> what it is, in the order of Recipe."""

SWITCH = ("true", "false")


@dataclass(frozen=True, slots=True)
class Key:
    """One key: values it takes, if few, and its default as text, if it has one."""

    name: str
    about: str
    values: tuple[str, ...]
    default: str

    @property
    def option(self) -> str:
        """As the command line spells it: ``--seq-len`` for ``seq_len``."""
        return f"--{self.name.replace('_', '-')}"


def keys_of(group: str) -> Iterator[Key]:
    """The keys of a group in order."""
    for name, about in GROUPS[group].items():
        field = Recipe.model_fields[name]
        kinds = [kind for kind in kinds_of(field.annotation) if kind is not NoneType]
        # Values are named where a key takes few: none for a number or a text.
        values = () if any(isinstance(kind, type) for kind in kinds) else tuple(map(str, kinds))
        yield Key(name, about, SWITCH if kinds == [bool] else values, _default(field))


def all_keys() -> Iterator[Key]:
    """The keys of all groups, in the order of ``--help``."""
    for group in GROUPS:
        yield from keys_of(group)


def _default(field: Any) -> str:
    default = field.default
    if field.is_required():
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return ", ".join(default)
    return f"{default:g}" if isinstance(default, float) else "" if default in (None, {}) else str(default)


def values_of(option: str) -> tuple[str, ...]:
    """Values of the key that is typed as ``--gpu``: known models, cards, or the few that it takes; else none."""
    name = option.lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name == "model":
        from fitune.spec.model.known_models import known_model_names

        return known_model_names()
    if name == "gpu":
        from fitune.spec.machines.gpus import gpu_names

        return gpu_names()
    return {key.name: key.values for key in all_keys()}.get(name, ())
