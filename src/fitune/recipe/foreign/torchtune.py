"""Recipes of torchtune, known by ``_component_``: models, datasets, optimizers and rates are named by Python paths."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitune.recipe.foreign.reading import SUPERVISED, TRAINS_NOTHING, Reading, is_on, paths_of
from fitune.recipe.foreign.trainer_keys import (
    OTHER_CHECKPOINT,
    PAGED,
    SPEED_SAID,
    WITHOUT_HEADINGS,
    read_metric_logger,
)

_SAME = {
    "output_dir": "output_dir",
    "seed": "seed",
    "epochs": "num_epochs",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "log_every_n_steps": "log_steps",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "optimizer_in_bwd": "optimizer_in_backward",
}
_BOOKKEEPING = (
    "tokenizer checkpointer device log_level log_peak_memory_stats profiler batch_size_val "
    "run_val_every_n_steps save_adapter_weights_only enable_async_checkpointing "
    "cudnn_deterministic_mode save_every_n_steps loss safe_serialization"
)
_SPEED = (
    "compile low_cpu_ram custom_sharded_layers memory_efficient_fsdp_wrap ac_mode ac_option "
    "tensor_parallel_plan data_parallel_shard_dim data_parallel_replicate_dim dataloader "
    "enable_activation_offloading activation_offloading_use_streams fsdp_sharding_strategy enable_fp8_training "
    "fp8_recipe_name use_loss_parallel_ctx_manager"
)
_REFUSED = {
    "resume_from_checkpoint": OTHER_CHECKPOINT,
    "quantizer": "quantisation-aware training",
    "teacher_model": f"distillation from a teacher; {SUPERVISED}",
    "kd_ratio": f"distillation from a teacher; {SUPERVISED}",
    "reward_and_value_model": f"PPO; {SUPERVISED}",
    "policy_model": f"reinforcement learning; {SUPERVISED}",
    "early_exit_loss": "another loss (early exit)",
    "layer_dropout": "blocks left out at random",
}

_NO_TRAINING = {"tasks": "fitune score --lm-eval TASKS", "prompt": "fitune chat"}
"""Keys of torchtune's evaluations and generations, and what does it here."""

_PASSED_INSIDE = {
    "_component_ checkpoint_files recipe_checkpoint output_dir model_type should_load_recipe_state path vocab_path "
    "merges_file special_tokens_path keep_last_n_checkpoints safe_serialization log_dir filename group "
    "job_type dir tags notes": "",
    "fused foreach num_output_chunks packing_strategy split_across_pack": SPEED_SAID,
    "prompt_template": "rows are rendered by the model's chat template",
    "truncation_type": "rows are cut at their end",
    "max_seq_len": "room for positions; seq_len bounds the rows",
}
_REFUSED_INSIDE = {
    "new_system_prompt": "a system message added to every row",
    "amsgrad": "another update (AMSGrad)",
    "maximize": "steps up the loss",
    "filter_fn filter_kwargs": "rows chosen by a function",
    "adapter_checkpoint": "an adapter to go on from",
}

_DATASETS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", {"format": "alpaca"}, True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", {"format": "alpaca"}, True),
    "samsum_dataset": ("Samsung/samsum", {"format": "dialogue_summary"}, False),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", {"format": "sharegpt"}, False),
    "chat_dataset": ("", {}, False),
    "instruct_dataset": ("", {}, False),
    "text_completion_dataset": ("", {"format": "text"}, False),
}
"""Builder -> (source by default, how its rows are read, prompts are learnt by default)."""

_OPTIMIZERS = {
    "torch.optim.AdamW": ("adamw", ""),
    "bitsandbytes.optim.AdamW": ("adamw", ""),
    "bitsandbytes.optim.AdamW8bit": ("adamw-8bit", ""),
    "bitsandbytes.optim.PagedAdamW": ("adamw", PAGED),
    "bitsandbytes.optim.PagedAdamW8bit": ("adamw-8bit", PAGED),
    "torchao.optim.AdamW8bit": ("adamw-8bit", "bitsandbytes' 8-bit states, of the same size"),
    "torch.optim.SGD": ("sgd", ""),
}  # fmt: skip
_ADAMW_DECAY = 0.01
"""torch's and bitsandbytes' AdamW decay weights by this much where nobody says."""


