"""Keys of transformers' Trainer, which axolotl, LLaMA-Factory and TRL all pass on: optimizers, rates, trackers,
bookkeeping."""

import json
from pathlib import PurePath

from fitune.recipe.aliases import canonical_value
from fitune.recipe.foreign.reading import Reading, is_on

SAME = {
    "output_dir": "output_dir",
    "learning_rate": "learning_rate",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "seed": "seed",
    "save_total_limit": "keep_checkpoints",
}

BOOKKEEPING = (
    "run_name logging_dir logging_first_step logging_strategy log_level log_on_each_node disable_tqdm "
    "overwrite_output_dir save_only_model save_safetensors save_on_each_node "
    "hub_strategy hub_token push_dataset_to_hub local_rank ddp_timeout "
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
    "preprocessing_num_workers dataset_num_proc overwrite_cache remove_unused_columns group_by_length "
    "length_column_name eval_batch_size per_device_eval_batch_size do_train do_eval do_predict "
    "include_num_input_tokens_seen include_tokens_per_second prediction_loss_only eval_on_start skip_memory_metrics "
    "report_to_all_ranks torch_empty_cache_steps use_cpu debug project trackio_space_id trackio_project_name "
    "trackio_run_name wandb_project wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id wandb_mode "
    "use_wandb mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
    "wandb_tags wandb_run_group "
    "bf16_full_eval fp16_full_eval eval_accumulation_steps eval_delay batch_eval_metrics eval_use_gather_object "
    "ddp_backend ddp_static_graph dataloader_multiprocessing_context full_determinism hub_always_push "
    "log_level_replica label_names"
)

_BEST = "load_best_model_at_end metric_for_best_model greater_is_better"
_BEST_SAID = "the weights of the last step are exported, whatever was evaluated before"

SPEED = (
    "tf32 use_liger_kernel enable_liger_kernel torch_compile torch_compile_backend torch_compile_mode use_cache "
    "low_cpu_mem_usage gradient_checkpointing_kwargs padding_free pad_to_multiple_of include_for_metrics "
    "auto_find_batch_size"
)
SPEED_SAID = (
    "speed, not the result: the plan decides it (kernels: liger, torch_compile or tf32 ask for it here)"
)

RENDERED = (
    "the tokenizer's own, or fitune's plain headings where it has none; chat_template names a file, or chatml"
)
WITHOUT_HEADINGS = "rendered by the chat template, without Alpaca's headings around question and answer"

OTHER_CHECKPOINT = "a checkpoint of another trainer"
REFUSED = {
    "resume_from_checkpoint": OTHER_CHECKPOINT,
    "neftune_noise_alpha": "noise on the embeddings while training (NEFTune)",
    "label_smoothing_factor": "a smoothed loss",
    "optim_target_modules": "an optimizer for some modules only",
    "use_adafactor": "Adafactor; optimizer: adamw-8bit or tuning: adalomo are small here",
}

_LESS_EXACT = "bitsandbytes' 8-bit states instead of torchao's, of the same size"
PAGED = "the same update; paged states are not in this version"
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw_apex_fused": ("adamw", ""),
    "adamw_torch_8bit": ("adamw-8bit", _LESS_EXACT),
    "adamw_torch_4bit": ("adamw-8bit", "8-bit states instead of torchao's 4-bit ones: more exact, twice their size"),
    "paged_adamw_8bit": ("adamw-8bit", PAGED),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), ("adamw", PAGED)),
}  # fmt: skip
"""Trainer's name -> (ours, the difference); a recipe of fitune's own takes the others as they are."""

SCHEDULERS: dict[str, tuple[str, str]] = {
    "cosine_with_min_lr": ("cosine", ""),
    "cosine_with_restarts": ("cosine", "one cycle, as it does without lr_scheduler_kwargs"),
    "polynomial": ("linear", "to 0; power 1 to 1e-7 without lr_scheduler_kwargs"),
}


