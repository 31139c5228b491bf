"""Sharding as other trainers say it: DeepSpeed's JSON, FSDP's keys, accelerate's YAML.

All of them divide without changing the result, so what is read here is the stage and what lies on the host; buckets,
prefetching and wrapping are for the engine. The backend is left to the plan.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.files import read_text
from fitune.foreign.reading import Reading
from fitune.spec.recipe.strict_yaml import MOST_RECIPE_BYTES, load_yaml

_STAGE_IN_NAME = re.compile(r"(?:zero|z)_?([0-3])", re.IGNORECASE)
_DIVIDED = "divided the same way; FSDP2 or DeepSpeed, whichever the plan takes"
_FSDP_STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}


def find_file(r: Reading, name: str) -> Path | None:
    """``name`` beside the recipe, in a folder above it, or in the current one: recipes name files from a root."""
    path = Path(name).expanduser()
    roots = [r.folder, *list(r.folder.resolve().parents)[:6], Path(".")]
    return next((root / path for root in roots if (root / path).is_file()), None)


def read_sharding(r: Reading) -> None:
    """DeepSpeed's file, else FSDP's keys, unless the sharding is known already."""
    if "zero" not in r.settings:
        read_deepspeed(r)
    if "zero" not in r.settings:
        _read_fsdp(r)
    r.pass_over("fsdp fsdp_config")


def read_deepspeed(r: Reading) -> None:
    """A file or the object itself. A file that is not here is known by the stage in its name."""
    key = "deepspeed"
    value = r.take(key)
    if value is None:
        return
    content = value if isinstance(value, Mapping) else json_object(find_file(r, str(value)))
    if content is not None:
        _put_deepspeed(r, content, key=key)
        return
    name = Path(str(value)).name
    stage = _STAGE_IN_NAME.search(name)
    if stage is None:
        r.refuse(key, f"there is no file {value} to read the stage from; zero: 3 names one")
        return
    r.put("zero", int(stage.group(1)), key=key, said=f"by its name, {name} is not here; {_DIVIDED}")
    offloaded = "offload" in name.lower()
    if offloaded and stage.group(1) == "3":
        r.put("offload_parameters", "cpu", key=key, said="by its name")
    if offloaded and "params" not in name.lower():
        r.put("offload_optimizer", "cpu", key=key, said="by its name")


def _put_deepspeed(r: Reading, config: Mapping[str, Any], *, key: str) -> None:
    zero = config.get("zero_optimization") or {}
    parts = ((zero.get(part) or {}).get("device") for part in ("offload_param", "offload_optimizer"))
    _put_zero(r, zero.get("stage", 0), *parts, key=key)
    optimizer = (config.get("optimizer") or {}).get("type")
    if optimizer is not None and str(optimizer).lower() not in ("adam", "adamw"):
        r.refuse(key, f"its optimizer {optimizer}; name one in the recipe: optimizer: adamw")


def _put_zero(r: Reading, stage: Any, parameters: Any, optimizer: Any, *, key: str) -> None:
    r.put("zero", int(stage), key=key, said=_DIVIDED)
    for name, place in (("offload_parameters", parameters), ("offload_optimizer", optimizer)):
        if str(place) in ("cpu", "nvme"):
            r.put(name, str(place), key=key)


def _read_fsdp(r: Reading) -> None:
    """``fsdp`` (a list or words), ``fsdp_config`` with or without the prefix ``fsdp_``."""
    words: Any = r.take("fsdp")
    config: Any = r.take("fsdp_config")
    if isinstance(words, Mapping):  # transformers 5: settings under ``fsdp``
        words, config = "full_shard", words
    if words is None and config is None:
        return
    names = words.split() if isinstance(words, str) else [str(word) for word in words or []]
    put_fsdp(r, config or {}, words=names, key="fsdp" if words is not None else "fsdp_config")


def put_fsdp(r: Reading, config: Mapping[str, Any], *, words: list[str], key: str) -> None:
    """Puts zero, offload and recompute as FSDP's ``config`` and the ``words`` of its strategy say."""
    values = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    strategy = next((word.upper() for word in words if word.upper() in _FSDP_STAGES), None)
    if strategy is None:
        strategy = str(values.get("sharding_strategy", "FULL_SHARD")).upper()
    stage = 2 if values.get("reshard_after_forward") is False else _FSDP_STAGES.get(strategy, 3)
    r.put("zero", stage, key=key, said=_DIVIDED)
    if strategy.startswith("HYBRID"):
        r.put("hybrid_sharding", True, key=key)
    if values.get("offload_params") is True or values.get("cpu_offload") is True or "offload" in words:
        r.put("offload_parameters", "cpu", key=key)
        r.put("offload_optimizer", "cpu", key=key, said="FSDP steps on the host what it keeps there")
    if values.get("activation_checkpointing"):
        r.put("gradient_checkpointing", True, key=key)


def read_accelerate(r: Reading) -> None:
    """A file for ``accelerate launch``, or the name of one that TRL brings (fsdp2, zero3, multi_gpu)."""
    key = "accelerate_config"
    value = r.take(key)
    if value is None:
        return
    file = find_file(r, str(value))
    if file is not None:
        _put_accelerate(r, load_yaml(file), key=key)
        return
    stage = _STAGE_IN_NAME.search(str(value))
    if stage is not None or "fsdp" in str(value):
        r.put("zero", int(stage.group(1)) if stage else 3, key=key, said=f"by its name; {_DIVIDED}")
    else:
        r.passed(key, "gpus: N says how many devices there are")


def _put_accelerate(r: Reading, config: Mapping[str, Any], *, key: str) -> None:
    """Puts devices, nodes and sharding as an accelerate ``config`` says."""
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        own = config.get("deepspeed_config") or {}
        content = json_object(find_file(r, str(own.get("deepspeed_config_file", ""))))
        if content is not None:
            _put_deepspeed(r, content, key=key)
        else:
            places = own.get("offload_param_device"), own.get("offload_optimizer_device")
            _put_zero(r, own.get("zero_stage", 2), *places, key=key)
    elif kind == "FSDP":
        put_fsdp(r, config.get("fsdp_config") or {}, words=[], key=key)
    machines = int(config.get("num_machines") or 1)
    processes = int(config.get("num_processes") or 1)
    if processes > 1:
        r.put("gpus", max(1, processes // machines), key=key)
    if machines > 1:
        r.put("nodes", machines, key=key)
    if kind not in ("DEEPSPEED", "FSDP") and processes <= 1:
        r.passed(key, "one device")


def json_object(file: Path | None) -> dict[str, Any] | None:
    """The object in a JSON file; None without a file. Raises RecipeError."""
    if file is None:
        return None
    try:
        value = json.loads(read_text(file, limit=16 * MOST_RECIPE_BYTES, encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecipeError(f"{file}: expected an object, found {type(value).__name__}")
    return value
