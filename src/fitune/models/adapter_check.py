"""Look at an adapter before anything of it is loaded or run.

PEFT loads what matches and leaves the rest at its initial value, with a warning at most: an adapter of
another base is then silently ignored (vllm#34186). Here the config promises keys, and each must be there.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fitune.errors import CheckpointError
from fitune.models.adapter_config import CONFIG, WEIGHTS, AdapterConfig, Targets, read_adapter_config
from fitune.models.adapter_shapes import (
    Shape,
    Shapes,
    Stack,
    from_block,
    layers_around,
    shape_in_base,
    stacks_of,
    table_shape,
)
from fitune.models.remote_code import refuse_pickle, refuse_remote_code
from fitune.spec.model.model_spec import ModelSpec

_Key = tuple[str, Shape]
_LONGEST_KEY = 1_000
_SHOWN_KEYS = 8
_FLOATS = ("F64", "F32", "F16", "BF16")


def check_adapter(
    path: Path,
    *,
    base: ModelSpec | Shapes,
    tensors: Mapping[str, Shape] | None = None,
    stacks: Mapping[str, Stack] | None = None,
) -> tuple[str, ...]:
    """Warnings about a LoRA adapter that fits ``base``: it changes nothing, names another base, or says more.

    ``tensors``: shapes of all tensors of the model, where it is there, for modules that are trained whole; ``stacks``:
    its stacks of experts.
    Raises CheckpointError with the keys that are of another rank, another shape, unknown, missing or not
    finite, and for pickled weights and code that would have to run. Only safetensors and JSON are read.
    """
    refuse_pickle(path)
    refuse_remote_code(path)
    config = read_adapter_config(path)
    known = stacks_of(base) if stacks is None else stacks
    around = layers_around(config.target_parameters or (), known)
    if absent := [each for each in config.target_parameters or () if not layers_around([each], known)]:
        raise CheckpointError(
            f"{path / CONFIG}: target_parameters names {absent[0]!r}, and the base has no experts stacked there",
            hint="take it with the base it was made for",
        )
    check = _Check(config=config, base=base, tensors=tensors, stacks=around)
    with _opened(path / WEIGHTS) as file:
        try:
            check.names({key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118  (not a dict)
        except ValueError as error:  # an expression that takes forever, or is none
            raise CheckpointError(f"{path}: {error}", hint="name the linears in target_modules") from None
        check.values(file)
    if check.problems:
        raise _does_not_fit(path, config, base, check.problems)
    warnings = ["the adapter changes nothing: every B matrix is zero"] if check.is_zero else []
    if config.unknown_words:
        warnings.append(f"adapter_config.json: unknown and ignored: {', '.join(config.unknown_words[:5])}")
    return (*warnings, *_other_base(config, base))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing", hint="name the folder that holds the adapter")
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged, no safetensors: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


_PREFIX = "base_model.model."
_KEY = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector)(?<!\n)")


@dataclass(slots=True, kw_only=True)
class _Check:
    """Problems with the keys of one adapter."""

    config: AdapterConfig
    base: ModelSpec | Shapes
    tensors: Mapping[str, Shape] | None
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Name of a layer around experts -> the stack that it adapts."""
    problems: list[str] = field(default_factory=list)
    sound: list[str] = field(default_factory=list)
    """Keys that are promised, of the right shape: those whose values are worth reading."""
    is_zero: bool = True

    def names(self, found: Mapping[str, Shape]) -> None:
        """Hold the names and shapes of the file against what the config promises of the base."""
        targets = Targets(self.config)
        parts: dict[str, dict[str, _Key]] = {}
        saved: dict[str, Shape] = {}
        for key, shape in found.items():
            name = key.removeprefix(_PREFIX)
            if len(key) > _LONGEST_KEY:
                self.problems.append(f"{key[:60]}…: unknown key of {len(key):,} letters")
            elif (
                match := _KEY.fullmatch(name.removesuffix(".weight") if _is_magnitude(name) else name)
            ) is None:
                saved[key] = shape
            elif match[2] in parts.setdefault(match[1], {}) or (
                name == key and shape_in_base(match[1], self.base)
            ):
                self.problems.append(
                    f"{key}: PEFT would ignore it: it does not begin with {_PREFIX}, or is there twice"
                )
            else:
                parts[match[1]][match[2]] = (key, shape)
        if not parts:
            self.problems.append("no lora_A and lora_B at all")
        for module, keys in parts.items():
            self._module(module, keys, targets)
        self._saved(saved)
        self.problems += [f"{name}: missing" for name in _missing(set(parts), targets, self.base)]
        there = {from_block(name) if isinstance(self.base, ModelSpec) else name for name in parts}
        self.problems += [f"{name}: missing" for name in self.stacks if name not in there]

    def values(self, file: Any) -> None:
        """Read the tensors of the right shape, one at a time: all finite, and is any B not zero?"""
        for key in self.sound:
            kind = file.get_slice(key).get_dtype()
            if kind not in _FLOATS:
                self.problems.append(f"{key}: holds {kind}, expected one of {', '.join(_FLOATS)}")
                continue
            tensor = file.get_tensor(key)
            if not torch.isfinite(tensor).all():
                self.problems.append(f"{key}: NaN or infinite")
            starts_as_something = "lora_A." in key or _is_magnitude(key)
            self.is_zero = self.is_zero and (starts_as_something or not tensor.any())

    def _module(self, module: str, found: Mapping[str, _Key], targets: Targets) -> None:
        stack = self.stacks.get(from_block(module) if isinstance(self.base, ModelSpec) else module)
        if stack is not None:
            rank = self.config.r * stack.copies
            promised = _promised(self.config, (stack.in_features, stack.out_features), rank)
            for part in (*promised, *(found.keys() - promised.keys())):
                self._part(f"{module}.{part.removesuffix('.weight')}", found.get(part), promised.get(part))
            return
        shape = shape_in_base(module, self.base)
        if shape is None:
            self.problems.append(f"{module}: the base has no such linear")
            return
        if not targets.adapts(module):
            self.problems.append(f"{module}: not among target_modules, so it would be ignored")
            return
        targets.alpha(module)  # its expressions, too, can be wrong
        promised = _promised(self.config, shape, targets.rank(module))
        for part in (*promised, *(found.keys() - promised.keys())):
            self._part(f"{module}.{part.removesuffix('.weight')}", found.get(part), promised.get(part))

    def _part(self, name: str, found: _Key | None, promised: Shape | None) -> None:
        if promised is None:
            self.problems.append(f"{name}: unknown key: adapter_config.json does not promise it")
        elif found is None or found[1] != promised:
            self.problems.append(f"{name}: {'missing' if found is None else found[1]}, expected {promised}")
        else:
            self.sound.append(found[0])

    def _saved(self, found: Mapping[str, Shape]) -> None:
        """Keys beside A and B: modules trained whole; embedding and head may have more rows, for added tokens."""
        wanted = self.config.modules_to_save or []
        promised = _saved_whole(wanted, self.tensors)
        for key, shape in found.items():
            name = key.removeprefix(_PREFIX)
            known = _is_whole(name, wanted) if self.tensors is None else name in promised
            expected = promised.get(name) or table_shape(name, shape, self.base)
            if not known or name == key:
                self.problems.append(f"{key}: unknown key")
            elif expected is not None and not _fits(shape, expected):
                self.problems.append(f"{key}: {shape}, expected {expected}")
            else:
                self.sound.append(key)
        names = {key.removeprefix(_PREFIX) for key in found}
        self.problems += [f"{name}: missing" for name in promised if name not in names]
        if self.tensors is None:
            absent = [name for name in wanted if not any(_is_whole(key, [name]) for key in names)]
            self.problems += [f"{name}, of modules_to_save: missing" for name in absent]


