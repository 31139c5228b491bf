"""Recipes of axolotl. Its defaults and the meaning of its keys are those of its configuration schema (0.12–0.16)."""

import re

from fitune.recipe.foreign.axolotl_data import read_datasets
from fitune.recipe.foreign.reading import ON_TEXT, SUPERVISED, Reading, is_on
from fitune.recipe.foreign.sharding_files import read_sharding
from fitune.recipe.foreign.trainer_keys import (
    SPEED_SAID,
    read_expert_targets,
    read_precision,
    read_trainer_keys,
    refuse_other_tokenizer,
)
from fitune.values.named_templates import CHATML_MARKS

_SAME = {
    "base_model": "model",
    "sequence_len": "seq_len",
    "micro_batch_size": "micro_batch_size",
    "train_on_inputs": "train_on_prompt",
    "sample_packing": "packing",
    "adam_eps": "adam_epsilon",
}
_LORA = {
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_modules_to_save": "lora_modules_to_save",
    "peft_use_dora": "dora",
    "peft_use_rslora": "rslora",
    "peft_layers_to_transform": "lora_layers",
}

_BOOKKEEPING = (
    "base_model_config base_model_ignore_patterns tokenizer_type tokenizer_use_fast tokenizer_legacy "
    "tokenizer_save_jinja_files tokenizer_use_mistral_common type_of_model is_falcon_derived_model "
    "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model hf_use_auth_token strict "
    "dataset_prepared_path dataset_processes dataset_keep_in_memory "
    "num_dataset_shards_to_save shuffle_merged_datasets shuffle_before_merging_datasets "
    "eval_table_size eval_table_max_new_tokens eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval "
    "do_bench_eval "
    "eval_sample_packing eval_sequence_len save_first_step auto_resume_from_checkpoints "
    "loss_watchdog_threshold loss_watchdog_patience gc_steps gc_collect_steps device device_map world_size "
    "gpu_memory_limit max_memory lora_on_cpu profiler_steps profiler_steps_start use_ray ray_num_workers "
    "ray_run_name resources_per_worker use_tensorboard use_mlflow use_comet use_swanlab swanlab_project "
    "swanlab_experiment_name swanlab_description swanlab_mode swanlab_log_completions swanlab_workspace "
    "swanlab_completion_log_interval swanlab_completion_max_buffer skip_prepare_dataset "
    "use_otel_metrics otel_metrics_host otel_metrics_port use_trackio comet_api_key comet_workspace "
    "comet_project_name total_num_tokens total_supervised_tokens sample_packing_eff_est "
    "sample_packing_seq_len_multiplier test_value torchdistx_path gptq_disable_exllama eval_batch_size "
    "low_cpu_mem_usage lora_fan_in_fan_out resize_token_embeddings_to_32x "
    "experimental_skip_move_to_device pretrain_multipack_attn trust_remote_code"
)

_SPEED = (
    "flash_attention sdp_attention xformers_attention flex_attention eager_attention s2_attention sage_attention "
    "flash_optimum flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv "
    "flex_attn_compile_kwargs fused_attn_kernel gemma4_hybrid_attn_impl liger_rms_norm liger_rope "
    "liger_glu_activation liger_swiglu liger_layer_norm liger_rms_norm_gated liger_cross_entropy "
    "liger_fused_linear_cross_entropy cut_cross_entropy chunked_cross_entropy lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel lora_embedding_kernel use_kernels use_scattermoe use_sonicmoe experts_implementation "
    "dsv4_fp4_grouped_mode use_dsv4_kernels use_glm_dsa_kernels tiled_mlp tiled_mlp_num_shards layer_offloading "
    "activation_offloading sample_packing_sequentially sample_packing_group_size sample_packing_bin_size "
    "multipack_real_batches batch_flattening pad_to_sequence_len fsdp_version expert_parallel_size "
    "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_token_capacity "
    "dp_shard_size dp_replicate_size heads_k_stride ring_attn_func "
    "streaming streaming_multipack_buffer_size llama4_linearized_experts "
    "accelerator_config torch_compile_options ddp qlora_sharded_model_loading"
)