def read_torchtune(r: Reading) -> None:
    """Reads a torchtune config: every key is put as ours, passed over or refused."""
    named = _resolve(r)
    r.same(_SAME)
    r.inside("passed", _PASSED_INSIDE)
    r.inside("refused", _REFUSED_INSIDE)
    _model(r)
    _data(r, "dataset", "data")
    _data(r, "dataset_val", "eval_data")
    _optimizer(r)
    _rate(r)
    _precision(r)
    if (steps := r.take("max_steps_per_epoch")) is not None:
        epochs = float(r.settings.get("num_epochs", 1))
        said = "torchtune ends an epoch that has fewer steps; here its rows come again until all are done"
        said = f"in each of {epochs:g} epochs; {said}" if epochs > 1 else said
        r.put("max_steps", round(int(steps) * epochs), key="max_steps_per_epoch", said=said)
    read_metric_logger(r)
    fsdp = r.take("fsdp")
    if is_on(r.take("fsdp_cpu_offload")) or (isinstance(fsdp, Mapping) and is_on(fsdp.get("cpu_offload"))):
        key = "fsdp_cpu_offload" if "fsdp_cpu_offload" in r.raw else "fsdp"
        for name, place in (("zero", 3), ("offload_parameters", "cpu"), ("offload_optimizer", "cpu")):
            r.put(name, place, key=key)
    r.passed(("fsdp", "fsdp_cpu_offload"))
    r.refuse_if_on(_REFUSED)
    if r.take("optimizer") is None:
        r.refuse_if_on({key: f"{TRAINS_NOTHING}: {command}" for key, command in _NO_TRAINING.items()})
    if r.raw.get("shuffle") is False:
        r.refuse("shuffle", "rows in the order of the file; fitune shuffles them")
    r.passed("shuffle")
    r.pass_shared_rows("tensor_parallel_dim context_parallel_dim")
    r.passed("enable_activation_offloading", "the plan moves them to the host where that helps")
    r.passed(_BOOKKEEPING)
    r.passed(_SPEED, SPEED_SAID)
    r.passed(sorted(named), "other keys name it")


_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


def _resolve(r: Reading) -> set[str]:
    """Replaces each ``${a.b}`` by the value there, as OmegaConf does for torchtune; returns the keys named so."""
    raw, named = r.raw, set[str]()

    def value_at(place: str) -> Any:
        """The value at ``place`` with all that it names. Raises LookupError where there is none."""
        value: Any = raw
        for key in place.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise LookupError(place)
            value = value[key]
        named.add(place.split(".")[0])
        return with_values(value)

    def with_values(value: Any) -> Any:
        """``value`` with every place in it replaced."""
        if isinstance(value, Mapping):
            return {key: with_values(each) for key, each in value.items()}
        if isinstance(value, list):
            return [with_values(each) for each in value]
        if not isinstance(value, str):
            return value
        if whole := _REFERENCE.fullmatch(value):
            return value_at(whole.group(1))
        return _REFERENCE.sub(lambda each: str(value_at(each.group(1))), value)

    found = dict(raw)
    for key, value in raw.items():
        try:
            found[key] = with_values(value)
        except LookupError as error:
            r.refuse(key, f"${{{error.args[0]}}} names no value of this file; write the value")
        except RecursionError:
            r.refuse(key, "its ${…} lead back to itself; write the value")
    r.raw = found
    return named


def _component(value: Any) -> str:
    return str(value.get("_component_", "")) if isinstance(value, Mapping) else ""


