"""adapter_config.json of strangers, checked field by field before PEFT sees any of it, and the linears it chooses.

Its expressions are matched here, by PEFT's rules, and PEFT is given the full names that they chose.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from peft import LoraConfig
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fitune.errors import CheckpointError
from fitune.spec.serial import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_AGAIN = "fetch it again, or export it again with the tool that made it"
_MERGE = "merge it with the tool that made it and use the merged model"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _drawn(value: bool | str) -> bool | str:
    """Initialisations that the saved weights replace, or that PEFT can repeat from the base alone."""
    steps = re.fullmatch(r"pissa_niter_(\d{1,2})", value) if isinstance(value, str) else None
    if isinstance(value, bool) or steps or value in ("gaussian", "orthogonal", "eva", "olora", "pissa"):
        return value
    raise ValueError(
        "is an initialisation that changes the base weights, and the folder does not hold that change"
    )


Name = Annotated[str, Field(min_length=1, max_length=4_000)]
PlainName = Annotated[str, Field(pattern=r"^[\w\-.]+$", max_length=1_000)]
Rank = Annotated[int, Field(ge=1, le=65_536)]
Alpha = Annotated[int | float, AfterValidator(_finite)]
_NOT_ENDLESS = Field(max_length=50_000)
Layer = Annotated[int, Field(ge=0, le=1_000_000)]


class AdapterConfig(BaseModel):
    """Fields of PEFT's LoraConfig that fitune honours; what it would have to ignore is refused by name."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=True)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: str | None = None
    r: Rank
    lora_alpha: Alpha = 8
    lora_dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    target_modules: Name | list[Name] | None = None
    target_parameters: list[Name] | None = None
    exclude_modules: str | list[Name] | None = None
    layers_to_transform: Layer | list[Layer] | None = None
    layers_pattern: str | list[Name] | None = None
    rank_pattern: Annotated[dict[Name, Rank], _NOT_ENDLESS] | None = None
    alpha_pattern: Annotated[dict[Name, Alpha], _NOT_ENDLESS] | None = None
    modules_to_save: list[PlainName] | None = None
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: Annotated[bool | str, AfterValidator(_drawn)] = True
    auto_mapping: dict[str, Any] | None = None

    def for_peft(self, **settled: Any) -> LoraConfig:
        """PEFT's own config of this one: nothing else of the file, and ``settled`` in place of what it says."""
        words = self.model_dump(include=_FOR_PEFT) | {"task_type": "CAUSAL_LM"}
        if self.init_lora_weights == "eva":
            words["init_lora_weights"] = True
        return LoraConfig(**{**words, **settled})

    @property
    def unknown_words(self) -> tuple[str, ...]:
        """Settings in the file that fitune does not know and that are not empty."""
        return tuple(
            sorted(key for key, value in (self.model_extra or {}).items() if key not in _IDLE and value)
        )


