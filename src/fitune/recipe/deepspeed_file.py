"""A ds_config.json as settings of a recipe: what fitune has a word for becomes that, sizes of buffers are kept.

``auto`` and null leave a setting to fitune. What neither side of it would follow is refused: nothing in the file is
passed over but DeepSpeed's own log lines and what fitune does anyway.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.recipe.strict_yaml import load_json
from fitune.recipe.types import number

SIZES = (
    "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
"""Elements. With SWITCHES they go into the plan as they are, and the estimate counts them."""
SWITCHES = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients")

_WITHOUT_EFFECT = {
    "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "stage3_gather_16bit_weights_on_model_save", "pin_memory",
}  # fmt: skip
_DONE_ANYWAY = {"bf16.enabled": False, "fp16.enabled": False, "optimizer.params.torch_adam": True}
_LOSS_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
"""fitune's own (engine/gradient_scale.py), in DeepSpeed's words."""
_SECTIONS = {
    "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "optimizer",
    "optimizer.params", "fp16", "bf16",
}  # fmt: skip
_WORDS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "zero_optimization.stage": "zero",
    "zero_optimization.offload_param.device": "offload_parameters",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.nvme_path": "nvme_path",
    "zero_optimization.offload_optimizer.nvme_path": "nvme_path",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
"""Setting of the file -> key of a recipe that takes its value."""
_CHOICES: dict[str, tuple[str, dict[Any, str]]] = {
    "optimizer.type": ("optimizer", {"adam": "adamw", "adamw": "adamw"}),
    "bf16.enabled": ("precision", {True: "bf16-master"}),  # DeepSpeed keeps fp32 masters
    "fp16.enabled": ("precision", {True: "fp16"}),
}
"""Setting of the file -> key of a recipe, and the values that have one there, in lower case."""
_MOST = 10**12


def with_deepspeed_file(wanted: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """``wanted`` with what its ``deepspeed`` names, a path or the content itself, in words of a recipe.

    Raises RecipeError, with both values, where the file and the recipe differ, and for settings that have no effect.
    """
    given = wanted["deepspeed"]
    name = str(given) if isinstance(given, str | Path) else f"{where}: deepspeed"
    content = load_json(Path(given), key="deepspeed") if isinstance(given, str | Path) else given
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: deepspeed = {given!r}", hint="deepspeed: ds_config.json")
    found: dict[str, Any] = {"backend": "deepspeed"}
    kept: dict[str, int | bool] = {}
    for key, setting, value in words_of_deepspeed(content):
        if not key:
            raise _unknown(name, setting, value)
        if key in SWITCHES and not isinstance(value, bool):
            raise RecipeError(f"{name}: {setting} = {value!r} is not true or false")
        if key in SIZES and (type(value) is not int or not 0 <= value <= _MOST):
            raise RecipeError(
                f"{name}: {setting} = {value!r} is not a number of elements from 0 to {_MOST:,}"
            )
        if key in (*SIZES, *SWITCHES):
            kept[key] = value
        else:
            found[key] = value
            _require_same(wanted, key, value, f"{name} says {setting} = {value!r}", where)
    _require_same(wanted, "backend", "deepspeed", f"{name} is DeepSpeed's", where)
    return {**wanted, **found, "deepspeed": kept}


def _require_same(wanted: Mapping[str, Any], key: str, value: Any, words: str, where: str) -> None:
    ours = wanted.get(key)
    if ours is not None and _number(ours) != _number(value):
        raise RecipeError(
            f"{where}: {key} = {ours!r}, and {words}", hint=f"leave {key} out, or write \"auto\" into the file"
        )  # fmt: skip


def words_of_deepspeed(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """A key of the recipe (or one of SIZES and SWITCHES), its name in the file, its value; no key for a setting that a
    recipe has no word for."""
    half = content.get("fp16")
    scales_loss = isinstance(half, Mapping) and half.get("enabled") is True
    for setting, value in _leaves(content, ""):
        section, _, key = setting.rpartition(".")
        if value in ("auto", None) or key in _WITHOUT_EFFECT or _DONE_ANYWAY.get(setting, ...) == value:
            continue
        if section == "fp16" and (not scales_loss or value == _LOSS_SCALE.get(key)):
            continue
        ours, choices = _CHOICES.get(setting, ("", {}))
        word = value.lower() if isinstance(value, str) else value
        if setting in _WORDS:
            yield _WORDS[setting], setting, "device" if value == "none" else _number(value)
        elif setting == "optimizer.params.betas" and isinstance(value, list) and len(value) == 2:
            yield from (("adam_beta1", setting, value[0]), ("adam_beta2", setting, value[1]))
        elif isinstance(word, str | bool) and word in choices:
            yield ours, setting, choices[word]
        elif section in ("", "zero_optimization") and key in (*SIZES, *SWITCHES):
            yield key, setting, _number(value)  # at the top as a recipe keeps them once the file is read
        elif not _all_auto(value):
            yield "", setting, value


def _leaves(content: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name; a section that is not known is one setting."""
    for key, value in content.items():
        if f"{section}{key}" in _SECTIONS and isinstance(value, Mapping):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def _all_auto(value: Any) -> bool:
    """True for a section that leaves all to fitune, such as a scheduler of ``auto``; its type alone says nothing."""
    params = value.get("params") if isinstance(value, Mapping) else None
    return isinstance(params, Mapping) and all(one == "auto" for one in params.values())


def _number(value: Any) -> Any:
    """5e8 as an int, and a number that YAML or JSON has as a text (1e-4) as one; anything else as it is."""
    with suppress(ValueError):
        value = number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unknown(name: str, setting: str, value: Any) -> RecipeError:
    if setting.startswith("fp16."):
        ours = _LOSS_SCALE.get(setting.removeprefix("fp16."))
        hint = f'fitune scales the loss itself, with {ours}: remove it or write "auto"'
    else:
        hint = 'fitune decides it, or has another word for it: remove it or write "auto"'
    return RecipeError(f"{name}: {setting} = {value!r} cannot be followed", hint=hint)