def read_trainer_keys(r: Reading, *, optimizer: str, scheduler: str, refused: dict[str, str]) -> None:
    """All that the three share; ``optimizer`` and ``scheduler`` are the keys that name them."""
    r.same(SAME)
    _optimizer(r, optimizer)
    _scheduler(r, scheduler)
    _warmup(r)
    r.same({"num_train_epochs": "num_epochs", "num_epochs": "num_epochs"})
    if float(r.take("max_steps") or 0) > 0:
        r.same({"max_steps": "max_steps"})
    r.passed("max_steps")
    _checkpointing(r)
    if float(r.take("logging_steps") or 0) >= 1:
        r.same({"logging_steps": "log_steps"})
    r.passed("logging_steps", "a share of all steps; here every step has a line")
    _how_often(r)
    _trackers(r)
    r.refuse_if_on({**REFUSED, **refused})
    _hub(r)
    r.passed(BOOKKEEPING)
    r.passed(_BEST, _BEST_SAID)
    r.passed("data_seed", "seed orders the rows")
    r.passed("average_tokens_across_devices", "every token of a step weighs the same on all devices")
    r.passed("dataloader_drop_last", "the last step of an epoch trains on what is left, too")
    r.passed(SPEED, SPEED_SAID)


def _optimizer(r: Reading, key: str) -> None:
    name = str(r.take(key) or "adamw").lower()
    ours, said = OPTIMIZERS.get(name) or (canonical_value("optimizer", name), "")
    if ours not in ("adamw", "adamw-8bit", "sgd"):
        r.refuse(key, "fitune steps by adamw, adamw-8bit, sgd or momentum, or by tuning: lomo, adalomo")
        return
    if r.take(key) is not None:
        r.put("optimizer", ours, key=key, said=said)
    if r.take("optim_args") is not None:
        r.refuse("optim_args", "arguments for an optimizer: name them as weight_decay, adam_beta1, …")


def _scheduler(r: Reading, key: str) -> None:
    name = r.take(key)
    if name is None:
        if r.take("lr_scheduler_kwargs") is not None:
            r.refuse("lr_scheduler_kwargs", f"settings of a schedule that {key} does not name")
        return
    floor = _floor(r) if name == "cosine_with_min_lr" else None
    more = floor is None and (name == "cosine_with_min_lr" or r.take("lr_scheduler_kwargs") is not None)
    ours, said = SCHEDULERS.get(str(name)) or (canonical_value("lr_scheduler", name), "")
    if ours not in ("constant", "linear", "cosine") or more:
        r.refuse(key, "a learning rate that follows another curve; here: constant, linear, cosine")
        r.passed("lr_scheduler_kwargs")
        return
    if floor is not None:
        r.put("min_lr_ratio", floor, key="lr_scheduler_kwargs")
    r.put("lr_scheduler", ours, key=key, said=said)
    if name == "constant" and (r.take("warmup_ratio") or r.take("warmup_steps")):
        for warmup in ("warmup_ratio", "warmup_steps"):
            r.passed(warmup, "the scheduler constant does not warm up there")
        r.put("warmup_ratio", 0.0, said=f"{r.trainer}'s constant rate does not warm up")


def _floor(r: Reading) -> float | None:
    """The share of the learning rate that ``lr_scheduler_kwargs`` lets it fall to, None where they say something else.
    On a command line they are JSON."""
    words = r.take("lr_scheduler_kwargs")
    try:
        words = json.loads(words) if isinstance(words, str) else words
        least = {key: float(value) for key, value in words.items()}
        highest = float(r.raw.get("learning_rate") or 0.0)
    except (ValueError, TypeError, AttributeError):
        return None
    match least:
        case {"min_lr_rate": ratio, **others} if not others:
            return ratio
        case {"min_lr": rate, **others} if not others and highest > 0:
            return rate / highest
    return None


def _warmup(r: Reading) -> None:
    """Steps go before a ratio; steps below 1 are a ratio (transformers 5)."""
    if "warmup_ratio" in r.settings:
        return
    steps, ratio = r.take("warmup_steps"), r.take("warmup_ratio")
    if steps is not None and float(steps) >= 1:
        r.put("warmup_steps", int(float(steps)), key="warmup_steps")
    elif steps is not None and float(steps) > 0:
        r.put("warmup_ratio", float(steps), key="warmup_steps", said="below 1 it is a share of all steps")
    elif ratio is not None:
        r.put("warmup_ratio", ratio, key="warmup_ratio")
    elif steps is not None:
        r.put("warmup_steps", 0, key="warmup_steps")


