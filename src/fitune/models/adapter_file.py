"""The files of an adapter, looked at before anything of it is loaded.

PEFT loads what matches and leaves the rest at its initial value, with a warning at most: an adapter of another base is
then silently ignored (vllm#34186). Here PEFT makes of the config, on "meta", the adapter that it stands for, and each
of its keys must be in the file. What it has besides is named. adapter_config.json comes from strangers: each field is
checked before PEFT sees any of it.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fitune.errors import CheckpointError
from fitune.models.expert_adapters import names_as_given, stacks_among
from fitune.models.headers import FLOATS, name_in_whole, own_name
from fitune.models.readers import empty_model, model_config
from fitune.models.remote_code import refuse_pickle, refuse_remote_code
from fitune.values.serial import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_AGAIN = "fetch it again, or export it again with the tool that made it"
_MERGE = "merge it with the tool that made it and use the merged model"


def _drawn(value: bool | str) -> bool | str:
    """Initialisations that the saved weights replace, or that PEFT can repeat from the base alone."""
    steps = re.fullmatch(r"pissa_niter_(\d{1,2})", value) if isinstance(value, str) else None
    if isinstance(value, bool) or steps or value in ("gaussian", "orthogonal", "eva", "olora", "pissa"):
        return value
    raise ValueError(
        "is an initialisation that changes the base weights, and the folder does not hold that change"
    )


Name = Annotated[str, Field(min_length=1)]
PlainName = Annotated[str, Field(pattern=r"^[\w\-.]+$")]
Rank = Annotated[int, Field(ge=1, le=65_536)]
Alpha = Annotated[int | float, Field(allow_inf_nan=False)]
Layer = Annotated[int, Field(ge=0)]


class AdapterConfig(BaseModel):
    """Fields of PEFT's LoraConfig that fitune honours; what it would have to ignore is refused by name."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

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
    rank_pattern: dict[Name, Rank] | None = None
    alpha_pattern: dict[Name, Alpha] | None = None
    modules_to_save: list[PlainName] | None = None
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: Annotated[bool | str, AfterValidator(_drawn)] = True
    auto_mapping: dict[str, Any] | None = None

    def for_peft(self, **resolved: Any) -> LoraConfig:
        """PEFT's own config of this one: nothing else of the file, and ``resolved`` in place of what it says."""
        words = self.model_dump(include=_FOR_PEFT) | {"task_type": "CAUSAL_LM"}
        if self.init_lora_weights == "eva":
            words["init_lora_weights"] = True
        return LoraConfig(**{**words, **resolved})


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
        found = _short(content.get("target_modules"))
        raise CheckpointError(f"{file}: target_modules = {found} adapts nothing", hint=_AGAIN)
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
    said = str(first["msg"]).removeprefix("Value error, ")
    return CheckpointError(
        f"{file}: {name} = {_short(content.get(name))}: {said[:1].lower()}{said[1:]}",
        hint=_MERGE if name == "peft_type" else _AGAIN,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


PREFIX = "base_model.model."
"""Before a base model's names in an adapter's file."""
_SHOWN_KEYS = 8


def linear_names(model: nn.Module) -> list[str]:
    """The linears of a model without adapters; GPT-2 has them as Conv1D."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def resolved(config: AdapterConfig, linears: Mapping[str, str]) -> dict[str, object]:
    """target_modules, rank_pattern and alpha_pattern in full names of the model, for PEFT and by PEFT's rules.

    ``linears``: name as the adapter has it -> name in the model. Raises re.error for what is no regular expression.
    """
    all_of_them = config.target_modules == "all-linear"
    wanted: Any = config.model_copy(update={"target_modules": r"(?!lm_head$).*"}) if all_of_them else config
    words: dict[str, Any] = {"target_modules": [], "rank_pattern": {}, "alpha_pattern": {}}
    for name, own in linears.items():
        if not check_target_module_exists(wanted, name):
            continue
        words["target_modules"].append(own)
        for kind, patterns in (
            ("rank_pattern", config.rank_pattern),
            ("alpha_pattern", config.alpha_pattern),
        ):
            if patterns and (key := get_pattern_key(list(patterns), name)) in patterns:
                words[kind][re.escape(own)] = patterns[key]
    return words


def check_adapter(path: Path, *, base: str | Path | PreTrainedModel) -> tuple[str, ...]:
    """Warnings about a LoRA adapter that fits ``base``: it changes nothing, names another base, or says more.

    ``base``: a model, or the folder or Hub id of one. Raises CheckpointError with the keys that are of another rank,
    another shape, unknown, missing or not finite, and for pickled weights and code that would have to run. Only
    safetensors and JSON are read.
    """
    refuse_pickle(path)
    refuse_remote_code(path)
    config = read_adapter_config(path)
    problems: list[str] = []
    is_zero = True
    with _opened(path / WEIGHTS) as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  (not a dict)
        linears, promised = _promised(path, config, base, in_whole=any(key != own_name(key) for key in found))
        if not any(".lora_A." in key for key in found):
            problems.append("no lora_A and lora_B at all")
        for key, shape in found.items():
            name = own_name(key)
            if name.endswith("lora_magnitude_vector.weight"):  # an older PEFT's
                name = name.removesuffix(".weight")
            expected = promised.pop(name, None)
            kind = file.get_slice(key).get_dtype()
            # a table with more rows: tokens were added
            is_grown = expected and len(shape) == 2 and shape[1:] == expected[1:] and shape[0] > expected[0]
            if expected is None:
                module, is_pair, _ = name.partition(".lora_")
                why = "adapter_config.json does not promise it"
                if is_pair and module.removeprefix(PREFIX) not in linears:
                    why = "the base has no such linear"
                elif not name.startswith(PREFIX):
                    why = f"does not begin with {PREFIX}"
                problems.append(f"{key}: {why}")
            elif shape != expected and (".lora_" in key or not is_grown):
                problems.append(f"{key}: {shape}, expected {expected}")
            elif kind not in FLOATS:
                problems.append(f"{key}: holds {kind}, expected one of {', '.join(FLOATS)}")
            else:
                tensor = file.get_tensor(key)
                if not torch.isfinite(tensor).all():
                    problems.append(f"{key}: NaN or infinite")
                starts_as_something = "lora_A." in key or "lora_magnitude_vector" in key
                is_zero = is_zero and (starts_as_something or not tensor.any())
    problems += [f"{name}: missing, expected {shape}" for name, shape in promised.items()]
    named = config.base_model_name_or_path or ""
    known = base.config.name_or_path or "the model" if isinstance(base, PreTrainedModel) else str(base)
    if problems:
        shown = [f"  {problem}" for problem in problems[:_SHOWN_KEYS]]
        if len(problems) > _SHOWN_KEYS:
            shown.append(f"  … and {len(problems) - _SHOWN_KEYS} more")
        raise CheckpointError(
            f"{path}: the adapter (r {config.r}) does not fit {known}, {len(problems)} "
            f"key{'s' * (len(problems) != 1)}:\n" + "\n".join(shown),
            hint=f"take it with the base it {f'names, {named!r},' if named else 'was trained on,'} or export it again",
        )
    said = ["the adapter changes nothing: every B matrix is zero"] if is_zero else []
    unknown = sorted(key for key, value in (config.model_extra or {}).items() if key not in _IDLE and value)
    if unknown:
        said.append(f"adapter_config.json: unknown and ignored: {', '.join(unknown[:5])}")
    is_named = (
        isinstance(base, PreTrainedModel) or not named or Path(named).name.lower() == Path(known).name.lower()
    )
    if not is_named:
        said.append(
            f"the adapter was trained on {named!r}; it fits the shapes of {known!r}, which may be another model"
        )
    return tuple(said)


def _promised(
    path: Path, config: AdapterConfig, base: str | Path | PreTrainedModel, *, in_whole: bool
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Linears of the base, and the keys that PEFT would write for ``config`` on it, with their shapes; both under the
    language model's own names. ``in_whole``: the adapter's are those of a model that also sees."""
    with torch.device("meta"):
        model = empty_model(base.config if isinstance(base, PreTrainedModel) else model_config(str(base)))
        stacks = config.target_parameters or []
        if absent := sorted({*stacks} - {*stacks_among(model, stacks)}):
            raise CheckpointError(
                f"{path / CONFIG}: target_parameters names {absent[0]!r}, and the base has no experts stacked there",
                hint="take it with the base it was made for",
            )
        linears = linear_names(model)
        try:
            words = resolved(config, {name_in_whole(name) if in_whole else name: name for name in linears})
            if not words["target_modules"] and not stacks:
                return linears, {}
            with warnings.catch_warnings(), names_as_given():
                warnings.simplefilter("ignore")  # of ties that PEFT breaks; loading puts them back
                adapted = get_peft_model(model, config.for_peft(**words, init_lora_weights=True))
            state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        except (ValueError, re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{path}: {error}", hint="name the linears in target_modules") from None
    return linears, {name: tuple(tensor.shape) for name, tensor in state.items()}


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