_REFUSED = {
    "rl": f"preference or reinforcement learning; {SUPERVISED}",
    "reward_model": f"a reward model; {SUPERVISED}",
    "process_reward_model": f"a reward model; {SUPERVISED}",
    "pretraining_dataset": "pretraining on a stream of text; name the texts as datasets with type: completion",
    "processor_type": f"images or audio; {ON_TEXT}",
    "num_labels": "a classifier; fitune trains language models",
    "trl": f"preference or reinforcement learning; {SUPERVISED}",
    "ebft": "another objective (EBFT)",
    "reinit_weights": "weights that begin anew",
    "qat": "quantisation-aware training",
    "quantization": "quantisation of the result",
    "diffusion": "a diffusion language model",
    "llmcompressor": "training of pruned weights",
    "use_onebitllms": "weights of one bit",
    "relora": "ReLoRA, which merges and restarts adapters",
    "lisa_n_layers": "LISA, which trains a few random blocks at a time",
    "max_packed_sequence_len": "it is no key of axolotl any more; sample_packing: true",
    "use_eaft": "another loss (EAFT)",
    "peft": "adapters that start from LoftQ",
    "gptq": "a base quantised by GPTQ; the model without GPTQ and load_in_4bit: true is QLoRA",
    "lora_model_dir": "an adapter to go on from",
    "loraplus_lr_ratio": "LoRA+, with a learning rate of its own for B",
    "peft_init_lora_weights": "adapters that start in another way",
    "peft_layer_replication": "blocks used more than once",
    "peft_trainable_token_indices": "training of some rows of the embeddings",
    "lr_groups": "learning rates by group",
    "embedding_lr": "a learning rate of its own for embeddings",
    "embedding_lr_scale": "a learning rate of its own for embeddings",
    "cosine_constant_lr_ratio": "a learning rate that stays constant at the end",
    "lr_quadratic_warmup": "a quadratic warm-up; here it is linear",
    "jagged_restart_steps": "restarts of the learning rate",
    "eta_min": "axolotl does not read it; a cosine that ends above 0 is cosine_min_lr_ratio",
    "overrides_of_model_config": "a changed model",
    "rope_scaling": "changed rotary positions",
    "revision_of_model": "a revision of the model; download that revision and name its folder as base_model",
    "curriculum_sampling": "rows in the order of the file; fitune shuffles them",
    "min_sample_len": "rows left out because they are short",
    "dataset_shard_num": "a part of the rows; sample: N at a source says how many",
    "dataset_exact_deduplication": "rows left out because they are there twice",
    "default_system_message": "a system message added to every row",
    "noisy_embedding_alpha": "noise on the embeddings while training",
    "use_pose": "positions skipped while training (PoSE)",
}

_COMPANIONS = (
    "dataset_shard_idx eaft_alpha eaft_k lisa_step_interval lisa_layers_attribute relora_prune_ratio "
    "relora_prune_method relora_cpu_offload jagged_restart_warmup_steps jagged_restart_anneal_steps gptq_groupsize "
    "gptq_model_v1 vllm"
)
"""Settings of what ``_REFUSED`` refuses; alone they do nothing."""

_PLUGINS = {
    "cut_cross_entropy": SPEED_SAID,
    "liger": SPEED_SAID,
    "kernels": SPEED_SAID,
    "expert_parallel": SPEED_SAID,
    "swanlab": "a tracker",
}
"""Part of a plugin's path below axolotl.integrations -> what it is for; others change what is trained."""


