"""Recipe: what the user wants, in the words of any of the popular frameworks.

``None`` means "you choose"; the planner decides it and prints what it decided. Unknown and duplicate
keys are refused with a did-you-mean.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    PlainValidator,
    ValidationError,
)

from fitune.errors import RecipeError, did_you_mean
from fitune.spec.plan import Attention, Backend, DataFormat, Kernels, Place
from fitune.spec.recipe.aliases import (
    ALIASES,
    FOREIGN_FILES,
    SWITCHES,
    canonical_value,
    read_switch,
    refuse_foreign_value,
)
from fitune.spec.recipe.deepspeed_file import with_deepspeed_file
from fitune.spec.recipe.paths import with_absolute_paths
from fitune.spec.recipe.strict_yaml import type_inside, typed_value
from fitune.spec.recipe.values import (
    Bandwidth,
    CountFloat,
    CountInt,
    HubName,
    Layers,
    NamedPath,
    Names,
    PathText,
    PositiveFloat,
    PositiveInt,
    RowLength,
    Seed,
    Share,
    Size,
    Strict,
    Targets,
    as_columns,
    as_date,
    as_name,
    as_numbers,
    as_source,
    as_sources,
    described,
    quantiser_word,
    switch_or_count,
    whole_number,
)

Columns = Annotated[
    dict[Literal["system", "prompt", "completion", "text", "messages", "tools"], str],
    BeforeValidator(as_columns),
]


EVERY_KEY = "fitune plan --help lists every key"


class SourceRecipe(Strict):
    """One dataset: a path or Hub id (``path#500`` takes 500 rows), how to read it, its weight in the mix."""

    path: NamedPath
    format: DataFormat = "auto"
    split: str = "train"
    columns: Columns = {}
    sample: CountInt = 0
    weight: PositiveFloat = 1.0
    streaming: bool = False


Sources = Annotated[
    list[Annotated[SourceRecipe, BeforeValidator(as_source)]],
    BeforeValidator(as_sources),
]


class Recipe(Strict):
    """Everything a user may ask for. Only ``model`` has no default."""

    # what
    model: NamedPath
    tuning: Literal["full", "lora", "qlora", "lomo", "adalomo"] | None = None
    precision: Literal["fp32", "bf16", "bf16-master", "fp16"] | None = None
    lora_r: PositiveInt = 16
    lora_alpha: PositiveInt | None = None
    lora_dropout: Share = 0.0
    lora_target_modules: Targets = ["all-linear"]
    lora_layers: Layers = []
    lora_modules_to_save: Names = []
    added_tokens: Names = []
    dora: bool = False
    rslora: bool = False
    quantization: Annotated[str, PlainValidator(quantiser_word)] | None = None
    quantization_bits: Annotated[Literal[2, 3, 4, 8], BeforeValidator(whole_number)] | None = None
    quantization_group_size: PositiveInt = 64
    double_quantization: bool = True

    # on what
    gpu: Annotated[str, BeforeValidator(as_name)] | None = None
    gpu_memory: Size | None = None
    gpu_flops: PositiveFloat | None = None
    gpu_bandwidth: Bandwidth | None = None
    interconnect: Bandwidth | None = None
    node_network: Bandwidth | None = None
    gpus: PositiveInt | None = None
    nodes: PositiveInt = 1
    host_memory: Size | None = None
    nvme_path: PathText = ""
    nvme_size: Size | None = None
    price_per_gpu_hour: PositiveFloat | None = None
    objective: Literal["fastest", "cheapest", "least-memory"] = "fastest"

    # with which data
    data: Sources = []
    data_weights: Annotated[list[PositiveFloat], BeforeValidator(as_numbers)] = []
    columns: Columns = {}
    eval_data: Sources = []
    val_fraction: Share = 0.0
    chat_template: PathText = ""
    chat_template_date: Annotated[str, BeforeValidator(as_date)] = ""
    train_on_prompt: bool = False
    train_on_empty_thinking: bool = False
    packing: bool = False
    on_bad_row: Literal["error", "skip"] = "error"
    on_long_row: Literal["truncate", "drop", "split", "error"] = "truncate"
    cache_dir: PathText = ""
    allow_https: bool = False
    allow_private_addresses: bool = False

    # in which batches
    seq_len: RowLength = 2048
    mean_row_tokens: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None

    # how
    optimizer: Literal["adamw", "adamw-8bit", "sgd", "momentum"] = "adamw"
    optimizer_in_backward: bool = False
    learning_rate: PositiveFloat | None = None
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    min_lr_ratio: Share = 0.0
    warmup_steps: CountInt | None = None
    warmup_ratio: Share = 0.03
    weight_decay: CountFloat = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: PositiveFloat = 1e-8
    momentum: Share = 0.9
    max_grad_norm: CountFloat = 1.0
    max_grad_value: PositiveFloat | None = None
    num_epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    seed: Seed = 42

    # over which devices, and what leaves them
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole_number)] | None = None
    backend: Backend | None = None
    hybrid_sharding: bool | None = None
    deepspeed: dict[str, int | bool] = {}
    offload_parameters: Place | None = None
    offload_optimizer: Place | None = None
    offload_activations: Place | None = None

    # to save memory
    gradient_checkpointing: Annotated[bool | int, PlainValidator(switch_or_count)] | None = None
    loss: Literal["plain", "chunked"] | None = None
    loss_chunk_tokens: PositiveInt | None = None
    attn_implementation: Attention | None = None

    # to save time, when asked for
    kernels: Kernels = "torch"
    torch_compile: bool = False
    tf32: bool = False

    # where to
    output_dir: PathText | None = None
    upload_to: PathText = ""
    resume: bool | PathText = False
    log_steps: PositiveInt = 1
    eval_steps: CountInt = 0
    evals_per_epoch: CountInt = 0
    save_steps: CountInt | None = None
    saves_per_epoch: CountInt | None = None
    keep_checkpoints: PositiveInt = 2
    async_save: bool | None = None
    export: Literal["adapter", "merged", "full"] | None = None
    push_to_hub: HubName = ""
    hub_public: bool = False
    samples: CountInt = 4

    # who else is told
    report_to: Names = []
    run_name: str = ""
    track_project: str = ""
    track_team: str = ""
    track_server: str = ""
    track_id: str = ""
    track_offline: bool = False

    @property
    def quantization_is_asked_for(self) -> bool:
        """True if the recipe names a quantiser or its bits; ``none`` is the wish for none."""
        return self.quantization not in (None, "none") or self.quantization_bits is not None

    @property
    def adapters_asked_by(self) -> str:
        """The first key that only adapters can honour; empty when there is none."""
        named = {
            "export": self.export in ("adapter", "merged"), "quantization": self.quantization not in (None, "none"),
            "quantization_bits": self.quantization_bits, "dora": self.dora, "rslora": self.rslora,
            "lora_layers": self.lora_layers,
        }  # fmt: skip
        return next((name for name, is_asked in named.items() if is_asked), "")


