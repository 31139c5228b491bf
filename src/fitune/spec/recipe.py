"""Recipe: what the user wants, in the words of any of the popular frameworks.

``None`` means "you choose"; the planner decides it and prints what it decided. Unknown and duplicate
keys are refused with a did-you-mean. pydantic is used here and nowhere else: this is the boundary.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fitune.errors import RecipeError, did_you_mean
from fitune.units import parse_bytes

ALIASES = {
    "base_model": "model", "model_name_or_path": "model", "model_name": "model",
    "finetuning_type": "tuning", "adapter": "tuning", "train_type": "tuning", "tuner_type": "tuning",
    "lr": "learning_rate",
    "per_device_train_batch_size": "micro_batch_size", "batch_size": "micro_batch_size",
    "max_length": "seq_len", "max_seq_length": "seq_len", "max_seq_len": "seq_len",
    "sequence_len": "seq_len", "cutoff_len": "seq_len", "context_length": "seq_len",
    "lora_rank": "lora_r",
    "lora_target": "lora_target_modules", "target_modules": "lora_target_modules",
    "num_train_epochs": "num_epochs", "epochs": "num_epochs",
    "recompute": "gradient_checkpointing", "enable_activation_checkpointing": "gradient_checkpointing",
    "flash_attn": "attn_implementation", "attn_impl": "attn_implementation",
    "attention_implementation": "attn_implementation",
    "out_dir": "output_dir", "output_directory": "output_dir",
    "resume_from_checkpoint": "resume",
    "logger": "report_to", "tracker": "report_to", "log_to": "report_to",
    "val_size": "val_fraction", "val_set_size": "val_fraction", "validation_size": "val_fraction",
    "split_dataset_ratio": "val_fraction",
    "dataset": "data", "datasets": "data", "train_data": "data",
    "eval_dataset": "eval_data", "val_data": "eval_data",
    "lr_scheduler_type": "lr_scheduler", "scheduler": "lr_scheduler",
    "optim": "optimizer",
    "max_grad_norm": "max_grad_norm", "gradient_clipping": "max_grad_norm", "grad_clip": "max_grad_norm",
    "save_total_limit": "keep_checkpoints",
    "sample_packing": "packing",
    "logging_steps": "log_steps",
    "dtype": "precision", "torch_dtype": "precision",
    "chat_template_path": "chat_template",
    "train_on_inputs": "train_on_prompt",
}  # fmt: skip
"""Other frameworks' name -> ours."""