def _is_magnitude(name: str) -> bool:
    return name.endswith((".lora_magnitude_vector", ".lora_magnitude_vector.weight"))


def _promised(config: AdapterConfig, linear: tuple[int, int], rank: int) -> dict[str, Shape]:
    """Part of a key -> its shape: A is rank × in, B is out × rank."""
    promised: dict[str, Shape] = {"lora_A.weight": (rank, linear[0]), "lora_B.weight": (linear[1], rank)}
    if config.lora_bias:
        promised["lora_B.bias"] = (linear[1],)
    if config.use_dora:
        promised["lora_magnitude_vector"] = (linear[1],)
    return promised


def _is_whole(name: str, modules: list[str]) -> bool:
    """True if the tensor of this name is in one of the modules, as PEFT finds them: by the end of a name."""
    parents = [name[: place.start()] for place in re.finditer(r"\.", name)]
    return any(parent.endswith(module) for parent in parents for module in modules)


def _saved_whole(modules: list[str], tensors: Mapping[str, Shape] | None) -> dict[str, Shape]:
    return {name: shape for name, shape in (tensors or {}).items() if _is_whole(name, modules)}


def _fits(found: Shape, expected: Shape) -> bool:
    """Equal, or a table with more rows: tokens were added."""
    grown = len(found) == len(expected) == 2 and found[1] == expected[1] and found[0] >= expected[0]
    return grown or found == expected


def _missing(present: set[str], targets: Targets, base: ModelSpec | Shapes) -> list[str]:
    """Linears that the config says are adapted and that have no key.

    A ModelSpec knows the ends of names only, which is too little for expressions.
    """
    if not isinstance(base, ModelSpec):
        return [name for name in base if name not in present and targets.adapts(name)]
    if not targets.are_plain:
        return []
    tails = {from_block(name) for name in present}
    names = [
        f"model.layers.{layer}.{m.name}"
        for layer in range(base.num_layers)
        for m in base.linears_of(layer)
        if m.adaptable and m.copies == 1
    ]
    return [from_block(name) for name in names if from_block(name) not in tails and targets.adapts(name)]


def _other_base(config: AdapterConfig, base: ModelSpec | Shapes) -> tuple[str, ...]:
    named = config.base_model_name_or_path or ""
    if not isinstance(base, ModelSpec) or not named:
        return ()
    if Path(named).name.lower() == Path(base.name).name.lower():
        return ()
    return (
        f"the adapter was trained on {named!r}; it fits the shapes of {base.name!r}, which may be another model",
    )


def _does_not_fit(
    path: Path, config: AdapterConfig, base: ModelSpec | Shapes, problems: list[str]
) -> CheckpointError:
    name = base.name if isinstance(base, ModelSpec) else "the model"
    shown = [f"  {problem}" for problem in problems[:_SHOWN_KEYS]]
    if len(problems) > _SHOWN_KEYS:
        shown.append(f"  … and {len(problems) - _SHOWN_KEYS} more")
    return CheckpointError(
        f"{path}: the adapter (r {config.r}) does not fit {name}, {len(problems)} key{'s' * (len(problems) != 1)}:\n"
        + "\n".join(shown),
        hint=f"take it with the base it names, {config.base_model_name_or_path!r}, or export it again",
    )
