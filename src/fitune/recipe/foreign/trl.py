"""Recipes of TRL: the YAML of ``trl sft``, SFTConfig and ModelConfig; and the arguments of Unsloth's notebooks."""

from collections.abc import Mapping
from typing import Any

from fitune.files import is_template
from fitune.recipe.foreign.reading import SUPERVISED, Reading, is_on, paths_of
from fitune.recipe.foreign.sharding_files import find_file, read_accelerate, read_sharding
from fitune.recipe.foreign.trainer_keys import (
    RENDERED,
    SPEED_SAID,
    read_expert_targets,
    read_precision,
    read_trainer_keys,
    refuse_other_tokenizer,
    refuse_revision,
)
from fitune.values.named_templates import NAMED_TEMPLATES

_SAME = {
    "model_name_or_path": "model",
    "model_name": "model",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "per_device_train_batch_size": "micro_batch_size",
    "packing": "packing",
    "num_processes": "gpus",
    "num_machines": "nodes",
}
_LORA = {
    "lora_r": "lora_r",
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "lora_target_modules",
    "target_modules": "lora_target_modules",
    "lora_modules_to_save": "lora_modules_to_save",
    "modules_to_save": "lora_modules_to_save",
    "use_dora": "dora",
    "use_rslora": "rslora",
}
_BOOKKEEPING = (
    "trust_remote_code dataset_streaming streaming gradio env lora_task_type task_type bnb_4bit_quant_storage "
    "dataset_kwargs ignore_bias_buffers eval_packing pad_token "
    "bnb_4bit_compute_dtype max_memory device_map token fast_inference gpu_memory_utilization max_lora_rank "
    "unsloth_force_compile finetune_vision_layers mixed_precision main_process_port machine_rank main_process_ip "
    "use_exact_model_name num_proc return_tensors tokenizer processing_class main_training_function chunk_size "
    "warmup_num_steps hub_model_revision overwrite_hub_revision push_to_hub_revision "
    "benchmarks callbacks"
)
_SPEED = "attn_implementation packing_strategy shuffle_dataset use_kernels use_liger dispatch_batches"
_REFUSED = {
    "beta": f"a preference loss; {SUPERVISED}",
    "ref_model": f"a reference model; {SUPERVISED}",
    "reward_model_name_or_path": f"a reward model; {SUPERVISED}",
    "reward_funcs": f"reinforcement learning; {SUPERVISED}",
    "num_generations": f"reinforcement learning; {SUPERVISED}",
    "max_prompt_length": f"preferences or reinforcement learning; {SUPERVISED}",
    "max_completion_length": f"preferences or reinforcement learning; {SUPERVISED}",
    "system_prompt": "a system message added to every row",
    "teacher_model_name_or_path": f"distillation from a teacher; {SUPERVISED}",
    "rank_pattern": "a rank for each module",
    "alpha_pattern": "a scale for each module",
    "embedding_learning_rate": "a learning rate of its own for embeddings",
    "loftq_config": "adapters that start from LoftQ",
    "bias": "biases that are trained, too; fitune trains none beside adapters",
}
_PARTS = "finetune_language_layers finetune_attention_modules finetune_mlp_modules"


def read_trl(r: Reading) -> None:
    """Reads a TRL config for supervised fine-tuning: every key is put as ours, passed over or refused."""
    r.same(_SAME)
    refuse_revision(r, "model_revision")
    refuse_other_tokenizer(r, "tokenizer_name_or_path")
    _method(r)
    _data(r)
    _loss(r)
    read_accelerate(r)
    read_sharding(r)
    r.passed("deepspeed")
    read_trainer_keys(r, optimizer="optim", scheduler="lr_scheduler_type", refused=_REFUSED)
    _precision(r)
    _checkpointing(r)
    unsloth = r.trainer == "Unsloth"
    r.assume(
        seq_len=2048 if unsloth else 1024, micro_batch_size=8, gradient_accumulation_steps=1,
        learning_rate=5e-5 if unsloth else 2e-5, num_epochs=3.0, lr_scheduler="linear", warmup_ratio=0.0,
    )  # fmt: skip
    if "max_length" in r.raw and r.raw["max_length"] is None and not unsloth:
        r.put("on_long_row", "error", key="max_length", said="rows of any length there; seq_len bounds them")
    r.settings.setdefault("on_long_row", "truncate")
    r.passed("eos_token", "the tokenizer's own, or what its chat template ends a turn with")
    r.passed(_BOOKKEEPING)
    r.passed(_SPEED, SPEED_SAID)


