"""Recipes of LLaMA-Factory: 0.9, known by ``stage``, ``finetuning_type`` and ``template``, and version 1, known by
``model_class``, ``peft_config`` and ``dist_config``."""

from collections.abc import Mapping
from typing import Any

from fitune.recipe.foreign.llama_factory_data import TEXTS, read_rows, read_rows_of_v1
from fitune.recipe.foreign.reading import ON_TEXT, SUPERVISED, TRAINS_NOTHING, Reading, is_on
from fitune.recipe.foreign.sharding_files import put_fsdp, read_deepspeed, read_sharding
from fitune.recipe.foreign.trainer_keys import (
    RENDERED,
    SPEED_SAID,
    read_precision,
    read_trainer_keys,
    refuse_revision,
)

_SAME = {
    "model_name_or_path": "model",
    "cutoff_len": "seq_len",
    "per_device_train_batch_size": "micro_batch_size",
    "train_on_prompt": "train_on_prompt",
    "cache_dir": "cache_dir",
}
_LORA = {
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "lora_target_modules",
    "additional_target": "lora_modules_to_save",
    "use_dora": "dora",
    "use_rslora": "rslora",
}

_BOOKKEEPING = (
    "plot_loss dataset_dir tokenized_path media_dir use_fast_tokenizer trust_remote_code "
    "hf_hub_token ms_hub_token om_hub_token download_mode data_shared_file_system preprocessing_batch_size "
    "ray_num_workers ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker placement_strategy "
    "placement_group_strategy use_swanlab swanlab_project swanlab_run_name swanlab_mode export_dir "
    "export_size export_device export_legacy_format create_new_adapter compute_accuracy predict_with_generate "
    "infer_backend max_new_tokens temperature top_p do_sample generation_max_length eval_num_beams print_param_status "
    "infer_dtype tool_format"
)
_SPEED = (
    "flash_attn use_unsloth use_unsloth_gc use_v1_kernels upcast_layernorm upcast_lmhead_output "
    "use_reentrant_gc dispatch_batches fp8_backend "
    "fp8_enable_fsdp_float8_all_gather fsdp_transformer_layer_cls_to_wrap"
)
_REFUSED = {
    "use_galore": "GaLore's projected gradients",
    "use_apollo": "APOLLO's projected gradients",
    "use_badam": "BAdam, which trains one block at a time",
    "use_adam_mini": "Adam-mini, with one second moment a block; tuning: adalomo is as small",
    "use_muon": "the optimizer Muon",
    "use_llama_pro": "blocks added to the model (LLaMA Pro)",
    "use_asft_loss": "another loss (ASFT)",
    "use_dft_loss": "another loss (DFT)",
    "use_eaft_loss": "another loss (EAFT)",
    "loraplus_lr_ratio": "LoRA+, with a learning rate of its own for B",
    "pissa_init": "adapters that start from the base's singular vectors (PiSSA)",
    "mixture_of_depths": "a changed model (mixture of depths)",
    "freeze_trainable_layers": "training of some blocks only; tuning: lora with lora_layers is the nearest",
    "freeze_trainable_modules": "training of some modules only",
    "adapter_name_or_path": "an adapter to go on from",
    "checkpoint_dir": "an adapter to go on from",
    "ref_model": "a reference model",
    "reward_model": f"a reward model; {SUPERVISED}",
    "pref_loss": f"a preference loss; {SUPERVISED}",
    "rope_scaling": "changed rotary positions",
    "shift_attn": "shifted sparse attention (LongLoRA)",
    "mask_history": "learning the last turn only",
    "efficient_eos": "templates whose answers do not end",
    "interleave_probs": "datasets mixed by probabilities; weight: says them for each source of data",
    "new_special_tokens": "new tokens; name them as added_tokens",
    "split_special_tokens": "special tokens in texts that are read letter by letter",
    "default_system": "a system message added to every row",
    "default_system_prompt": "a system message added to every row",
    "disable_shuffling": "rows in the order of the file; fitune shuffles them",
    "use_hyper_parallel": "another engine; leave it out",
    "image_max_pixels": f"images; {ON_TEXT}",
    "video_max_pixels": f"videos; {ON_TEXT}",
    "oft_rank": "orthogonal adapters (OFT)",
    "oft_block_size": "orthogonal adapters (OFT)",
}
_OTHER_SUPPORT = (
    "apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type apollo_update_interval "
    "badam_mode badam_switch_mode badam_switch_interval badam_verbose badam_start_block badam_update_ratio "
    "galore_layerwise galore_target galore_rank galore_scale galore_update_interval asft_alpha eaft_alpha oft_target "
    "module_dropout pissa_iter pissa_convert freeze_extra_modules kt_cpu_activation kt_config kt_weight_path "
    "kt_non_expert_weight_path kt_optimize_rule kt_mode cpu_infer chunk_size kt_use_cuda_graph kt_maxlen "
    "pref_beta pref_ftx simpo_gamma dpo_label_smoothing image_min_pixels video_min_pixels video_fps video_maxlen "
    "freeze_vision_tower freeze_multi_modal_projector freeze_language_model"
)
"""Settings of what ``_REFUSED`` refuses; alone they do nothing."""