def _model(r: Reading) -> None:
    """The checkpoint's folder where it exists, else its name, which is the model's on the Hub."""
    model = r.take("model")
    component = _component(model)
    name = component.rsplit(".", 1)[-1]
    if not isinstance(model, Mapping) or any(word in component for word in ("vision", "clip", "classifier")):
        r.refuse("model", f"{name or model}: fitune trains language models on text")
        return
    loss = _component(r.take("loss"))
    if any(word in loss.lower() for word in ("dpo", "ppo", "grpo", "kl", "rlhf")):
        r.refuse("loss", f"preferences, rewards or distillation; {SUPERVISED}")
    folder = (r.take("checkpointer") or {}).get("checkpoint_dir")
    if folder is None:
        r.refuse("checkpointer", "no checkpoint_dir to start from")
        return
    path = Path(str(folder)).expanduser()
    if (path / "config.json").is_file():
        r.put("model", str(path), key="checkpointer")
    else:
        called = path.parent.name if path.name == "original" else path.name
        owner = next((each for start, each in _OWNERS.items() if called.lower().startswith(start)), "")
        on_the_hub = f"{owner}/{called}" if owner else called
        said = "the folder is not here: the model that it is named after"
        r.put("model", on_the_hub, key="checkpointer", said=said)
    _method(r, model, name)


_OWNERS = {
    "meta-llama": "meta-llama", "llama": "meta-llama", "codellama": "codellama", "tinyllama": "TinyLlama",
    "qwen": "Qwen", "gemma": "google", "mistral": "mistralai", "phi": "microsoft",
}  # fmt: skip
"""First letters of the name of a model that torchtune downloads -> whose it is on the Hub."""


def _method(r: Reading, model: Mapping[str, Any], name: str) -> None:
    adapters = name.startswith(("lora_", "qlora_")) or "lora_rank" in model
    if not adapters:
        r.put("tuning", "full", key="model", said=f"{name} trains every weight")
        return
    packed = name.startswith("qlora_") or is_on(model.get("quantize_base"))
    r.put("tuning", "qlora" if packed else "lora", key="model", said=name)
    if packed:
        r.put("quantization", "nf4", key="model")
    for theirs, ours, usual in (("lora_rank", "lora_r", 8), ("lora_alpha", "lora_alpha", 16),
                                ("lora_dropout", "lora_dropout", 0.0), ("use_dora", "dora", False)):  # fmt: skip
        r.put(ours, model.get(theirs, usual), key="model")
    targets = [
        {"output_proj": "o_proj"}.get(str(each), str(each)) for each in model.get("lora_attn_modules", ())
    ]
    targets += ["gate_proj", "up_proj", "down_proj"] if is_on(model.get("apply_lora_to_mlp")) else []
    r.put("lora_target_modules", targets, key="model")
    if is_on(model.get("apply_lora_to_output")):
        r.refuse(
            "model", "apply_lora_to_output: adapters on the output head; lora_modules_to_save trains it whole"
        )


def _data(r: Reading, key: str, name: str) -> None:
    value = r.take(key)
    if value is None:
        return
    listed = value if isinstance(value, list) else [value]
    sources = [source for each in listed if (source := _source(r, each, key)) is not None]
    said = WITHOUT_HEADINGS if any(source.get("format") == "alpaca" for source in sources) else ""
    r.put(name, sources, key=key, said=said)
    builders = [each for each in listed if isinstance(each, Mapping)]
    if len({(is_on(each.get("packed")), each.get("train_on_input")) for each in builders}) > 1:
        r.refuse(key, "packed and train_on_input differ; here they are one for all data")
    if name != "data" or not builders:
        return
    first = builders[0]
    builder = _component(first).rsplit(".", 1)[-1]
    learnt = first.get("train_on_input", _DATASETS.get(builder, ("", {}, False))[2])
    said = "prompts are learnt too, as there" if learnt else ""
    r.put("train_on_prompt", is_on(learnt), key=key, said=said)
    r.put("packing", is_on(first.get("packed")), key=key)
    longest, where = (r.take("tokenizer") or {}).get("max_seq_len"), "tokenizer"
    if longest is None:  # the first versions named it at each dataset
        longest, where = first.get("max_seq_len"), key
    if longest is not None:
        r.put("seq_len", longest, key=where)
        r.settings.setdefault("on_long_row", "truncate")
    else:
        said = "torchtune takes rows of any length without max_seq_len; seq_len bounds them"
        r.put("on_long_row", "error", said=said)


