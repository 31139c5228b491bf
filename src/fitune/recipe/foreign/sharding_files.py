"""Sharding as other trainers say it: DeepSpeed's JSON, FSDP's keys, accelerate's YAML.

All of them divide without changing the result, so what is read here is the stage and what lies on the host; buckets,
prefetching and wrapping are for the engine. The backend is left to the plan.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitune.recipe.deepspeed_file import words_of_deepspeed
from fitune.recipe.foreign.reading import Reading
from fitune.recipe.strict_yaml import load_json, load_yaml

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
    # os.path.isfile is false, too, for what no file can be called
    return next((root / path for root in roots if os.path.isfile(root / path)), None)


def read_sharding(r: Reading) -> None:
    """DeepSpeed's file, else FSDP's keys, unless the sharding is known already."""
    if "zero" not in r.settings:
        read_deepspeed(r, r.take("deepspeed"), key="deepspeed")
    if "zero" not in r.settings:
        _read_fsdp(r)
    r.passed("fsdp fsdp_config")


def read_deepspeed(r: Reading, value: Any, *, key: str) -> None:
    """A file or the object itself. A file that is not here is known by the stage in its name."""
    if value is None:
        return
    if isinstance(value, Mapping):
        _put_deepspeed(r, dict(value), key=key)  # whose one line covers all of its keys
        return
    if (file := find_file(r, str(value))) is not None:
        _put_deepspeed(r, load_json(file, key=key), key=key)
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
    """Puts the stage and what waits elsewhere; the rest is the engine's, or the recipe says it, too."""
    found: dict[str, Any] = {"zero": 0}
    for name, setting, value in words_of_deepspeed(config):
        if not name and setting in ("zero_optimization", "optimizer.type"):
            r.refuse(key, f"its {setting} {value}; name them in the recipe: zero: 3, optimizer: adamw")
        found[name] = value
    r.put("zero", found["zero"], key=key, said=_DIVIDED)
    places = {name: found.get(name, "device") for name in ("offload_parameters", "offload_optimizer")}
    if "nvme" in places.values() and "nvme_path" in found:
        places["nvme_path"] = found["nvme_path"]
    for name, place in places.items():
        if place != "device":
            r.put(name, place, key=key)


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
        file = find_file(r, str(own.get("deepspeed_config_file", "")))
        places = {
            part: {name: own.get(f"{part}_{name}") for name in ("device", "nvme_path")}
            for part in ("offload_param", "offload_optimizer")
        }
        content = {"zero_optimization": {"stage": own.get("zero_stage", 2), **places}}
        _put_deepspeed(r, content if file is None else load_json(file, key=key), key=key)
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