_KT = (
    "kt_backend kt_num_threads kt_tp_enabled kt_threadpool_count kt_max_cache_depth kt_share_backward_bb "
    "kt_weight_lifecycle kt_model_max_length kt_weight_path kt_non_expert_weight_path kt_num_gpu_experts"
)
_MEGATRON = (
    "expert_model_parallel_size "
    "sequence_parallel bias_activation_fusion apply_rope_fusion use_distributed_optimizer overlap_param_gather "
    "overlap_grad_reduce moe_grouped_gemm moe_token_dispatcher_type recompute_granularity recompute_method "
    "recompute_num_layers export_hf_on_finish virtual_pipeline_model_parallel_size"
)


def read_llama_factory(r: Reading) -> None:
    """Reads a LLaMA-Factory config: every key is put as ours, passed over or refused."""
    if not {"stage", "finetuning_type", "model_name_or_path"} & r.raw.keys():
        _read_v1(r)
        return
    stage = str(r.take("stage") or "sft")
    if stage not in ("sft", TEXTS):
        r.refuse("stage", f"{SUPERVISED}: stage: sft")
    r.passed("stage", "texts are learned whole" if stage == TEXTS else "")
    predicts = next((key for key in ("do_predict", "do_eval") if is_on(r.take(key))), "")
    if predicts and not is_on(r.take("do_train")):
        r.refuse(predicts, f"{TRAINS_NOTHING} without do_train")
    r.same(_SAME)
    refuse_revision(r, "model_revision")
    r.inside("passed", {_KT: "how the host computes", "ms_hub_url om_hub_url file_name cloud_file_name": ""})
    r.inside(
        "refused",
        {
            "images videos audios": f"images or sounds; {ON_TEXT}",
            "script_url": "code of a dataset",
        },
    )
    _method(r)
    read_rows(r)
    read_sharding(r)
    read_trainer_keys(r, optimizer="optim", scheduler="lr_scheduler_type", refused=_REFUSED)
    if is_on(r.take("pure_bf16")):
        r.put("precision", "bf16", key="pure_bf16")
        r.passed("bf16", "pure_bf16 says more")
    else:
        read_precision(r, whole="bf16-master", default="fp32")
    if is_on(r.take("disable_gradient_checkpointing")):
        r.put("gradient_checkpointing", False, key="disable_gradient_checkpointing")
    _experts_on_host(r)
    if (mixed := r.take("mixed_precision")) is not None and "bf16" in str(mixed):
        r.passed("mixed_precision", "bf16 products over fp32 masters")
        r.settings["precision"] = "bf16-master"
    r.passed("fp8", "products in bf16 instead of fp8: more exact and slower")
    _defaults(r)
    r.passed(_BOOKKEEPING)
    r.passed(_OTHER_SUPPORT, "a setting of something that is off or refused")
    r.pass_shared_rows("tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size")
    r.passed(_MEGATRON, "how Megatron divides the work: the plan divides it here")
    r.passed(_SPEED, SPEED_SAID)