def read_expert_targets(r: Reading) -> None:
    """PEFT's names of stacked experts go beside the linears in ``lora_target_modules``, where fitune has both."""
    key = "lora_target_parameters"
    wanted = r.take(key)
    if wanted is None or r.settings.get("tuning") == "full":
        r.passed(key, "every weight is trained")
        return
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        r.refuse(key, "not a list of names such as mlp.experts.down_proj")
        return
    names = [name.replace("_checkpoint_wrapped_module.", "") for name in names]
    if some := [name for name in names if any(part.isdecimal() for part in name.split("."))]:
        r.refuse(key, f"{some[0]} adapts the experts of one block only; a name without its number adapts all")
        return
    linears = r.settings.get("lora_target_modules", [])
    linears = [linears] if isinstance(linears, str) else linears
    r.also("lora_target_modules", [*linears, *names], key=key)


def _checkpointing(r: Reading) -> None:
    """``unsloth`` and ``offload`` also move what the blocks keep to the host."""
    key = "gradient_checkpointing"
    value = r.take(key)
    if "gradient_checkpointing" in r.settings:
        r.passed(key, "fsdp_config says it")
    elif value in ("offload", "offload_disk", "unsloth"):
        said = "recomputed blocks; a plan moves what they keep to the host where that helps"
        r.put("gradient_checkpointing", True, key=key, said=said)
    elif value is not None:
        r.put("gradient_checkpointing", is_on(value), key=key)


def _how_often(r: Reading) -> None:
    """Checkpoints and evaluations: every N steps, once an epoch, or at the end alone."""
    strategy = r.take("save_strategy")
    if strategy == "epoch":
        r.put("saves_per_epoch", 1, key="save_strategy")
    elif strategy is not None and not is_on(strategy):
        r.put("save_steps", 0, key="save_strategy")
    elif float(r.take("save_steps") or 0) >= 1:
        r.same({"save_steps": "save_steps"})
    r.passed(("save_strategy", "save_steps"), "a checkpoint is saved once an epoch")
    holds_out = bool(r.settings.get("val_fraction") or r.settings.get("eval_data"))
    key = "eval_strategy" if r.take("eval_strategy") else "evaluation_strategy"
    strategy, steps = r.take(key), r.take("eval_steps")
    if strategy == "epoch" and holds_out:
        r.put("evals_per_epoch", 1, key="eval_strategy" if "eval_strategy" in r.raw else key)
    elif float(steps or 0) >= 1 and is_on(strategy or "steps") and holds_out:
        r.same({"eval_steps": "eval_steps"})
    said = (
        "evaluated at the end, and every N steps with eval_steps: N" if holds_out else "no rows are held out"
    )
    others = ("eval_steps", "eval_strategy", "evaluation_strategy")
    r.passed(others, "" if "eval_steps" in r.settings else said)


def _hub(r: Reading) -> None:
    """The export goes to the Hub where it went there; axolotl sends it as soon as ``hub_model_id`` is named."""
    name = r.take("hub_model_id")
    if is_on(r.take("push_to_hub")) or (r.trainer == "axolotl" and name is not None):
        key = "push_to_hub" if name is None else "hub_model_id"
        name = name or PurePath(str(r.take("output_dir") or "trainer_output")).name
        r.put("push_to_hub", name, key=key, said="the export, when the run has ended; private")
        if (private := r.take("hub_private_repo")) is not None and not is_on(private):
            r.put("hub_public", True, key="hub_private_repo")
        r.passed("push_to_hub hub_private_repo", f"{key} says it")
    r.passed("push_to_hub hub_model_id hub_private_repo", "nothing is pushed without push_to_hub")


def refuse_other_tokenizer(r: Reading, key: str) -> None:
    """Refuses the tokenizer of another model than the one that is trained."""
    if r.take(key) not in (None, r.settings.get("model")):
        r.refuse(
            key, "the tokenizer of another model; save it beside the weights, or name its chat_template alone"
        )
    r.passed(key, "the model's own")


def refuse_revision(r: Reading, key: str) -> None:
    """Refuses every revision of the model but the newest."""
    if (revision := r.take(key)) not in (None, "main"):
        r.refuse(key, f"a revision of the model; download {revision} and name its folder as the model")
    r.passed(key)


def read_precision(r: Reading, *, whole: str, default: str) -> None:
    """``whole`` is what bf16 means where every weight is trained; adapters have fp32 masters over a bf16 base."""
    full = r.settings.get("tuning") == "full"
    for key in ("bf16", "bfloat16"):
        if is_on(r.take(key)):
            said = "weights and updates in bf16, as there" if full and whole == "bf16" else ""
            r.put("precision", whole if full else "bf16-master", key=key, said=said)
    for key in ("fp16", "float16"):
        if is_on(r.take(key)) and "precision" not in r.settings:
            r.put("precision", "fp16", key=key)
    if "precision" not in r.settings:
        off = any(key in r.raw and not is_on(r.raw[key]) for key in ("bf16", "bfloat16"))
        r.put("precision", "fp32" if off else default, said=f"{r.trainer} without bf16 and fp16")