def read_axolotl(r: Reading) -> None:
    """Reads an Axolotl config: every key is put as ours, passed over or refused."""
    r.same(_SAME)
    _method(r)
    _model(r)
    _trained_weights(r)
    read_datasets(r)
    _tokens(r)
    _plugins(r)
    _sharding(r)
    read_trainer_keys(r, optimizer="optimizer", scheduler="lr_scheduler", refused=_REFUSED)
    divided = bool(r.settings.get("zero"))
    read_precision(r, whole="bf16-master" if divided else "bf16", default="bf16-master")
    r.assume(seq_len=512, micro_batch_size=1, gradient_accumulation_steps=1, num_epochs=1.0)
    r.assume("axolotl's default, which ends after 100 steps there", warmup_ratio=0.03)
    _bitsandbytes(r)
    r.settings.setdefault("optimizer", "adamw")
    r.settings.setdefault("lr_scheduler", "cosine")
    r.passed("early_stopping_patience", "training goes on to its last step, whatever was evaluated before")
    r.passed(_BOOKKEEPING)
    r.passed(_COMPANIONS, "a setting of something that is off or refused")
    r.passed(_SPEED, SPEED_SAID)
    r.same({"saves_per_epoch": "saves_per_epoch"})
    if r.settings.get("val_fraction") or r.settings.get("eval_data"):
        r.same({"evals_per_epoch": "evals_per_epoch"})
    else:
        r.passed("evals_per_epoch", "no rows are held out")
    # the share of the learning rate that a cosine ends at; other schedules do not read it there
    ratio = r.take("cosine_min_lr_ratio")
    if ratio is None or r.settings.get("lr_scheduler", "cosine") != "cosine":
        r.passed("cosine_min_lr_ratio", "the schedule is no cosine")
    elif float(ratio) == 1:
        r.also("lr_scheduler", "constant", key="cosine_min_lr_ratio")
    else:
        r.put("min_lr_ratio", ratio, key="cosine_min_lr_ratio")


def _method(r: Reading) -> None:
    adapter, four, eight = r.take("adapter"), is_on(r.take("load_in_4bit")), is_on(r.take("load_in_8bit"))
    if adapter is None:
        if "adapter" in r.raw:
            r.put("tuning", "full", key="adapter", said="without adapters every weight is trained")
        else:
            r.assume("axolotl trains every weight where no adapter is named", tuning="full")
        targets = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
        r.passed((*_LORA, *targets, "load_in_4bit", "load_in_8bit"), "no adapter is named")
        return
    if adapter not in ("lora", "qlora"):
        r.refuse("adapter", "fitune trains adapters by lora and qlora")
        return
    r.put("tuning", "qlora" if four or eight or adapter == "qlora" else "lora", key="adapter")
    if four:
        r.put("quantization", "nf4", key="load_in_4bit")
    elif eight:
        said = "8-bit weights by HQQ; LLM.int8, which also rounds what the layers take in, is not in this version"
        r.put("quantization", "hqq", key="load_in_8bit", said=said)
        r.put("quantization_bits", 8, key="load_in_8bit")
    r.same(_LORA)
    if is_on(r.take("lora_target_linear")):
        # tables are no linears of a block: they go on beside them
        named = r.take("lora_target_modules") or []
        tables = [name for name in named if name in ("embed_tokens", "lm_head")]
        r.put("lora_target_modules", ["all-linear", *tables], key="lora_target_linear")
        r.passed("lora_target_modules", "lora_target_linear names all of them")
    else:
        r.same({"lora_target_modules": "lora_target_modules"})
        r.assume("PEFT's own choice for models like Llama", lora_target_modules=["q_proj", "v_proj"])
    read_expert_targets(r)


def _bitsandbytes(r: Reading) -> None:
    """How the base is packed in 4 bits; what the products are computed in is the recipe's precision."""
    key = "bnb_config_kwargs"
    words = r.raw.get(key) or {}
    if r.settings.get("quantization") == "nf4":
        if (kind := words.get("bnb_4bit_quant_type", "nf4")) != "nf4":
            r.refuse(key, f"4 bits by {kind}; fitune packs them by NF4")
        elif (twice := words.get("bnb_4bit_use_double_quant")) is not None:
            r.put("double_quantization", is_on(twice), key=key)
        r.assume(double_quantization=True)
    r.passed(key)