def _method(r: Reading) -> None:
    kind = str(r.take("finetuning_type") or "lora")
    bits = r.take("quantization_bit")
    if kind == "full":
        r.put("tuning", "full", key="finetuning_type")
        r.passed((*_LORA, "quantization_bit", "quantization_method"), "every weight is trained")
        return
    if kind != "lora":
        r.refuse("finetuning_type", "fitune trains by full or lora, on a quantised base or not")
        r.passed(("quantization_bit", "quantization_method", "double_quantization"))
        return
    r.put("tuning", "qlora" if bits else "lora", key="finetuning_type" if "finetuning_type" in r.raw else "")
    if bits:
        _quantised(r, int(bits), str(r.take("quantization_method") or "bnb"))
    else:
        r.passed("quantization_method quantization_type double_quantization", "the base is not quantised")
    r.same(_LORA)


def _quantised(r: Reading, bits: int, method: str) -> None:
    if method not in ("bnb", "bitsandbytes", "hqq"):
        r.refuse("quantization_method", "fitune quantises by NF4 and HQQ")
        return
    if method != "hqq" and bits == 4:
        r.put("quantization", str(r.take("quantization_type") or "nf4"), key="quantization_bit")
        r.put("double_quantization", is_on(r.raw.get("double_quantization", True)), key="double_quantization")
    else:
        said = "" if method == "hqq" else "8-bit weights by HQQ instead of LLM.int8"
        r.put("quantization", "hqq", key="quantization_bit", said=said)
        r.put("quantization_bits", bits, key="quantization_bit")
    r.passed(("quantization_method", "quantization_type"))


def _experts_on_host(r: Reading) -> None:
    """KTransformers keeps and computes experts on the host, which changes nothing as long as they stay in 16 bit."""
    if not is_on(r.take("use_kt")):
        return
    stored = str((r.take("kt_config") or {}).get("kt_expert_weight_format", "bf16"))
    if stored == "bf16":
        r.passed("use_kt", "the plan decides what lies on the host")
    else:
        r.refuse(
            "use_kt", f"experts stored in {stored} by KTransformers; quantization_bit: 4 packs them by NF4"
        )


def _defaults(r: Reading) -> None:
    r.assume(
        seq_len=2048, micro_batch_size=8, gradient_accumulation_steps=1, learning_rate=5e-5, lr_scheduler="linear",
        warmup_ratio=0.0, num_epochs=3.0,
    )  # fmt: skip
    r.assume(
        "a row is cut at its end; LLaMA-Factory cuts a long question, too, to keep its answer",
        on_long_row="truncate",
    )
    if r.settings.get("tuning") in ("lora", "qlora"):
        r.assume(lora_r=8)
        r.assume("LLaMA-Factory's default, twice the rank", lora_alpha=2 * int(r.settings["lora_r"]))
        r.settings.setdefault("lora_target_modules", ["all-linear"])


_SAME_IN_V1 = {
    "model": "model",
    "cutoff_len": "seq_len",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "custom_chat_template": "chat_template",
}
_PASSED_IN_V1 = (
    "model_class sample_backend max_new_tokens temperature top_p flash_attn kernel_config init_config batching_workers "
    "dist_timeout save_ckpt_as_hf save_epochs cp_mode dp_size "
    "mp_replicate_size mp_shard_size trust_remote_code"
)

