"""Recipes of LLaMA-Factory's version 1, known by ``model_class``, ``peft_config`` and ``dist_config``."""

from collections.abc import Mapping
from typing import Any

from fitune.foreign.reading import Reading, is_on
from fitune.foreign.sharding_files import find_file, put_fsdp, read_deepspeed
from fitune.foreign.trainer_keys import SPEED_SAID, read_precision, read_trainer_keys
from fitune.spec.recipe.strict_yaml import load_yaml

_SAME = {
    "model": "model",
    "cutoff_len": "seq_len",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "custom_chat_template": "chat_template",
}
_PASSED = (
    "model_class sample_backend max_new_tokens temperature top_p flash_attn kernel_config init_config batching_workers "
    "batching_strategy dist_timeout save_ckpt_as_hf save_epochs full_determinism cp_size cp_mode dp_size "
    "mp_replicate_size mp_shard_size trust_remote_code resume_from_checkpoint template"
)

_PASSED_INSIDE = {
    "source converter streaming": "rows are read by what they hold",
    "reshard_after_forward offload_params mixed_precision param_dtype reduce_dtype cp_size cp_mode dp_size ep_size "
    "ep_dispatcher mp_replicate_size mp_shard_size activation_checkpointing":
        "how the work is divided, which the plan decides",
}  # fmt: skip


def read_llama_factory_v1(r: Reading) -> None:
    """Reads a config of LLaMA-Factory's v1 layout: every key is put as ours, passed over or refused."""
    r.same(_SAME)
    r.inside("passed", _PASSED_INSIDE)
    _method(r, r.take("peft_config") or {}, r.take("quant_config") or {})
    _data(r)
    optimizer = r.take("optim_config") or {}
    if str(optimizer.get("name", "adamw")).lower() not in ("adamw", "adamw_torch"):
        r.refuse("optim_config", f"the optimizer {optimizer.get('name')}")
    if r.take("lr_scheduler_config") is not None:
        r.refuse("lr_scheduler_config", "a learning rate of its own: lr_scheduler says it here")
    _sharding(r, r.take("dist_config") or {})
    read_trainer_keys(
        r, optimizer="optim", scheduler="lr_scheduler_type", refused={"pref_loss": "preferences"}
    )
    read_precision(r, whole="bf16-master", default="bf16-master")
    for name, value in (
        ("seq_len", 2048),
        ("micro_batch_size", 1),
        ("learning_rate", 1e-4),
        ("num_epochs", 3.0),
    ):
        r.assume(name, value)
    r.assume("lr_scheduler", "linear")
    if "warmup_steps" not in r.settings:
        r.assume("warmup_ratio", 0.0)
    if "global_batch_size" not in r.settings:
        r.assume("gradient_accumulation_steps", 1)
    r.pass_over(_PASSED, SPEED_SAID)


def _method(r: Reading, adapter: Mapping[str, Any], quantised: Mapping[str, Any]) -> None:
    name = str(adapter.get("name", "full"))
    if name not in ("lora", "full") or adapter.get("adapter_name_or_path"):
        r.refuse("peft_config", f"{name}: fitune trains by full or lora, from the start")
        return
    if name == "full":
        r.assume("tuning", "full", "without peft_config every weight is trained")
        return
    r.put("tuning", "qlora" if quantised else "lora", key="peft_config")
    for theirs, ours in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"),
                         ("target_modules", "lora_target_modules"), ("modules_to_save", "lora_modules_to_save"),
                         ("use_dora", "dora"), ("use_rslora", "rslora")):  # fmt: skip
        if adapter.get(theirs) is not None:
            r.put(ours, adapter[theirs], key="peft_config")
    if quantised:
        _quantised(r, quantised)


def _quantised(r: Reading, quantised: Mapping[str, Any]) -> None:
    bits, name = quantised.get("quantization_bit", 4), str(quantised.get("name", "bnb"))
    if name not in ("bnb", "auto") or bits != 4:
        r.refuse("quant_config", "fitune quantises by NF4 (4 bit) and HQQ")
        return
    r.put("quantization", str(quantised.get("quantization_type") or "nf4"), key="quant_config")
    if (twice := quantised.get("double_quantization")) is not None:
        r.put("double_quantization", is_on(twice), key="quant_config")


def _data(r: Reading) -> None:
    """A dataset is a file of data, a Hub id, or a YAML that names several."""
    for key, name in (("train_dataset", "data"), ("eval_dataset", "eval_data")):
        value = r.take(key)
        if value is None:
            continue
        file = find_file(r, str(value)) if str(value).endswith((".yaml", ".yml")) else None
        if file is None and str(value).endswith((".yaml", ".yml")):
            r.passed(key, f"{value} is not here; name files as {name}")
            continue
        if file is None:
            r.put(name, [_source(r, {"path": value})], key=key)
            continue
        entries = {each: r.watch(f"{key}[{each}]", entry) for each, entry in load_yaml(file).items()}
        r.put(name, [_source(r, each) for each in entries.values() if isinstance(each, Mapping) and "path" in each],
              key=key)  # fmt: skip


def _source(r: Reading, entry: Mapping[str, Any]) -> dict[str, Any]:
    local = find_file(r, str(entry["path"]))
    source: dict[str, Any] = {"path": str(local or entry["path"])}
    if entry.get("size"):
        source["sample"] = entry["size"]
    if entry.get("split"):
        source["split"] = entry["split"]
    if entry.get("weight") is not None:
        source["weight"] = entry["weight"]
    return source


def _sharding(r: Reading, how: Mapping[str, Any]) -> None:
    name = str(how.get("name", ""))
    if name.startswith("fsdp"):
        put_fsdp(r, how, words=["full_shard"], key="dist_config")
    elif name == "deepspeed":
        inner = Reading(
            trainer=r.trainer, where=r.where, raw={"deepspeed": how.get("config_file")}, folder=r.folder
        )
        read_deepspeed(inner)
        for setting in ("zero", "offload_parameters", "offload_optimizer"):
            if setting in inner.settings:
                r.put(setting, inner.settings[setting], key="dist_config")
    elif name and name != "ddp":
        r.refuse("dist_config", f"{name} divides experts over devices")