_FOR_PEFT = {
    "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "use_dora",
    "lora_bias", "modules_to_save", "init_lora_weights", "target_parameters",
}  # fmt: skip
_UNSUPPORTED = (
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "megatron_config",
    "use_qalora", "use_bdlora", "arrow_config", "velora_config", "monteclora_config", "kasa_config",
)  # fmt: skip
"""PEFT's settings that change what an adapter computes and that fitune does not check."""
_IDLE = (
    "inference_mode", "peft_version", "revision", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
)  # fmt: skip
"""Settings that only training or the making of the file depends on."""


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises CheckpointError naming the field that is missing, of another type, out of range or not supported."""
    file = folder / CONFIG
    try:
        content = read_object(file)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {CONFIG}, so this is no adapter folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", hint="fetch it again") from error
    for name in _UNSUPPORTED:
        if content.get(name):
            raise CheckpointError(f"{file}: {name} = {_short(content[name])} is not supported", hint=_MERGE)
    try:
        config = AdapterConfig.model_validate(content)
    except ValidationError as error:
        raise _wrong(file, content, error) from None
    if not config.target_modules and not config.target_parameters:
        found = (
            f"= {_short(content['target_modules'])} adapts nothing"
            if "target_modules" in content
            else "is missing"
        )
        raise CheckpointError(f"{file}: target_modules {found}", hint=_AGAIN)
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise CheckpointError(
            f"{file}: layers_to_transform = {_short(config.layers_to_transform)} needs target_modules to be a list "
            f"of names; it is {_short(config.target_modules)}",
            hint=_AGAIN,
        )
    return config


def _wrong(file: Path, content: dict[str, Any], error: ValidationError) -> CheckpointError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "it"
    if first["type"] == "missing":
        return CheckpointError(f"{file}: {name} is missing", hint=_AGAIN)
    found = _short(content.get(name))
    if name == "peft_type":
        return CheckpointError(f"{file}: peft_type = {found}; fitune takes LORA adapters", hint=_MERGE)
    said = str(first["msg"]).removeprefix("Value error, ")
    return CheckpointError(f"{file}: {name} = {found}: {said[:1].lower()}{said[1:]}", hint=_AGAIN)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


HEAD = "lm_head"

T = TypeVar("T")


@dataclass(slots=True)
class Targets:
    """The choices of one config. Every method raises ValueError for an expression that cannot be used."""

    config: AdapterConfig
    _sets: dict[int, frozenset[str]] = field(default_factory=dict)

    @property
    def are_plain(self) -> bool:
        """True if names alone choose, so that the end of a name is enough to tell."""
        config = self.config
        is_list = isinstance(config.target_modules, list)
        return is_list and not config.layers_pattern and not isinstance(config.exclude_modules, str)

    def adapts(self, module: str) -> bool:
        """True if the linear of this full name is adapted."""
        config = self.config
        if config.exclude_modules and self._is_among(config.exclude_modules, module):
            return False
        if config.target_modules == "all-linear":
            return module != HEAD
        if not config.target_modules:
            return False
        if isinstance(config.target_modules, list) and module in config.target_modules:
            return True
        return self._is_among(config.target_modules, module) and self._is_in_layer(module)

    def rank(self, module: str) -> int:
        return self._by_pattern(self.config.rank_pattern, module) or self.config.r

    def alpha(self, module: str) -> float:
        found = self._by_pattern(self.config.alpha_pattern, module)
        return self.config.lora_alpha if found is None else found

    def _is_among(self, wanted: str | list[str], module: str) -> bool:
        if isinstance(wanted, str):
            return _match(re.fullmatch, wanted, module) is not None
        names = self._sets.setdefault(id(wanted), frozenset(wanted))
        return any(
            module[begin:] in names for begin in (0, *(dot.end() for dot in re.finditer(r"\.", module)))
        )

    def _is_in_layer(self, module: str) -> bool:
        """Number of the block: the first in the name, or the one behind a ``layers_pattern``."""
        layers = self.config.layers_to_transform
        if layers is None or layers == []:
            return True
        patterns = self.config.layers_pattern or ""
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            anchored = (
                rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." if self.config.layers_pattern else _FIRST_NUMBER
            )
            found = _match(re.match, anchored, module)
            if found is not None:
                number = found["idx"].lstrip("0") or "0"
                return number in map(str, [layers] if isinstance(layers, int) else layers)
        return False

    def _by_pattern(self, patterns: Mapping[str, T] | None, module: str) -> T | None:
        """PEFT's rule: the first pattern that ends the name wins."""
        for pattern, value in (patterns or {}).items():
            if _PLAIN.fullmatch(pattern):
                is_end = _ends_with(module, pattern)
            else:
                is_end = _match(re.match, rf"(.*\.)?({pattern})$", module) is not None
            if is_end:
                return value
        return None


def _match(
    match: Callable[[str, str], re.Match[str] | None], expression: str, module: str
) -> re.Match[str] | None:
    """What ``re.match`` or ``re.fullmatch`` finds. Raises ValueError for what is no regular expression."""
    try:
        return match(expression, module)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{_short(expression)} is no regular expression: {error}") from None


_PLAIN = re.compile(r"[\w\-.]+")


def _ends_with(module: str, pattern: str) -> bool:
    """True if the name ends with the expression of letters and dots, in which a dot is any letter."""
    begin = len(module) - len(pattern)
    if begin < 0 or (begin > 0 and module[begin - 1] != "."):
        return False
    return all(wanted in (letter, ".") for wanted, letter in zip(pattern, module[begin:], strict=True))


_FIRST_NUMBER = r".*?\.[^.]*\.(?P<idx>\d+)\."


def settled(config: AdapterConfig, modules: Mapping[str, str]) -> dict[str, object]:
    """target_modules, rank_pattern and alpha_pattern in full names of the model, for PEFT.

    ``modules``: name as the adapter has it -> name in the model.
    Raises ValueError for an expression that cannot be used; ``check_adapter`` did so before.
    """
    targets = Targets(config)
    chosen = [module for module in modules if targets.adapts(module)]
    ranks = {modules[module]: targets.rank(module) for module in chosen}
    alphas = {modules[module]: targets.alpha(module) for module in chosen}
    return {
        "target_modules": [modules[module] for module in chosen],
        "rank_pattern": {re.escape(m): rank for m, rank in ranks.items() if rank != config.r},
        "alpha_pattern": {re.escape(m): alpha for m, alpha in alphas.items() if alpha != config.lora_alpha},
    }
