"""Look at an adapter, or a model folder, before anything of it is loaded or run.

PEFT loads what matches and leaves the rest at its initial value, with a warning at most: an adapter of
another base is then silently ignored (vllm#34186). Here every key must find its linear.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fitune.errors import CheckpointError
from fitune.models.foreign import refuse_pickle, refuse_remote_code
from fitune.spec.model import ModelSpec
from fitune.spec.strict_json import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Shapes = Mapping[str, tuple[int, int]]
"""Name of a linear in the model -> (in_features, out_features)."""

_SHOWN_KEYS = 8


def check_adapter(path: Path, *, base: ModelSpec | Shapes) -> tuple[str, ...]:
    """Warnings about a LoRA adapter that fits ``base``: it changes nothing, or it names another base.

    Raises CheckpointError with the keys that are of another rank, another shape, unknown, missing or not
    finite, and for pickled weights and code that would have to run. Only safetensors and JSON are read.
    """
    refuse_pickle(path)
    refuse_remote_code(path)
    config = _read_config(path)
    pairs, problems, is_zero = _read_weights(path, config, base)
    problems += [problem for pair in pairs.values() for problem in _mismatches(pair, config, base)]
    problems += [
        f"{name}: not among target_modules, so it would be ignored" for name in _untargeted(pairs, config)
    ]
    problems += [f"{name}: missing" for name in _missing(set(pairs), config, base)]
    if problems:
        raise _does_not_fit(path, config, base, problems)
    warnings = ["the adapter changes nothing: every B matrix is zero"] if is_zero else []
    return (*warnings, *_other_base(config, base))


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of every linear of a model without adapters, by name."""
    from transformers.pytorch_utils import Conv1D

    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2 keeps its weights transposed
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
    return shapes


@dataclass(slots=True)
class _Pair:
    """Shapes of the two matrices found for one linear; A is rank × in, B is out × rank."""

    module: str
    a: tuple[int, ...] | None = None
    b: tuple[int, ...] | None = None


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = read_object(file)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {CONFIG}, so this is no adapter folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", hint="fetch it again") from error
    rank = config.get("r")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int):
        raise CheckpointError(
            f"{file}: peft_type {config.get('peft_type')!r} with r {rank!r}; fitune takes LORA adapters",
            hint="merge it with the tool that made it and use the merged model",
        )
    return config


_LORA_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")


def _read_weights(
    path: Path, config: dict[str, Any], base: ModelSpec | Shapes
) -> tuple[dict[str, _Pair], list[str], bool]:
    """Pairs by linear, what is wrong with single keys, and whether all B are zero and nothing else is there.

    One tensor is in memory at a time.
    """
    pairs: dict[str, _Pair] = {}
    problems: list[str] = []
    is_zero = True
    for key, tensor in _tensors(path / WEIGHTS):
        if not torch.isfinite(tensor).all():
            problems.append(f"{key}: NaN or infinite")
        match = _LORA_KEY.fullmatch(key)
        if match is None:
            problems += _extra_problems(key, tensor, config, base)
            is_zero = is_zero and key.endswith(_MAGNITUDE)
            continue
        pair = pairs.setdefault(match[1], _Pair(module=match[1]))
        if match[2] == "A":
            pair.a = tuple(tensor.shape)
        else:
            pair.b = tuple(tensor.shape)
            is_zero = is_zero and not tensor.any()
    if not pairs:
        problems.append("no lora_A and lora_B at all")
    return pairs, problems, is_zero


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing", hint="name the folder that holds the adapter")
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (not a dict)
                yield key, opened.get_tensor(key)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged, no safetensors: {error}") from error


_MAGNITUDE = "lora_magnitude_vector"


def _extra_problems(
    key: str, tensor: torch.Tensor, config: dict[str, Any], base: ModelSpec | Shapes
) -> list[str]:
    """Of what is no A or B: DoRA's magnitudes, and modules trained whole, embedding and head by their shape."""
    if key.endswith(_MAGNITUDE):
        return []
    module, _, inner = key.rpartition(".")
    if not any(module.endswith(f".{name}") for name in config.get("modules_to_save") or []):
        return [f"{key}: unknown key"]
    wanted, found = _table_shape(base), tuple(tensor.shape)
    if wanted is None or inner != "weight" or len(found) != 2:
        return []
    fits = found[1] == wanted[1] and found[0] >= wanted[0]  # more rows: tokens were added
    return [] if fits else [f"{key}: {found}, expected {wanted}"]