def layered_recipe(
    keys: Mapping[str, Any],
    *,
    where: str,
    settings: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Recipe:
    """Canonical keys of a file, then ``a=c`` settings, then options, then ``a.b=c`` settings, which change a part of
    what an option names; the later wins. Raises RecipeError."""
    wanted = dict(keys)
    settings = tuple(settings)
    for setting in settings:
        if not _sets_a_part(setting):
            _apply_setting(wanted, setting)
    wanted.update(canonical_keys(options or {}, where="the options"))
    for setting in filter(_sets_a_part, settings):
        _apply_setting(wanted, setting)
    return parse_recipe(wanted, where=where)


def _sets_a_part(setting: str) -> bool:
    """True for ``data.format=alpaca``."""
    return "." in setting.partition("=")[0]


def parse_recipe(wanted: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate keys that are already canonical; ``null`` leaves a setting as it is by itself."""
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if "deepspeed" in wanted:
        wanted = with_deepspeed_file(wanted, where=where)
    if "model" not in wanted:
        raise RecipeError(
            f"{where}: no model is named",
            hint="model: meta-llama/Llama-3.1-8B, or --model on the command line; `fitune init` writes a recipe",
        )
    try:
        return Recipe.model_validate(wanted)
    except ValidationError as error:
        raise RecipeError(described(error, where=where, known=SourceRecipe)) from None


def canonical_keys(raw: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Replace other frameworks' names and values by ours; refuse unknown keys and two names for one setting."""
    _refuse_unknown(raw, where=where)
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if key in SWITCHES:
            switched = read_switch(key, value, where=where)
            if switched is None:
                continue
            name, value = switched
        refuse_foreign_value(name, value, where=where)
        # "auto" means "you choose", where there is a choice
        is_left_open = str(value).lower() == "auto" and Recipe.model_fields[name].default is None
        value = None if is_left_open else canonical_value(name, value)
        if name in spelled and result[name] != value:
            raise RecipeError(
                f"{where}: {spelled[name]!r} and {key!r} both set {name}, to {result[name]!r} and {value!r}",
                hint=f"keep one of them, as {name}",
            )
        spelled[name] = key
        result[name] = value
    return result


def _refuse_unknown(raw: Mapping[str, Any], *, where: str) -> None:
    """Raises RecipeError for all unknown keys at once, each with what it may have been meant for."""
    known = [*Recipe.model_fields, *ALIASES, *SWITCHES]
    unknown = [key for key in raw if key not in known]
    hints = [FOREIGN_FILES.get(key) or did_you_mean(str(key), known) for key in unknown]
    if len(unknown) == 1:
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}", hint=hints[0] or EVERY_KEY)
    if unknown:
        lines = [
            f"  {key!r}" + (f": {hint}" if hint else "") for key, hint in zip(unknown, hints, strict=True)
        ]
        raise RecipeError("\n".join([f"{where}: {len(unknown)} unknown keys", *lines]))


def _apply_setting(wanted: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting!r} is not of the form key=value", hint="--set lora_r=32")
    head, *rest = key.strip().split(".")
    name = ALIASES.get(head, head)
    field = Recipe.model_fields.get(name)
    kind = Any if field is None or head in SWITCHES else reduce(type_inside, rest, field.annotation)
    value = typed_value(kind, text, where=f"--set {setting}")
    if rest:
        value = _set_inside(_with_parts(name, wanted.get(name), setting), rest, value, setting)
    wanted.update(canonical_keys({head: value}, where=f"--set {setting}"))


def _set_inside(container: Any, keys: list[str], value: Any, setting: str) -> Any:
    """A copy of ``container`` with the value at ``keys`` (list positions or names) replaced.

    In a list of one the position may be left out: ``data.format=alpaca``.
    """
    if not keys:
        return value
    head, *rest = keys
    if isinstance(container, list):
        if not head.isdecimal() and len(container) <= 1:
            return [_set_inside(container[0] if container else None, keys, value, setting)]
        if not head.isdecimal() or int(head) >= len(container):
            raise RecipeError(f"--set {setting}: {head!r} is no position in a list of {len(container)}")
        items = list(container)
        items[int(head)] = _set_inside(items[int(head)], rest, value, setting)
        return items
    inside = {} if container is None else container
    if not isinstance(inside, dict):
        raise RecipeError(f"--set {setting}: there is nothing inside {container!r} to set")
    return {**inside, head: _set_inside(_with_parts(head, inside.get(head), setting), rest, value, setting)}


def _with_parts(name: str, value: Any, setting: str) -> Any:
    """Sources and columns, which may be written as one text, as a list and a mapping; any other value as it is."""
    if name in ("data", "eval_data"):
        return [as_source(one) for one in as_sources(value)]
    try:
        return as_columns(value) if name == "columns" else value
    except ValueError as why:
        raise RecipeError(f"--set {setting}: {name} = {value!r}: {why}") from None


def dump_recipe(recipe: Recipe, *, anywhere: bool = False) -> str:
    """YAML of the settings that were given, in the order of the Recipe; ``anywhere``: for a reader in any folder."""
    keys = with_absolute_paths(given_keys(recipe)) if anywhere else given_keys(recipe)
    text: str = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=120)
    return text


def given_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys that were given, inside sources too, and among them those that were given their default: max_grad_norm
    and weight mean another thing when they are given."""
    return recipe.model_dump(mode="json", exclude_unset=True)