_VALUE_ALIASES: dict[str, dict[str, str]] = {
    "precision": {
        "float32": "fp32", "32": "fp32", "bfloat16": "bf16", "pure_bf16": "bf16", "float16": "fp16",
        "bf16-mixed": "bf16-master", "bf16_master": "bf16-master",
    },
    "optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adam": "adamw",
        "sgd_momentum": "momentum", "momentum_sgd": "momentum",
    },
    "attn_implementation": {
        "flash_attention_2": "flash", "fa2": "flash", "flash_attention": "flash", "true": "flash",
        "disabled": "eager", "false": "sdpa",
    },
    "lr_scheduler": {"constant_with_warmup": "constant", "cosine_with_warmup": "cosine"},
}  # fmt: skip


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-4`` as text; people mean the number."""
    if isinstance(value, bool):
        raise ValueError("expected a number, found a boolean")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"expected a number, found {value!r}") from None
    return value


def _whole_number(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"expected a whole number, found {value}")
        return int(value)
    return value


def _size(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


def _names(value: Any) -> Any:
    """One name, a comma-separated text or a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _sources(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _recompute(value: Any) -> Any:
    if isinstance(value, str):
        known = {"true": True, "on": True, "all": True, "false": False, "off": False, "none": False}
        return known.get(value.lower(), _whole_number(value) if value.strip().isdigit() else value)
    return value


PositiveInt = Annotated[int, BeforeValidator(_whole_number), Field(gt=0)]
CountInt = Annotated[int, BeforeValidator(_whole_number), Field(ge=0)]
PositiveFloat = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
CountFloat = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Names = Annotated[list[str], BeforeValidator(_names)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRecipe(_Strict):
    """One dataset: a path or Hub id (``path#500`` takes 500 rows), how to read it, its weight in the mix."""

    path: str
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text", "columns"] = "auto"
    split: str = "train"
    columns: dict[Literal["system", "prompt", "completion", "text"], str] = {}
    sample: CountInt = 0
    weight: PositiveFloat = 1.0


Sources = Annotated[
    list[Annotated[SourceRecipe, BeforeValidator(_source)]],
    BeforeValidator(_sources),
]


class Recipe(_Strict):
    """Everything a user may ask for. Only ``model`` has no default."""

    # what
    model: str
    tuning: Literal["full", "lora"] | None = None
    precision: Literal["fp32", "bf16", "bf16-master", "fp16"] | None = None
    lora_r: PositiveInt = 16
    lora_alpha: PositiveInt | None = None
    lora_dropout: Share = 0.0
    lora_target_modules: Names = ["all-linear"]

    # on what
    gpu: str | None = None
    gpus: PositiveInt = 1
    nodes: PositiveInt = 1
    host_memory: Size | None = None

    # with which data
    data: Sources = []
    eval_data: Sources = []
    val_fraction: Share = 0.0
    chat_template: str = ""
    train_on_prompt: bool = False
    packing: bool = True
    on_bad_row: Literal["error", "skip"] = "error"
    on_long_row: Literal["truncate", "drop", "split", "error"] = "truncate"

    # in which batches
    seq_len: PositiveInt = 2048
    micro_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None

    # how
    optimizer: Literal["adamw", "sgd", "momentum"] = "adamw"
    learning_rate: PositiveFloat | None = None
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: CountInt | None = None
    warmup_ratio: Share = 0.03
    weight_decay: CountFloat = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    momentum: Share = 0.9
    max_grad_norm: CountFloat = 1.0
    num_epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    seed: CountInt = 42

    # to save memory
    gradient_checkpointing: Annotated[bool | CountInt | None, BeforeValidator(_recompute)] = None
    loss: Literal["plain", "chunked"] | None = None
    loss_chunk_tokens: PositiveInt | None = None
    attn_implementation: Literal["flash", "sdpa", "eager"] | None = None

    # where to
    output_dir: str | None = None
    resume: bool | str = False
    log_steps: PositiveInt = 1
    eval_steps: CountInt = 0
    save_steps: CountInt = 0
    keep_checkpoints: PositiveInt = 2
    export: Literal["adapter", "merged", "full"] | None = None
    report_to: Names = []
    samples: CountInt = 4


def read_recipe(path: Path | None, *, settings: Iterable[str] = (), options: Mapping[str, Any] | None = None) -> Recipe:
    """A YAML file, then ``a.b=c`` settings, then command-line options; the later wins.

    Raises RecipeError naming the file, the key, what is wrong and the nearest known key.
    """
    raw = _load_yaml(path) if path is not None else {}
    where = str(path) if path is not None else "the command line"
    wanted = canonical_keys(raw, where=where)
    for setting in settings:
        _apply_setting(wanted, setting)
    wanted.update(canonical_keys({k: v for k, v in (options or {}).items() if v is not None}, where="the options"))
    return parse_recipe(wanted, where=where)


def parse_recipe(wanted: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate keys that are already canonical."""
    if "model" not in wanted:
        raise RecipeError(f"{where}: no model is named", hint="model: meta-llama/Llama-3.1-8B, or --model on the command line")
    try:
        return Recipe.model_validate(dict(wanted))
    except ValidationError as error:
        raise RecipeError(_describe(error, where=where)) from None


def canonical_keys(raw: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Replace other frameworks' names and values by ours; refuse unknown keys and two names for one setting."""
    known = [*Recipe.model_fields, *ALIASES]
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in raw.items():
        if key in _SWITCHES:
            name, value = _SWITCHES[key](value)
        else:
            name = ALIASES.get(key, key)
        if name is None:
            continue
        if name not in Recipe.model_fields:
            raise RecipeError(f"{where}: unknown key {key!r}", hint=did_you_mean(str(key), known))
        if name in spelled and result[name] != value:
            raise RecipeError(
                f"{where}: {spelled[name]!r} and {key!r} both set {name}, to {result[name]!r} and {value!r}",
                hint=f"keep one of them, as {name}",
            )
        spelled[name] = key
        result[name] = _canonical_value(name, value)
    return result


def _canonical_value(name: str, value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "auto":
        return None
    text = str(value).lower() if isinstance(value, str | bool) else value
    aliases = _VALUE_ALIASES.get(name)
    if aliases is not None and isinstance(text, str):
        return aliases.get(text, text)
    if name == "lora_target_modules" and value == "all":
        return ["all-linear"]
    return value


def _switch(name: str, on: str) -> Any:
    """A boolean of another framework that stands for a value of ours; ``false`` leaves the setting open."""

    def convert(value: Any) -> tuple[str | None, Any]:
        return (name, on) if value is True else (None, None)

    return convert


def _method_of_quantization(value: Any) -> tuple[str | None, Any]:
    return ("tuning", "qlora") if value in (4, "4", True) else (None, None)


_SWITCHES = {
    "bf16": _switch("precision", "bf16-master"),
    "fp16": _switch("precision", "fp16"),
    "pure_bf16": _switch("precision", "bf16"),
    "load_in_4bit": _method_of_quantization,
    "quantization_bit": _method_of_quantization,
}


def _apply_setting(wanted: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting!r} is not of the form key=value", hint="--set lora_r=32")
    head, *rest = key.strip().split(".")
    value = _parse_yaml(text, where=f"--set {setting}")
    if rest:
        nested = value
        value = wanted.get(ALIASES.get(head, head))
        value = _set_inside(value, rest, nested, setting)
    wanted.update(canonical_keys({head: value}, where=f"--set {setting}"))


def _set_inside(container: Any, keys: list[str], value: Any, setting: str) -> Any:
    """A copy of ``container`` with the value at ``keys`` (list positions or names) replaced."""
    head, *rest = keys
    if isinstance(container, list):
        if not head.isdigit() or int(head) >= len(container):
            raise RecipeError(f"--set {setting}: {head!r} is no position in a list of {len(container)}")
        copy: Any = list(container)
        place: Any = int(head)
        inner = copy[place]
    else:
        if isinstance(container, str):
            container = {"path": container}
        copy = dict(container or {})
        place, inner = head, copy.get(head)
    copy[place] = _set_inside(inner, rest, value, setting) if rest else value
    return copy


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and aliases (a few bytes of them can fill the memory)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    value = _parse_yaml(text, where=str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: a recipe is a list of `key: value` lines, found {type(value).__name__}")
    return value


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # _StrictLoader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{where}{place}: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise RecipeError(f"{where}: nested too deeply") from None


def _describe(error: ValidationError, *, where: str) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "recipe"
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {path} = {item['input']!r}: {message}")
    return "\n".join(dict.fromkeys(lines))


def dump_recipe(recipe: Recipe) -> str:
    """YAML of the settings that differ from the defaults, in the order of the Recipe."""
    data = recipe.model_dump(exclude_defaults=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