def _source(r: Reading, value: Any, key: str) -> dict[str, Any] | None:
    builder = _component(value).rsplit(".", 1)[-1]
    if builder not in _DATASETS or not isinstance(value, Mapping):
        r.refuse(key, f"{builder or value}: name its rows as a source of data with its columns")
        return None
    usual, how, _ = _DATASETS[builder]
    subset = value.get("subset") or value.get("name")
    named = {"path": value.get("source") or usual, "name": subset, "data_files": value.get("data_files")}
    path, *others = paths_of(named)
    if others:
        r.refuse(key, "several data_files; name each as a source of data")
        return None
    source = {"path": path, **how, **({"split": str(value["split"])} if value.get("split") else {})}
    columns = value.get("column_map")
    if builder == "instruct_dataset":
        columns = columns if isinstance(columns, Mapping) else {}
        mapped = {
            ours: columns.get(name) or name for name, ours in (("input", "prompt"), ("output", "completion"))
        }
        source |= {"format": "columns", "columns": mapped}
    elif builder == "text_completion_dataset" and value.get("column", "text") != "text":
        source |= {"format": "columns", "columns": {"text": value["column"]}}
    elif builder == "chat_dataset":
        style = {"sharegpt": "sharegpt", "openai": "messages"}.get(str(value.get("conversation_style")))
        usual_column = {"sharegpt": "conversations", "messages": "messages"}.get(style or "")
        if style is None:
            r.refuse(
                key,
                f"conversation_style: {value.get('conversation_style')}; fitune reads sharegpt and openai",
            )
            return None
        column = value.get("conversation_column") or usual_column
        own = {"format": "columns", "columns": {"messages": str(column)}}
        source |= {"format": style} if column == usual_column else own
    elif columns:
        r.refuse(key, "a column_map; name them as columns of a source of data")
        return None
    return source


def _optimizer(r: Reading) -> None:
    value = r.take("optimizer")
    if value is None:
        return
    name = _component(value).replace("torchao.prototype.low_bit_optim.", "torchao.optim.")
    if name not in _OPTIMIZERS:
        r.refuse("optimizer", f"{name}; fitune steps by adamw, adamw-8bit, sgd or momentum")
        return
    ours, said = _OPTIMIZERS[name]
    if ours == "sgd" and value.get("momentum"):
        r.put("momentum", value["momentum"], key="optimizer")
        ours = "momentum"
    r.put("optimizer", ours, key="optimizer", said=said)
    r.put("learning_rate", value.get("lr", 1e-3), key="optimizer")
    decay = value.get("weight_decay")
    if decay is not None or ours not in ("adamw", "adamw-8bit"):
        r.put("weight_decay", decay or 0.0, key="optimizer")
    else:
        r.put("weight_decay", _ADAMW_DECAY, key="optimizer", said="the default of AdamW there")
    for number, beta in enumerate(value.get("betas") or (), start=1):
        r.put(f"adam_beta{number}", beta, key="optimizer")
    if value.get("eps") is not None:
        r.put("adam_epsilon", value["eps"], key="optimizer")


def _rate(r: Reading) -> None:
    value = r.take("lr_scheduler")
    if value is None:
        r.put("lr_scheduler", "constant", said="torchtune without lr_scheduler")
        r.put("warmup_steps", 0, said="torchtune without lr_scheduler")
        return
    name = _component(value).rsplit(".", 1)[-1]
    if name != "get_cosine_schedule_with_warmup" or value.get("num_cycles", 0.5) != 0.5:
        r.refuse("lr_scheduler", f"{name}; here: constant, linear, cosine")
        return
    r.put("lr_scheduler", "cosine", key="lr_scheduler")
    r.put("warmup_steps", value.get("num_warmup_steps", 0), key="lr_scheduler")


def _precision(r: Reading) -> None:
    name = str(r.take("dtype") or "bf16")
    if name not in ("bf16", "fp32", "fp16"):
        r.refuse("dtype", "bf16, fp16 or fp32")
        return
    said = "all weights and their updates in bf16, as there" if name == "bf16" else ""
    r.put("precision", name, key="dtype", said=said)
    norm = r.take("clip_grad_norm")
    if is_on(norm):
        r.put("max_grad_norm", norm, key="clip_grad_norm")
    else:
        r.passed("clip_grad_norm")
        r.put("max_grad_norm", 0.0, said="torchtune clips only where clip_grad_norm says so")
