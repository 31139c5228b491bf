"""A ds_config.json as settings of a recipe: what fitune has a word for becomes that, sizes of buffers are kept.

``auto`` leaves a setting to fitune. What neither side of it would follow is refused: nothing in the file is passed over
but DeepSpeed's own log lines and what fitune does anyway.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.files import read_text
from fitune.spec.recipe.values import number
from fitune.spec.serial import parse_object
from fitune.units import MIB

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
_TOP = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_LOSS_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 1,
    "min_loss_scale": 1,
}
"""fitune's own (engine/gradient_scale.py), in DeepSpeed's words."""

Settings = dict[str, Any]


def with_deepspeed_file(wanted: Mapping[str, Any], *, where: str) -> Settings:
    """``wanted`` with what its ``deepspeed`` names, a path or the content itself, in words of a recipe.

    Raises RecipeError, with both values, where the file and the recipe differ, and for settings that have no effect.
    """
    given = wanted.get("deepspeed")
    if given is None:
        return dict(wanted)
    name = str(given) if isinstance(given, str | Path) else f"{where}: deepspeed"
    content = _read(Path(given)) if isinstance(given, str | Path) else given
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: deepspeed = {given!r}", hint="deepspeed: ds_config.json")
    found: Settings = {"backend": "deepspeed"}
    kept: Settings = {}
    for key, setting, value in _settings(content, name):
        if key in (*SIZES, *SWITCHES):
            kept[key] = _kept(key, value, f"{name}: {setting}")
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


def _read(path: Path) -> Any:
    try:
        return parse_object(read_text(path, limit=MIB))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(
            f"deepspeed: {path}: cannot be read: {cause}", hint="a JSON file of DeepSpeed"
        ) from None


Found = Iterator[tuple[str, str, Any]]
"""A key of the recipe (or one of SIZES and SWITCHES), its name in the file, its value."""


def _settings(content: Mapping[str, Any], name: str) -> Found:
    sections: dict[str, Callable[[Mapping[str, Any], str], Found]] = {
        "zero_optimization": _zero, "optimizer": _optimizer, "fp16": _fp16, "bf16": _bf16,
    }  # fmt: skip
    for key, value in content.items():
        if value == "auto" or key in _WITHOUT_EFFECT:
            continue
        if key in sections and isinstance(value, Mapping):
            yield from sections[key](value, name)
        elif key in _TOP:
            yield _TOP[key], key, _number(value)
        elif key in SIZES or key in SWITCHES:  # as a recipe keeps them once the file is read
            yield key, key, _number(value)
        elif not _all_auto(value):
            raise _unknown(name, key, value)


def _zero(section: Mapping[str, Any], name: str) -> Found:
    for key, value in section.items():
        setting = f"zero_optimization.{key}"
        if value == "auto" or key in _WITHOUT_EFFECT:
            continue
        if key == "stage":
            yield "zero", setting, value
        elif key in ("offload_param", "offload_optimizer") and isinstance(value, Mapping):
            yield from _offload(value, key, name)
        elif key in SIZES or key in SWITCHES:
            yield key, setting, _number(value)
        else:
            raise _unknown(name, setting, value)


def _offload(section: Mapping[str, Any], key: str, name: str) -> Found:
    place = "offload_parameters" if key == "offload_param" else key
    for inner, value in section.items():
        setting = f"zero_optimization.{key}.{inner}"
        if value == "auto" or inner in _WITHOUT_EFFECT:
            continue
        if inner == "device":
            yield place, setting, "device" if value == "none" else value
        elif inner == "nvme_path":
            yield inner, setting, value
        else:
            raise _unknown(name, setting, value)


def _optimizer(section: Mapping[str, Any], name: str) -> Found:
    kind = section.get("type", "auto")
    if kind not in ("auto", "Adam", "AdamW"):
        raise _unknown(name, "optimizer.type", kind)
    if kind != "auto":
        yield "optimizer", "optimizer.type", "adamw"
    params = section.get("params", {})
    words = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    for key, value in (params if isinstance(params, Mapping) else {}).items():
        setting = f"optimizer.params.{key}"
        if value == "auto" or (key == "torch_adam" and value is True):
            continue
        if key in words:
            yield words[key], setting, value
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            yield from (("adam_beta1", setting, value[0]), ("adam_beta2", setting, value[1]))
        else:
            raise _unknown(name, setting, value)


def _bf16(section: Mapping[str, Any], name: str) -> Found:
    for key, value in section.items():
        if key == "enabled" and value is True:
            yield "precision", "bf16.enabled", "bf16-master"  # DeepSpeed keeps fp32 masters
        elif key != "enabled" and value != "auto":
            raise _unknown(name, f"bf16.{key}", value)


def _fp16(section: Mapping[str, Any], name: str) -> Found:
    if section.get("enabled") is not True:
        return
    yield "precision", "fp16.enabled", "fp16"
    for key, value in section.items():
        if key != "enabled" and value not in ("auto", _LOSS_SCALE.get(key)):
            raise _unknown(name, f"fp16.{key}", value)


def _kept(key: str, value: Any, setting: str) -> int | bool:
    """Raises RecipeError for what is not of the kind that DeepSpeed expects."""
    if key in SWITCHES and not isinstance(value, bool):
        raise RecipeError(f"{setting} = {value!r} is not true or false")
    if key in SIZES and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST):
        raise RecipeError(f"{setting} = {value!r} is not a number of elements from 0 to {_MOST:,}")
    kept: int | bool = value
    return kept


_MOST = 10**12


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