_SWITCHES = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "use_comet": "comet",
    "use_tensorboard": "tensorboard",
}  # fmt: skip
"""axolotl's keys that call for a tracker."""
_SETTINGS = {
    "wandb": {
        "wandb_project": "track_project", "wandb_entity": "track_team", "wandb_name": "run_name",
        "wandb_run_id": "track_id",
    },
    "mlflow": {
        "mlflow_experiment_name": "track_project", "mlflow_tracking_uri": "track_server",
        "mlflow_run_name": "run_name",
    },
    "comet": {
        "comet_project_name": "track_project", "comet_workspace": "track_team", "comet_experiment_key": "track_id",
    },
    "tensorboard": {},
    "all": {},
}  # fmt: skip
"""Tracker -> its settings there, and their names here."""


def _trackers(r: Reading) -> None:
    """``report_to``, and the settings of the trackers that it names or that axolotl's own keys call for."""
    value = r.take("report_to")
    listed = value if isinstance(value, list) else str(value or "").split(",")
    named = [str(name).strip().lower().removesuffix("_ml") for name in listed]  # transformers has comet_ml
    ours = [name for name in named if name in _SETTINGS]
    called = {
        name: key
        for key, name in reversed(_SWITCHES.items())
        if is_on(r.take(key)) and str(r.take(f"{name}_mode")).lower() != "disabled"
    }
    trackers = list(dict.fromkeys([*ours, *reversed(called)]))
    if trackers:
        # ``all`` are those that are installed; who is named beside it would have to be
        wanted = ["all"] if "all" in trackers else trackers
        r.put("report_to", wanted, key="report_to" if ours else called[trackers[0]])
    others = [name for name in named if name not in _SETTINGS and name not in ("none", "")]
    r.passed(
        "report_to", f"fitune has no {', '.join(others)}; metrics.jsonl has every step" if others else ""
    )
    for key, name in (pair for tracker in trackers for pair in _SETTINGS[tracker].items()):
        if (value := r.take(key)) is None:
            continue
        if r.settings.get(name, str(value)) != str(value):  # the first of two that mean the same here
            r.passed(key, f"{name} is {r.settings[name]} already: it is one for all trackers")
        else:
            r.put(name, str(value), key=key)
    if trackers and "run_name" not in r.settings:
        r.same({"run_name": "run_name"})
    for mode in ("wandb_mode", "comet_mode"):
        if str(r.take(mode)).lower() == "offline" and mode.partition("_")[0] in trackers:
            r.put("track_offline", True, key=mode)
    for key in ("use_wandb", "use_mlflow", "use_comet", "use_tensorboard"):
        r.passed(key, "report_to says it" if trackers else "")
    r.passed("wandb_log_model", "what was trained stays on this disk")
    r.passed("comet_api_key", "a key is read from the environment alone: COMET_API_KEY")


_LOGGERS = {
    "WandBLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet",
    "TensorBoardLogger": "tensorboard",
}
_LOGGER_SETTINGS = {
    "project": "track_project", "experiment_name": "track_project", "entity": "track_team",
    "workspace": "track_team", "tracking_uri": "track_server", "experiment_key": "track_id", "run_name": "run_name",
    "name": "run_name",
}  # fmt: skip


def read_metric_logger(r: Reading) -> None:
    """torchtune's ``metric_logger``, a class and its arguments."""
    logger = r.take("metric_logger") or {}
    tracker = _LOGGERS.get(str(logger.get("_component_", "")).rpartition(".")[2])
    if tracker is None:
        r.passed("metric_logger")
        return
    if (mode := str(logger.get("mode", "")).lower()) == "disabled":
        r.passed("metric_logger")
        return
    r.put("report_to", [tracker], key="metric_logger")
    if mode == "offline":
        r.put("track_offline", True, key="metric_logger[mode]")
    for key, name in _LOGGER_SETTINGS.items():
        if logger.get(key) is not None:
            r.put(name, str(logger[key]), key=f"metric_logger[{key}]")