def _method(r: Reading) -> None:
    unsloth = r.trainer == "Unsloth"
    full = is_on(r.take("full_finetuning")) if unsloth else not is_on(r.take("use_peft"))
    four = is_on(r.raw.get("load_in_4bit", unsloth and not full and not is_on(r.take("load_in_8bit"))))
    eight = is_on(r.take("load_in_8bit"))
    r.take("load_in_4bit")
    key = "full_finetuning" if unsloth else "use_peft"
    if full or not four:
        r.passed("bnb_4bit_quant_type use_bnb_nested_quant", "the base is not in 4 bits")
    if full:
        r.put("tuning", "full", key=key, said="" if key in r.raw else f"{r.trainer} without {key}")
        r.passed(
            (*_LORA, "lora_target_parameters", "load_in_4bit", "load_in_8bit"), "every weight is trained"
        )
        return
    r.put("tuning", "qlora" if four or eight else "lora", key=key)
    if four:
        r.put("quantization", str(r.take("bnb_4bit_quant_type") or "nf4"), key="load_in_4bit")
        if (nested := r.take("use_bnb_nested_quant")) is not None:
            r.put("double_quantization", is_on(nested), key="use_bnb_nested_quant")
        else:
            r.assume(double_quantization=unsloth)
    elif eight:
        r.put("quantization", "hqq", key="load_in_8bit", said="8-bit weights by HQQ instead of LLM.int8")
        r.put("quantization_bits", 8, key="load_in_8bit")
    r.same(_LORA)
    if unsloth:
        r.assume(lora_r=16, lora_alpha=16, lora_dropout=0.0, lora_target_modules=["all-linear"])
    else:
        r.assume(lora_r=16, lora_alpha=32, lora_dropout=0.05)
        r.assume("PEFT's own choice for models like Llama", lora_target_modules=["q_proj", "v_proj"])
    for part in _PARTS.split():
        if part in r.raw and not is_on(r.take(part)):
            r.refuse(part, "adapters in some linears only; lora_target_modules names them")
        r.passed(part)
    read_expert_targets(r)


def _data(r: Reading) -> None:
    sources = r.take("datasets")
    named = r.take("dataset_name")
    config = r.take("dataset_config")
    evaluates = is_on(r.take("eval_strategy") or r.take("evaluation_strategy"))
    if isinstance(mixture := r.take("dataset_mixture"), Mapping):
        _mixture(r, mixture)
    elif isinstance(mixer := r.take("dataset_mixer"), Mapping):
        _mixer(r, mixer, evaluates=evaluates)
    elif isinstance(sources, list):
        r.inside("refused", {"columns": "some columns alone; map them by columns of a source of data"})
        r.put("data", [source for each in sources for source in _sources(each)], key="datasets")
    elif named is not None:
        source: dict[str, Any] = {"path": f"{named}:{config}" if config else str(named)}
        if (split := r.take("dataset_train_split")) is not None:
            source["split"] = str(split)
        r.put("data", [source], key="dataset_name")
        if evaluates:
            held_out = {**source, "split": str(r.take("dataset_test_split") or "test")}
            r.put(
                "eval_data",
                [held_out],
                key="eval_strategy" if "eval_strategy" in r.raw else "evaluation_strategy",
            )
    elif "/" in str(rows := r.take("train_dataset")) or "." in str(rows):
        r.put("data", [{"path": str(rows)}], key="train_dataset")
    if r.trainer == "Unsloth":
        r.passed(("train_dataset", "eval_dataset"), "a variable of the notebook; a file is named as data")
    r.same({"test_split_size": "val_fraction"})
    for key in ("chat_template_path", "chat_template"):
        if template := str(r.take(key) or ""):
            _template(r, key, template)
    if (column := r.take("dataset_text_field")) not in (None, "text"):
        r.put("columns", {"text": str(column)}, key="dataset_text_field")
    r.passed("dataset_text_field", "rows are read by what they hold")
    if r.take("truncation_mode") == "keep_end":
        r.refuse("truncation_mode", "long rows that lose their start; here they lose their end")
    r.passed("truncation_mode")
    r.passed(("dataset_config", "dataset_train_split", "dataset_test_split"), "read with dataset_name")


def _template(r: Reading, key: str, template: str) -> None:
    """A text or a file; Unsloth has names of its own for templates, and TRL takes that of another tokenizer."""
    known = template in NAMED_TEMPLATES or is_template(template)
    if known or template.endswith((".jinja", ".j2", ".txt")) or find_file(r, template):
        r.put("chat_template", template, key=key)
    elif r.trainer == "Unsloth":
        r.passed(key, RENDERED)
    else:
        r.refuse(key, "the template of another tokenizer; name a file with it: chat_template.jinja")


def _part(split: str, share: Any) -> str:
    """``split``, or its first rows where ``share`` is a part of them."""
    return split if share is None or float(share) >= 1 else f"{split}[:{100 * float(share):g}%]"