_PASSED_INSIDE = {
    "source converter streaming": "rows are read by what they hold",
    "reshard_after_forward offload_params mixed_precision param_dtype reduce_dtype cp_size cp_mode dp_size ep_size "
    "ep_dispatcher mp_replicate_size mp_shard_size activation_checkpointing":
        "how the work is divided, which the plan decides",
}  # fmt: skip


def _read_v1(r: Reading) -> None:
    """Reads a config of LLaMA-Factory's v1 layout: every key is put as ours, passed over or refused."""
    r.same(_SAME_IN_V1)
    r.inside("passed", _PASSED_INSIDE)
    _method_of_v1(r, r.take("peft_config") or {}, r.take("quant_config") or {})
    read_rows_of_v1(r)
    optimizer = r.take("optim_config") or {}
    if str(optimizer.get("name", "adamw")).lower() not in ("adamw", "adamw_torch"):
        r.refuse("optim_config", f"the optimizer {optimizer.get('name')}")
    if r.take("lr_scheduler_config") is not None:
        r.refuse("lr_scheduler_config", "a learning rate of its own: lr_scheduler says it here")
    _sharding_of_v1(r, r.take("dist_config") or {})
    read_trainer_keys(
        r, optimizer="optim", scheduler="lr_scheduler_type", refused={"pref_loss": "preferences"}
    )
    read_precision(r, whole="bf16-master", default="bf16-master")
    r.assume(
        seq_len=2048, micro_batch_size=1, learning_rate=1e-4, num_epochs=3.0, lr_scheduler="constant", warmup_ratio=0.0,
        weight_decay=0.01,
    )  # fmt: skip
    if "global_batch_size" not in r.settings:
        r.assume(gradient_accumulation_steps=1)
    r.pass_shared_rows("cp_size")
    by_tokens = str(r.take("batching_strategy") or "").startswith("dynamic")
    r.passed(
        "batching_strategy",
        "a step holds rows by their number here; there by their tokens" if by_tokens else "",
    )
    r.passed("template", RENDERED)
    r.passed(_PASSED_IN_V1, SPEED_SAID)


def _method_of_v1(r: Reading, adapter: Mapping[str, Any], quantised: Mapping[str, Any]) -> None:
    name = str(adapter.get("name", "full"))
    if name not in ("lora", "full") or adapter.get("adapter_name_or_path"):
        r.refuse("peft_config", f"{name}: fitune trains by full or lora, from the start")
        return
    if name == "full":
        r.assume("without peft_config every weight is trained", tuning="full")
        return
    r.put("tuning", "qlora" if quantised else "lora", key="peft_config")
    for theirs, ours in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"),
                         ("target_modules", "lora_target_modules"), ("modules_to_save", "lora_modules_to_save"),
                         ("use_dora", "dora"), ("use_rslora", "rslora")):  # fmt: skip
        if adapter.get(theirs) is not None:
            r.put(ours, adapter[theirs], key="peft_config")
    r.assume(lora_r=8, lora_alpha=16, lora_dropout=0.05)
    if not quantised:
        return
    bits, name = quantised.get("quantization_bit", 4), str(quantised.get("name", "bnb"))
    if name not in ("bnb", "auto") or bits != 4:
        r.refuse("quant_config", "fitune quantises by NF4 (4 bit) and HQQ")
        return
    r.put("quantization", str(quantised.get("quantization_type") or "nf4"), key="quant_config")
    if (twice := quantised.get("double_quantization")) is not None:
        r.put("double_quantization", is_on(twice), key="quant_config")


def _sharding_of_v1(r: Reading, how: Mapping[str, Any]) -> None:
    name = str(how.get("name", ""))
    if name.startswith("fsdp"):
        put_fsdp(r, how, words=["full_shard"], key="dist_config")
    elif name == "deepspeed":
        read_deepspeed(r, how.get("config_file"), key="dist_config")
    elif name and name != "ddp":
        r.refuse("dist_config", f"{name} divides experts over devices")