def _table_shape(base: ModelSpec | Shapes) -> tuple[int, int] | None:
    """(vocabulary, hidden size); None when a model without a head has no saying."""
    if isinstance(base, ModelSpec):
        return base.vocab_size, base.hidden_size
    head = base.get("lm_head")
    return (head[1], head[0]) if head else None


def _mismatches(pair: _Pair, config: dict[str, Any], base: ModelSpec | Shapes) -> list[str]:
    shape = _shape_in_base(pair.module, base)
    if shape is None:
        return [f"{pair.module}: the base has no such linear"]
    rank = _rank(pair.module, config)
    wanted = {"A": (rank, shape[0]), "B": (shape[1], rank)}
    found = {"A": pair.a, "B": pair.b}
    return [
        f"{pair.module}.lora_{side}: {'missing' if found[side] is None else found[side]}, expected {wanted[side]}"
        for side in ("A", "B")
        if found[side] != wanted[side]
    ]


def _rank(module: str, config: dict[str, Any]) -> int:
    """PEFT's rule: the first pattern that ends the name wins over r."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return int(rank)
    return int(config["r"])


_IN_BLOCK = re.compile(r".*?\.(\d+)\.(.+)")


def _shape_in_base(module: str, base: ModelSpec | Shapes) -> tuple[int, int] | None:
    """(in_features, out_features), or None when the base has no linear of that name."""
    if not isinstance(base, ModelSpec):
        return base.get(module)
    if module == "lm_head":
        return base.hidden_size, base.vocab_size
    match = _IN_BLOCK.fullmatch(module)
    if match is None or int(match[1]) >= base.num_layers:
        return None
    found = [m for m in base.linears if m.name == match[2] and m.adaptable]
    return (found[0].in_features, found[0].out_features) if found else None


def _untargeted(present: Iterable[str], config: dict[str, Any]) -> list[str]:
    """Linears that have keys and that the config does not adapt: PEFT drops such keys without a word."""
    targets = _plain_targets(config)
    return [] if targets is None else [name for name in present if not _is_target(name, targets, config)]


def _plain_targets(config: dict[str, Any]) -> list[str] | None:
    """Names of the adapted linears; None where they are a pattern or narrowed by one."""
    targets = config.get("target_modules")
    narrowed = any(config.get(key) for key in ("layers_pattern", "exclude_modules"))
    return targets if isinstance(targets, list) and not narrowed else None


def _missing(present: set[str], config: dict[str, Any], base: ModelSpec | Shapes) -> list[str]:
    """Linears that the config says are adapted and that have no key. Only plain lists of names can be checked."""
    targets = _plain_targets(config)
    if targets is None:
        return []
    tails = {_tail(name) for name in present}
    return [name for name in _names(base) if _is_target(name, targets, config) and _tail(name) not in tails]


def _names(base: ModelSpec | Shapes) -> list[str]:
    if not isinstance(base, ModelSpec):
        return list(base)
    linears = [m for m in base.linears if m.adaptable and m.copies == 1]
    return [f"layers.{layer}.{m.name}" for layer in range(base.num_layers) for m in linears]


def _tail(name: str) -> str:
    """From the block number on: what comes before it, a ModelSpec does not know."""
    match = _IN_BLOCK.fullmatch(name)
    return f"{match[1]}.{match[2]}" if match else name


def _is_target(name: str, targets: list[str], config: dict[str, Any]) -> bool:
    layers, match = config.get("layers_to_transform"), _IN_BLOCK.fullmatch(name)
    chosen = [layers] if isinstance(layers, int) else layers or []
    if chosen and (match is None or int(match[1]) not in chosen):
        return False
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _other_base(config: dict[str, Any], base: ModelSpec | Shapes) -> tuple[str, ...]:
    named = str(config.get("base_model_name_or_path") or "")
    if not isinstance(base, ModelSpec) or not named:
        return ()
    if Path(named).name.lower() == Path(base.name).name.lower():
        return ()
    return (
        f"the adapter was trained on {named!r}; it fits the shapes of {base.name!r}, which may be another model",
    )


def _does_not_fit(
    path: Path, config: dict[str, Any], base: ModelSpec | Shapes, problems: list[str]
) -> CheckpointError:
    name = base.name if isinstance(base, ModelSpec) else "the model"
    shown = [f"  {problem}" for problem in problems[:_SHOWN_KEYS]]
    if len(problems) > _SHOWN_KEYS:
        shown.append(f"  … and {len(problems) - _SHOWN_KEYS} more")
    return CheckpointError(
        f"{path}: the adapter (r {config['r']}) does not fit {name}, {len(problems)} keys:\n"
        + "\n".join(shown),
        hint=f"take it with the base it names, {config.get('base_model_name_or_path')!r}, or export it again",
    )