def _model(r: Reading) -> None:
    kind = str(r.take("model_type") or "")
    if "SequenceClassification" in kind or "TokenClassification" in kind:
        r.refuse("model_type", "a classifier; fitune trains language models")
    r.passed("model_type", "transformers knows the class from config.json")
    attention = r.take("attn_implementation")
    if attention == "eager":
        r.put("attn_implementation", "eager", key="attn_implementation")
    r.passed("attn_implementation", SPEED_SAID.split(":")[0] + ": the plan takes the fastest the device has")
    refuse_other_tokenizer(r, "tokenizer_config")
    r.passed(
        "model_config model_quantization_config model_quantization_config_kwargs cls_model_config",
        "read from config.json; weights stored in 4 bit become the precision of the recipe",
    )
    r.passed("freeze_mm_modules", "fitune trains the text model alone")
    r.passed("quantize_moe_experts", "experts are quantised with the base wherever fitune can pack them")


_WHOLE_TEXT_MODEL = re.compile(r"\^?(model\.language_model\W*|lm_head\W*|embed_tokens\W*)")


def _trained_weights(r: Reading) -> None:
    """``unfrozen_parameters`` that name the whole text model are full fine-tuning of it."""
    patterns = r.take("unfrozen_parameters")
    if patterns is None:
        return
    whole = all(_WHOLE_TEXT_MODEL.fullmatch(str(pattern)) for pattern in patterns)
    if whole and any("language_model" in str(pattern) for pattern in patterns):
        r.passed("unfrozen_parameters", "the whole text model, which is what fitune trains")
    else:
        why = "training of some weights only; tuning: lora with lora_layers is the nearest"
        r.refuse("unfrozen_parameters", why)


def _tokens(r: Reading) -> None:
    said = "the tokenizer's own; padding is never learnt"
    r.passed("special_tokens", said)
    listed = [r.take(key) for key in ("tokens", "added_tokens")]
    # ``tokens`` was a mapping of special tokens once; those are in the tokenizer
    added = [str(token) for value in listed if isinstance(value, list) for token in value]
    begin, end = CHATML_MARKS
    if begin in added and end not in added and (r.take("special_tokens") or {}).get("eos_token") == end:
        added.append(end)  # a tokenizer without the one lacks the other, which is added there, too
    if added:
        r.put("added_tokens", added, key="tokens" if r.take("tokens") else "added_tokens")
    r.passed("tokens", said)


def _plugins(r: Reading) -> None:
    named = r.take("plugins") or []
    for path in named if isinstance(named, list) else [named]:
        parts = str(path).split(".")
        if not any(part in _PLUGINS for part in parts):
            r.refuse("plugins", f"{parts[-1]} changes what is trained")
            return
    if "plugins" in r.raw:
        r.passed("plugins", SPEED_SAID)


def _sharding(r: Reading) -> None:
    read_sharding(r)
    r.pass_shared_rows("tensor_parallel_size context_parallel_size sequence_parallel_degree")
    r.passed("fp8", "products in bf16 instead of fp8: more exact and slower")
    r.passed(("fp8_enable_fsdp_float8_all_gather", "nvfp4_merge_aware"))
    whole, steps = r.take("batch_size"), r.take("gradient_accumulation_steps")
    if whole is not None and steps is None:
        said = "batch_size / micro_batch_size, on each device"
        r.put("gradient_accumulation_steps", max(1, int(whole) // int(r.settings.get("micro_batch_size", 1))),
              key="batch_size", said=said)  # fmt: skip
    else:
        r.passed("batch_size", "micro_batch_size and gradient_accumulation_steps say it")