def _mixture(r: Reading, mixture: Mapping[str, Any]) -> None:
    """The sources of open-r1 and of today's alignment handbook, with their shares."""
    key, sources = "dataset_mixture", []
    for each in mixture["datasets"]:
        path = f"{each['id']}:{each['config']}" if each.get("config") not in (None, "default") else each["id"]
        columns = each.get("columns")
        if columns is not None and not _LEARNED.intersection(columns):
            r.refuse(key, f"columns {', '.join(columns)}; fitune learns from {', '.join(sorted(_LEARNED))}")
            return
        sources.append({"path": path, "split": _part(str(each.get("split") or "train"), each.get("weight"))})
    part = any("[" in source["split"] for source in sources)
    r.put("data", sources, key=key, said="the first rows of a share; there they are drawn" if part else "")
    if held_out := mixture.get("test_split_size"):
        r.put("val_fraction", held_out, key=key)
    r.inside("passed", {"seed": "seed orders the rows"})


_LEARNED = frozenset({"messages", "conversations", "completion", "text", "output"})
"""Columns that hold what is learned."""


def _mixer(r: Reading, mixer: Mapping[str, Any], *, evaluates: bool) -> None:
    """The sources of the first alignment handbook: its test splits are evaluated, whole."""
    splits = [str(split) for split in r.take("dataset_splits") or ["train", "test"]]
    configs = r.take("dataset_configs") or [None] * len(mixer)
    paths = [f"{name}:{config}" if config else name for name, config in zip(mixer, configs, strict=True)]
    parts = list(zip(paths, mixer.values(), strict=True))
    data = [
        {"path": path, "split": _part(split, share)}
        for split in splits
        if "train" in split
        for path, share in parts
    ]
    r.put("data", data, key="dataset_mixer")
    if evaluates and (tests := [split for split in splits if "test" in split]):
        held_out = [{"path": path, "split": split} for split in tests for path in paths]
        r.put("eval_data", held_out, key="dataset_splits")


def _sources(entry: Any) -> list[dict[str, Any]]:
    if not isinstance(entry, Mapping):
        return [{"path": str(entry)}]
    split = {"split": str(entry["split"])} if entry.get("split") else {}
    return [{"path": path, **split} for path in paths_of(entry)]


def _loss(r: Reading) -> None:
    """TRL learns every token of a conversation and of a text, and of prompt and completion the completion."""
    kind = r.take("loss_type")
    if kind is not None and str(kind) not in ("nll", "chunked_nll"):
        r.refuse("loss_type", "another loss; fitune learns by cross entropy")
    r.passed("loss_type")
    keys = ("assistant_only_loss", "completion_only_loss", "train_on_responses_only")
    if named := [key for key in keys if r.take(key) is not None]:
        # each is for another layout of rows: one that is on says that prompts are not learned
        key = next((key for key in named if is_on(r.raw[key])), named[0])
        r.put("train_on_prompt", not is_on(r.raw[key]), key=key)
        return
    said = f"{r.trainer} learns prompts of conversations too; for rows of prompt and completion say false"
    r.put("train_on_prompt", True, said=said)


def _precision(r: Reading) -> None:
    names = ("dtype", "torch_dtype")
    loading = r.take("model_init_kwargs")
    inside = loading if isinstance(loading, Mapping) else {}
    r.inside("passed", {"device_map attn_implementation use_cache trust_remote_code low_cpu_mem_usage": ""})
    said = {key: r.take(key) for key in names} | {
        "model_init_kwargs": inside.get(names[0]) or inside.get(names[1])
    }
    dtype = str(next(filter(None, said.values()), "auto"))
    if r.settings.get("tuning") == "full" and dtype in ("bfloat16", "bf16", "torch.bfloat16"):
        key = next(key for key, value in said.items() if value)
        r.put("precision", "bf16", key=key, said="weights are loaded and updated in bf16")
        r.passed(("bf16", "fp16"))
    else:
        read_precision(r, whole="bf16-master", default="bf16-master")
        whole = r.settings.get("tuning") == "full" and dtype == "auto"
        stored = "weights have fp32 masters; there they stay in what the checkpoint is stored in"
        r.passed(("dtype", "torch_dtype"), stored if whole else "the base of adapters; masters are fp32")


def _checkpointing(r: Reading) -> None:
    """Unsloth's own key beside the Trainer's."""
    value = r.take("use_gradient_checkpointing")
    if value is not None and "gradient_checkpointing" not in r.settings:
        r.put("gradient_checkpointing", is_on(value), key="use_gradient_checkpointing")
    r.passed("use_gradient_checkpointing", "gradient_checkpointing says it")
    r.passed("activation_offloading", "the plan moves them to the host where that helps")
    if "seed" not in r.settings:
        r.same({"random_state": "seed"})
    r.passed("random_state", "of the adapters' start; seed is one here")
