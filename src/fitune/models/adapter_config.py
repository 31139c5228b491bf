"""adapter_config.json of strangers, every field of it, before PEFT sees any."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from peft import LoraConfig
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fitune.errors import CheckpointError
from fitune.spec.strict_json import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_AGAIN = "fetch it again, or export it again with the tool that made it"
_MERGE = "merge it with the tool that made it and use the merged model"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _drawn(value: bool | str) -> bool | str:
    """Starts that the saved weights replace, or that PEFT repeats from the base alone."""
    steps = re.fullmatch(r"pissa_niter_(\d{1,2})", value) if isinstance(value, str) else None
    if isinstance(value, bool) or steps or value in ("gaussian", "orthogonal", "eva", "olora", "pissa"):
        return value
    raise ValueError("is a start that changes the base in a way that the folder does not tell")


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
    target_modules: Name | Annotated[list[Name], Field(min_length=1)]
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
        words: dict[str, Any] = {
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name_or_path,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "fan_in_fan_out": self.fan_in_fan_out,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "lora_bias": self.lora_bias,
            "modules_to_save": self.modules_to_save,
            "init_lora_weights": True if self.init_lora_weights == "eva" else self.init_lora_weights,
        }
        return LoraConfig(**{**words, **settled})

    @property
    def unknown_words(self) -> tuple[str, ...]:
        """Settings in the file that fitune does not know and that are not empty."""
        return tuple(
            sorted(key for key, value in (self.model_extra or {}).items() if key not in _IDLE and value)
        )


_UNSUPPORTED = (
    "trainable_token_indices", "target_parameters", "layer_replication", "alora_invocation_tokens", "megatron_config",
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
